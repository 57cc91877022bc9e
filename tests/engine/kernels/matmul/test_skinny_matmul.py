"""Products of few tokens in Triton's interpreter against float64."""

from __future__ import annotations

import itertools

import harness.engine.interpreted  # noqa: F401 -- skips this module where it cannot run
import pytest
import torch
from harness.engine.attention_cases import relative_error
from harness.engine.skinny_cases import Case, compute, draw, reference
from parrot_engine.kernels.matmul.skinny_tuning import MAX_TOKENS, TABLE, tuning_for
from parrot_engine.kernels.tuning import Measured, Product, Tuning, read_table
from parrot_engine.models.ops import Affine, Norm, Ops, Residual
from parrot_engine.models.triton_ops import TritonOps
from torch import Tensor

pytestmark = pytest.mark.usefixtures("poison")

#: bfloat16 is looser than on a device: the interpreter cuts where a GPU rounds.
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1.2e-2}
#: Few large programs, which the interpreter is fastest with; loops still take several turns.
VECTORS = {tokens: Tuning("vector", tokens, 32, 64, 4, 1) for tokens in (1, 2, 4)}
TILES = {tokens: Tuning("tile", tokens, 32, 64, 4, 2) for tokens in (8, 16)}
#: Where the copy engine fetches tiles, which may hang over the edges of what they are cut from.
STREAMED = {
    tokens: Tuning("tile", tokens, 32, 64, 4, 2, descriptors=True) for tokens in (16, 64, 128)
}
EPS = 1e-6
FUSIONS = ["", "b", "r", "br", "n", "nb", "ng", "ngb", "nr", "g"]


def _tuning(num_tokens: int, kind: str = "") -> Tuning:
    known = {"": VECTORS | TILES, "tile": TILES, "streamed": STREAMED}[kind]
    return known[min(tokens for tokens in known if tokens >= num_tokens)]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 8, 15, 16])
def test_fusions(num_tokens: int) -> None:
    for fused in FUSIONS:
        case = Case(num_tokens, 45, 100, fused)
        operands = draw(case)
        out = compute(case, operands, _tuning(num_tokens))
        assert out.shape == (num_tokens, 45)
        assert relative_error(out, reference(case, operands)) < BOUNDS[torch.float32], fused


@pytest.mark.parametrize("sizes", [(1, 1), (7, 3), (32, 64), (33, 65), (64, 129), (130, 31)])
@pytest.mark.parametrize("num_tokens", [1, 3, 5, 16])
def test_odd_sizes(num_tokens: int, sizes: tuple[int, int]) -> None:
    for fused in ("br", "ngb"):
        case = Case(num_tokens, *sizes, fused)
        operands = draw(case)
        out = compute(case, operands, _tuning(num_tokens))
        assert relative_error(out, reference(case, operands)) < BOUNDS[torch.float32]


@pytest.mark.parametrize("sizes", [(1, 8), (32, 64), (45, 104), (70, 200)])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 63, 64, 65, 128])
def test_what_the_copy_engine_fetches(num_tokens: int, sizes: tuple[int, int]) -> None:
    """Tiles beyond the last token, output and column; the norm is apart from 17 tokens on."""
    for fused in ("br", "g", "gb", *(("n", "ng") if num_tokens <= 16 else ())):
        for splits in (1,) if set(fused) & set("ng") else (1, 2, 4):
            case = Case(num_tokens, *sizes, fused)
            operands = draw(case)
            tuning = _tuning(num_tokens, "streamed")._replace(splits=splits)
            out = compute(case, operands, tuning)
            assert relative_error(out, reference(case, operands)) < BOUNDS[torch.float32], fused


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 4, 6, 16])
def test_narrow_dtypes(num_tokens: int, dtype: torch.dtype) -> None:
    for fused in ("", "nb", "ng", "r"):
        case = Case(num_tokens, 40, 96, fused, dtype)
        operands = draw(case)
        out = compute(case, operands, _tuning(num_tokens))
        assert out.dtype is dtype
        error = relative_error(out, reference(case, operands))
        assert error < BOUNDS[dtype]
        # The output is not rounded before it is widened, as a head's logits are to be.
        wide = compute(case._replace(out_dtype=torch.float32), operands, _tuning(num_tokens))
        assert wide.dtype is torch.float32
        assert relative_error(wide, reference(case, operands)) < 0.95 * error


@pytest.mark.parametrize("splits", [2, 3, 4])
@pytest.mark.parametrize("in_size", [31, 64, 200, 256])
def test_columns_cut_among_programs(in_size: int, splits: int) -> None:
    """More parts than tiles included: an empty part adds nothing."""
    for num_tokens, fused in ((5, "br"), (16, "")):
        case = Case(num_tokens, 45, in_size, fused)
        operands = draw(case)
        tuning = _tuning(num_tokens)._replace(splits=splits)
        out = compute(case, operands, tuning)
        assert relative_error(out, reference(case, operands)) < BOUNDS[torch.float32]


