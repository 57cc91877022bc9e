"""Packed experts on the device, at the sizes of real models, against float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.engine.attention_cases import relative_error
from harness.engine.checkpoints import CONFIGS
from harness.engine.expert_cases import Operands, compute, draw_packed, reference
from harness.engine.paged import PagedHarness
from harness.engine.quantized_cases import KINDS
from harness.engine.quantized_checkpoints import write_checkpoint
from parrot_engine.attention.launch import device_limits
from parrot_engine.kernels.experts.grouped_tuning import (
    Mixture,
    MixtureTuning,
    packed_mixture_tuning,
)
from parrot_engine.models.experts import SparseMLP
from parrot_engine.models.loader import load_model
from parrot_engine.models.ops import Affine, Experts
from parrot_engine.models.triton_ops import TritonOps
from parrot_engine.runner.graphs import CudaCapture
from parrot_engine.runner.loader import load_runner
from parrot_engine.settings import BuiltinSettings
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]

DEVICE = torch.device("cuda:0")
BOUND = 6e-3
#: What x in one number of 8 bits leaves, in both products.
ROUNDED_BOUND = 6e-2
WITHOUT_ORDER = [kind for kind, (*_, has_order) in KINDS.items() if not has_order]
QWEN3 = (8, 128, 2048, 768)
#: Experts of a token, experts, row and inner row; not all whole tiles.
SHAPES = [(2, 8, 1024, 512), (4, 32, 736, 352)]


def chosen(case: Mixture, operands: Operands) -> MixtureTuning:
    limits, packed = device_limits(DEVICE), operands.experts.packed
    assert packed is not None
    return packed_mixture_tuning(case, packed, limits.shared_memory, copy_engine=limits.copy_engine)


@pytest.mark.parametrize("kind", WITHOUT_ORDER)
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 64, 200, 1000])
def test_against_float64(kind: str, num_tokens: int) -> None:
    for shape in SHAPES:
        case = Mixture(num_tokens, *shape, torch.bfloat16)
        operands = draw_packed(case, kind, "cuda", bounded=num_tokens == 64)
        tuning = chosen(case, operands)
        out = compute(case, operands, tuning)
        assert relative_error(out, reference(case, operands)) < BOUND, tuning


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 256, 1024, 4096])
def test_blocks_of_128(num_tokens: int) -> None:
    """The shape of Qwen3-30B-A3B; by pointer as well."""
    case = Mixture(num_tokens, *QWEN3, torch.bfloat16)
    operands = draw_packed(case, "fp8-blocks", "cuda", group=128)
    expected = reference(case, operands)
    tuning = chosen(case, operands)
    assert relative_error(compute(case, operands, tuning), expected) < BOUND, tuning
    pointers = MixtureTuning(*(part._replace(descriptors=False) for part in tuning))
    assert relative_error(compute(case, operands, pointers), expected) < BOUND, tuning


@pytest.mark.parametrize("kind", ["fp8-rows", "fp8-blocks"])
def test_activations_of_8_bits_where_the_checkpoint_asks_for_them(kind: str) -> None:
    case = Mixture(2048, 4, 32, 1024, 512, torch.bfloat16)
    operands = draw_packed(case, kind, "cuda", group=128)
    packed = operands.experts.packed
    assert packed is not None
    asked = packed._replace(
        gate_up=packed.gate_up._replace(activations="dynamic"),
        down=packed.down._replace(activations="dynamic"),
    )
    operands = operands._replace(experts=operands.experts._replace(packed=asked))
    out = compute(case, operands, chosen(case, operands))
    assert relative_error(out, reference(case, operands)) < ROUNDED_BOUND


@pytest.mark.parametrize("num_tokens", [4, 64, 256])
def test_rows_know_nothing_of_each_other(num_tokens: int) -> None:
    """The same bits in every run, and whatever the other rows hold, be it NaN."""
    case = Mixture(num_tokens, 8, 64, 1024, 512, torch.bfloat16)
    operands = draw_packed(case, "fp8-blocks", "cuda", group=128)
    tuning = chosen(case, operands)
    out = compute(case, operands, tuning)
    for _ in range(5):
        assert torch.equal(compute(case, operands, tuning), out)
    others = operands._replace(x=operands.x.clone(), logits=operands.logits.clone())
    others.x[1:] = float("nan")
    others.logits[2:] = float("nan")
    poisoned = compute(case, others, tuning)
    assert torch.equal(poisoned[:1], out[:1])
    assert bool(poisoned[1:].isnan().all())


@pytest.mark.parametrize("num_tokens", [1, 16, 100])
def test_replayed_from_a_graph(num_tokens: int) -> None:
    """A captured mixture routes what its input holds when it is replayed."""
    ops = TritonOps()
    case = Mixture(num_tokens, 8, 64, 1024, 512, torch.bfloat16)
    x, weights, _, hidden = draw_packed(case, "fp8-blocks", "cuda", group=128)
    assert hidden is not None
    router = Affine(torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16) / 16)
    experts = Experts(weights, 8, normalize=True)

    def layer() -> Tensor:
        return ops.total(ops.experts_onto(hidden, x, router, experts))

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(captured, layer())


@pytest.mark.parametrize("form", ["fp8-tensor", "fp8-rows", "fp8-blocks", "awq", "w4a16"])
def test_checkpoints(form: str, tmp_path: Path) -> None:
    """Loaded packed, the weights are the dense ones, and graphs give the tokens of launches."""
    config = CONFIGS["qwen3-moe"]
    config = type(config).from_dict(
        {**config.to_dict(), "hidden_size": 128, "moe_intermediate_size": 64}
    )
    path, dense = write_checkpoint(tmp_path, form, config)
    ours, theirs = (
        load_model(folder, DEVICE, dtype, kernels="triton").model
        for folder, dtype in ((path, "bfloat16"), (dense, "float32"))
    )
    expected = dict(theirs.named_modules())
    num_packed = 0
    for name, module in ours.named_modules():
        if not isinstance(module, SparseMLP):
            continue
        other = expected[name]
        assert module.packed is not None
        assert isinstance(other, SparseMLP)
        for weight, whole in zip(module.packed, (other.gate_up, other.down), strict=True):
            values = weight.dense(torch.float32).view(whole.shape)
            torch.testing.assert_close(values, whole.data, rtol=1e-5, atol=1e-6)
        num_packed += 1
    assert num_packed == 1
    settings = BuiltinSettings(device="cuda", dtype="bfloat16", num_blocks=64, cuda_graphs="off")
    prompts = [[5, 6, 7]]
    plain = load_runner(path, settings)
    tokens, _ = PagedHarness(plain).generate(prompts, 12)
    runner = load_runner(path, replace(settings, cuda_graphs="lazy"))
    graphs = runner.use_graphs(CudaCapture(DEVICE), max_rows=8, max_context=512, max_tokens=256)
    assert graphs is not None
    assert PagedHarness(runner).generate(prompts, 12)[0] == tokens
    assert graphs.num_replays > 5
