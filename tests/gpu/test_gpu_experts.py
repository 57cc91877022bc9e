"""Mixtures of experts on the device, at the sizes of real models, against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.engine.attention_cases import relative_error
from harness.engine.checkpoints import CONFIGS, VOCAB_SIZE, make_checkpoint
from harness.engine.expert_cases import compute, draw, reference
from harness.engine.paged import PagedHarness
from parrot_engine.attention.launch import device_limits
from parrot_engine.kernels.experts.grouped_tuning import Mixture, MixtureTuning, mixture_tuning
from parrot_engine.models.ops import Affine, Experts
from parrot_engine.models.triton_ops import TritonOps
from parrot_engine.runner.graphs import CudaCapture
from parrot_engine.runner.loader import load_runner
from parrot_engine.settings import BuiltinSettings
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]

BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
#: Experts of a token, experts, row and inner row: Qwen3-30B-A3B, OLMoE, Mixtral's, odd ones.
SHAPES = [(8, 128, 2048, 768), (8, 64, 2048, 1024), (2, 8, 1024, 3584), (3, 7, 130, 77)]


def _tuning(case: Mixture) -> MixtureTuning:
    limits = device_limits(torch.device("cuda"))
    return mixture_tuning(case, limits.shared_memory, copy_engine=limits.copy_engine)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 16, 64, 200, 1000, 4096])
def test_against_float64(num_tokens: int, shape: tuple[int, int, int, int]) -> None:
    case = Mixture(num_tokens, *shape, torch.bfloat16)
    for normalize in (False, True):
        operands = draw(case, "cuda", residual=normalize)
        out = compute(case, operands, _tuning(case), normalize=normalize)
        error = relative_error(out, reference(case, operands, normalize=normalize))
        assert error < BOUNDS[torch.bfloat16], _tuning(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    for num_tokens in (1, 5, 100):
        case = Mixture(num_tokens, 8, 64, 512, 256, dtype)
        operands = draw(case, "cuda")
        out = compute(case, operands, _tuning(case))
        assert relative_error(out, reference(case, operands)) < BOUNDS[dtype]


@pytest.mark.parametrize("num_tokens", [1, 30, 500])
def test_biases_and_bounds(num_tokens: int) -> None:
    case = Mixture(num_tokens, 4, 32, 720, 720, torch.bfloat16)
    operands = draw(case, "cuda", bounded=True)
    out = compute(case, operands, _tuning(case))
    assert relative_error(out, reference(case, operands)) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("num_tokens", [4, 16, 64, 256])
def test_rows_know_nothing_of_each_other(num_tokens: int) -> None:
    """The same bits in every run, and whatever the other rows hold, be it NaN."""
    case = Mixture(num_tokens, 8, 128, 2048, 768, torch.bfloat16)
    operands = draw(case, "cuda")
    out = compute(case, operands, _tuning(case))
    for _ in range(5):
        assert torch.equal(compute(case, operands, _tuning(case)), out)
    others = operands._replace(x=operands.x.clone(), logits=operands.logits.clone())
    others.x[1:] = float("nan")
    others.logits[2:] = float("nan")
    poisoned = compute(case, others, _tuning(case))
    assert torch.equal(poisoned[:1], out[:1])
    assert bool(poisoned[1:].isnan().all())


@pytest.mark.parametrize("num_tokens", [1, 16, 100])
def test_replayed_from_a_graph(num_tokens: int) -> None:
    """A captured mixture routes what its input holds when it is replayed."""
    ops = TritonOps()
    case = Mixture(num_tokens, 8, 64, 1024, 512, torch.bfloat16)
    x, weights, _, hidden = draw(case, "cuda")
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


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "olmoe"])
def test_steps_through_graphs(name: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / name, CONFIGS[name])
    settings = BuiltinSettings(
        device="cuda", dtype="float32", num_blocks=200, block_size=16, cuda_graphs="off"
    )
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(1, VOCAB_SIZE - 1, (length,), generator=generator).tolist()
        for length in (1, 15, 40, 100)
    ]
    expected, _ = PagedHarness(load_runner(path, settings)).generate(prompts, 20, chunk=30)
    runner = load_runner(path, settings)
    graphs = runner.use_graphs(
        CudaCapture(torch.device("cuda")), max_rows=64, max_context=512, max_tokens=256
    )
    assert graphs is not None
    tokens, _ = PagedHarness(runner).generate(prompts, 20, chunk=30)
    assert tokens == expected
    assert graphs.num_replays > 20
