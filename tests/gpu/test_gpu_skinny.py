"""Products of few tokens on the device, at the sizes of real models, against float64."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.engine.attention_cases import relative_error
from harness.engine.skinny_cases import Case, compute, draw, reference
from parrot_engine.attention.launch import device_limits
from parrot_engine.kernels.matmul.skinny_tuning import MAX_NORM_TOKENS, tuning_for
from parrot_engine.kernels.tuning import Product, Tuning
from parrot_engine.models.ops import Affine, Norm, Residual
from parrot_engine.models.triton_ops import TritonOps
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]

BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
#: Outputs, columns, and what is fused where such a weight stands in a model.
SIZES = [
    (6144, 4096, "n"),
    (4096, 4096, "r"),
    (14_336, 4096, "ng"),
    (4096, 14_336, "r"),
    (1152, 896, "nb"),
    (896, 896, "r"),
    (4864, 896, "ng"),
    (896, 4864, "r"),
    (2050, 1001, "nb"),
    (77, 130, "ngb"),
]
#: Every combination is compiled, for each class of numbers of tokens: other dtypes at few sizes.
CASES = [
    *((sizes, torch.bfloat16) for sizes in SIZES),
    *((sizes, torch.float16) for sizes in (SIZES[6], SIZES[8])),
    *((sizes, torch.float32) for sizes in (SIZES[4], SIZES[9])),
]


def _tuning(case: Case) -> Tuning | None:
    product = Product(
        case.num_tokens,
        case.out_size,
        case.in_size,
        case.dtype,
        gated="g" in case.fused,
        norm="n" in case.fused,
    )
    limits = device_limits(torch.device("cuda"))
    return tuning_for(product, limits.shared_memory, copy_engine=limits.copy_engine)


@pytest.mark.parametrize(("sizes", "dtype"), CASES)
def test_against_float64(sizes: tuple[int, int, str], dtype: torch.dtype) -> None:
    # Of 2 tokens there is the same as of 3 and 4, but for the table.
    *shape, fused = sizes
    for num_tokens in (1, 3, 4, 5, 8, 15, 16, 17, 32, 63, 64, 100, 128):
        # The norm is apart from 17 tokens on.
        letters = fused if num_tokens <= MAX_NORM_TOKENS else fused.replace("n", "")
        case = Case(num_tokens, *shape, letters, dtype)
        tuning = _tuning(case)
        if tuning is None:
            # Torch's product: in bfloat16 only where it was measured to be faster.
            assert dtype is not torch.bfloat16 or num_tokens > 16
            continue
        operands = draw(case, "cuda")
        out = compute(case, operands, tuning)
        assert relative_error(out, reference(case, operands)) < BOUNDS[dtype], tuning


@pytest.mark.parametrize("num_tokens", [1, 16])
def test_a_head_writes_float32(num_tokens: int) -> None:
    case = Case(num_tokens, 128_256, 1024, "n", torch.bfloat16, torch.float32)
    tuning = _tuning(case)
    assert tuning is not None
    operands = draw(case, "cuda")
    out = compute(case, operands, tuning)
    assert out.dtype is torch.float32
    # x times the norm's weight is rounded for matrix instructions; nothing else is.
    bound = 2e-6 if tuning.kind == "vector" else 3e-3
    assert relative_error(out, reference(case, operands)) < bound


@pytest.mark.parametrize(("num_tokens", "splits"), [(5, 2), (16, 4)])
def test_columns_cut_among_programs(num_tokens: int, splits: int) -> None:
    case = Case(num_tokens, 896, 4864, "br", torch.bfloat16)
    operands = draw(case, "cuda")
    tuning = Tuning("tile", 8 if num_tokens <= 8 else 16, 16, 256, 4, 3, splits)
    out = compute(case, operands, tuning)
    assert relative_error(out, reference(case, operands)) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("sizes", SIZES[:4])
@pytest.mark.parametrize("num_tokens", [4, 8, 16, 32, 64])
def test_rows_know_nothing_of_each_other(num_tokens: int, sizes: tuple[int, int, str]) -> None:
    """The same bits in every run, and whatever the other rows hold, be it NaN."""
    *shape, fused = sizes
    letters = fused if num_tokens <= MAX_NORM_TOKENS else fused.replace("n", "")
    case = Case(num_tokens, *shape, letters, torch.bfloat16)
    tuning = _tuning(case)
    if tuning is None:
        return
    operands = draw(case, "cuda")
    out = compute(case, operands, tuning)
    for _ in range(5):
        assert torch.equal(compute(case, operands, tuning), out)
    others = operands._replace(x=operands.x.clone())
    others.x[1:] = float("nan")
    poisoned = compute(case, others, tuning)
    assert torch.equal(poisoned[:1], out[:1])
    assert bool(poisoned[1:].isnan().all())


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 40, 100])
def test_replayed_from_a_graph(num_tokens: int) -> None:
    """A captured layer sees what its inputs hold when it is replayed."""
    ops = TritonOps()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    norm = Norm(normal(896), 1e-6)
    gate_up, down = Affine(normal(2 * 4864, 896) / 30), Affine(normal(896, 4864) / 70)
    x = normal(num_tokens, 896)

    def layer() -> Tensor:
        inner, hidden = ops.norm_gated(Residual(x), norm, gate_up, "silu")
        return ops.total(ops.linear_onto(hidden, inner, down))

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for _ in range(3):
        x.copy_(normal(num_tokens, 896))
        graph.replay()
        assert torch.equal(captured, layer())


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
