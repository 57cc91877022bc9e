"""Kernels that start before their predecessor has ended give the same bits, in graphs as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from parrot_engine.attention.interface import AttentionShape
from parrot_engine.bench.kernels import decode_load, prefill_load
from parrot_engine.bench.layer import WAYS, Layers, chaining
from parrot_engine.bench.steps import dummy_runner
from parrot_engine.builtin.runner import ModelRunner
from parrot_engine.kernels import dependent
from parrot_engine.models.ops import Affine, Norm
from parrot_engine.models.triton_ops import TritonOps
from torch import Tensor

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["llama-8b", "qwen-0.5b"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return dummy_runner(64, 1024, 4, request.param)


def _replayed(work: Callable[[], Tensor]) -> list[Tensor]:
    """What a graph of `work` leaves, replayed many times without a pause; first and last."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    graph.replay()
    first = out.clone()
    for _ in range(200):
        graph.replay()
    return [first, out.clone()]


@pytest.mark.parametrize("way", ["late", "early-16-keys"])
@pytest.mark.parametrize("batch", [1, 3, 8, 64])
@torch.inference_mode()
def test_layers(runner: ModelRunner, batch: int, way: str) -> None:
    config = runner._model.config
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, 64)
    # The largest of them reads its prefix in wide items, on a stream of their own.
    shared = {8: 1024, 64: 6144}.get(batch, 0)
    loads = [decode_load(batch, shared + 130, shape, shared=shared)]
    if batch == 3:
        loads.append(prefill_load(100, 64, shape))
    for load in loads:
        step = Layers(runner, load)
        for work in (step.layers, step.attention):
            expected = work()
            with chaining(WAYS[way]):
                assert dependent.chaining_on(expected) == WAYS[way]
                for out in _replayed(work):
                    assert torch.equal(out, expected)
            assert not bool(expected.isnan().any())


@torch.inference_mode()
def test_logits_of_many_rows_are_not_rounded_on_the_way() -> None:
    hidden = torch.randn(40, 896, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(5000, 896, device="cuda", dtype=torch.bfloat16)
    ops, norm = TritonOps(), Norm(torch.ones(896, device="cuda", dtype=torch.bfloat16), 1e-6)
    logits = ops.logits(hidden, norm, Affine(weight))
    exact = ops.rms_norm(hidden, norm).double() @ weight.double().t()
    assert logits.dtype is torch.float32
    assert float((logits - exact).norm() / exact.norm()) < 1e-5
    given = torch.full_like(logits, float("nan"))
    assert torch.equal(ops.logits(hidden, norm, Affine(weight), given), logits)
    assert torch.equal(given, logits)