@pytest.mark.parametrize(
    ("num_tokens", "kind"), [(3, "vector"), (3, "tile"), (13, "tile"), (5, "streamed")]
)
def test_rows_know_nothing_of_each_other(num_tokens: int, kind: str) -> None:
    """The same bits whatever the other rows hold, be it NaN; a token alone in a tile as well."""
    case = Case(num_tokens, 45, 104, "nb")
    operands = draw(case)
    tuning = _tuning(num_tokens, kind if kind != "vector" else "")
    out = compute(case, operands, tuning)
    others = operands._replace(x=operands.x.clone())
    others.x[1:] = float("nan")
    poisoned = compute(case, others, tuning)
    assert torch.equal(poisoned[:1], out[:1])
    assert bool(poisoned[1:].isnan().all())
    alone = compute(case._replace(num_tokens=1), operands._replace(x=operands.x[:1]), tuning)
    assert torch.equal(alone, out[:1])


@pytest.mark.parametrize(
    ("copy_engine", "shared_memory"), [(False, 99 * 1024), (False, 163 * 1024), (True, 227 * 1024)]
)
def test_the_table(shared_memory: int, *, copy_engine: bool) -> None:
    """Every class has a kernel that takes it, within the memory of the GPU; else torch."""
    found = set()
    for num_tokens in range(1, MAX_TOKENS + 2):
        for sizes in ((896, 4864), (6144, 4096), (14336, 4096), (151936, 896), (4864, 900)):
            for gated, norm in itertools.product((False, True), repeat=2):
                case = Product(num_tokens, *sizes, torch.bfloat16, gated, norm)
                tuning = tuning_for(case, shared_memory, copy_engine=copy_engine)
                if tuning is None:
                    continue
                found.add((tuning.kind, tuning.descriptors))
                assert tuning.tokens >= num_tokens
                assert tuning.splits == 1 or not (gated or norm)
                assert num_tokens <= 16 or (tuning.descriptors and not norm)
                assert not tuning.descriptors or sizes[1] % 8 == 0
                rows = tuning.block_out * (2 if gated else 1) + tuning.tokens
                stages = tuning.num_stages - (0 if tuning.num_warps >= 4 else 1)
                tile = rows * tuning.block_in * 2 * stages
                assert tuning.kind == "vector" or tile <= shared_memory
    kinds = {("vector", False), ("tile", False)}
    assert found == (kinds | {("tile", True)} if copy_engine else kinds)


def test_what_takes_torchs_product() -> None:
    wide = Product(8, 4096, 4096, torch.float32)
    for case in (
        wide,
        wide._replace(dtype=torch.float16, norm=True),
        wide._replace(num_tokens=17, dtype=torch.bfloat16, norm=True),
        wide._replace(num_tokens=MAX_TOKENS + 1, dtype=torch.bfloat16),
    ):
        assert tuning_for(case, 227 * 1024, copy_engine=True) is None


MEASURED = read_table(TABLE)


@pytest.mark.parametrize("measured", MEASURED, ids=str)
def test_a_measured_size_gets_its_own_row_and_so_does_one_near_it(measured: Measured) -> None:
    _, gated, out_size, in_size = measured
    for num_tokens, choice in MEASURED[measured].items():
        for near in (0, 16):
            case = Product(num_tokens, out_size + near, in_size - near, torch.bfloat16, gated)
            tuning = tuning_for(case, 227 * 1024, copy_engine=True)
            assert (tuning is None) == (choice is None)
            if tuning is not None and choice is not None:
                assert (tuning.block_out, tuning.num_warps) == (choice.block_out, choice.num_warps)


def _tune(case: Product, _: torch.device) -> Tuning | None:
    """Up to 16 tokens everything is fused; then all but the norm, columns cut; from 65 nothing."""
    if case.num_tokens <= 16:
        return _tuning(case.num_tokens)
    if case.norm or case.num_tokens > 64:
        return None
    return _tuning(case.num_tokens, "streamed")._replace(splits=1 if case.gated else 2)


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 17, 65])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_operations_are_those_of_torch(num_tokens: int, activation: str) -> None:
    """A layer's operations with the residual left open and not."""
    ops, expected = TritonOps(_tune), Ops()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    generator = torch.Generator().manual_seed(0)
    norm = Norm(normal(40), EPS)
    linear, head = Affine(normal(24, 40), normal(24)), Affine(normal(70, 40))
    down = Affine(normal(40, 12), normal(40))
    x, delta = normal(num_tokens, 40), normal(num_tokens, 40)
    for residual in (Residual(x), Residual(x, delta)):
        for ours, theirs in (
            (ops.norm_linear(residual, norm, linear), expected.norm_linear(residual, norm, linear)),
            (
                ops.norm_gated(residual, norm, linear, activation),
                expected.norm_gated(residual, norm, linear, activation),
            ),
        ):
            torch.testing.assert_close(ours.out, theirs.out, rtol=1e-5, atol=1e-5)
            assert torch.equal(ours.hidden, theirs.hidden)
    inner = normal(num_tokens, 12)
    onto = ops.linear_onto(x, inner, down)
    torch.testing.assert_close(
        ops.total(onto), expected.total(expected.linear_onto(x, inner, down))
    )
    assert (onto.delta is None) == (num_tokens <= 64)
    logits = ops.logits(x, norm, head)
    given = torch.full_like(logits, float("nan"))
    assert ops.logits(x, norm, head, given).data_ptr() == given.data_ptr()
    assert torch.equal(given, logits)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, expected.logits(x, norm, head), rtol=1e-5, atol=1e-5)
