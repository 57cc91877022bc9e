"""Mixtures of experts in Triton's interpreter against float64."""

from __future__ import annotations

import harness.engine.interpreted  # noqa: F401 -- skips this module where it cannot run
import pytest
import torch
from harness.engine.attention_cases import relative_error
from harness.engine.expert_cases import compute, draw, reference, sum_of_ranks
from parrot_engine.kernels.experts import expert_routing
from parrot_engine.kernels.experts.expert_routing import align, choose
from parrot_engine.kernels.experts.grouped_tuning import (
    MAX_VECTOR_TOKENS,
    Mixture,
    MixtureTuning,
    mixture_tuning,
)
from parrot_engine.kernels.experts.mixture import mixture
from parrot_engine.kernels.tuning import Tuning
from parrot_engine.models.ops import Affine, Experts, Ops
from parrot_engine.models.triton_ops import TritonOps

pytestmark = pytest.mark.usefixtures("poison")

BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1.2e-2}
#: Few large programs, which the interpreter is fastest with; loops still take several turns.
VECTORS = MixtureTuning(Tuning("vector", 1, 16, 32, 4, 1), Tuning("vector", 1, 32, 16, 4, 2))
TILES = MixtureTuning(Tuning("tile", 16, 32, 32, 4, 2), Tuning("tile", 16, 32, 16, 4, 2))
STREAMED = MixtureTuning(*(tuning._replace(descriptors=True) for tuning in TILES))
CASE = Mixture(5, 3, 7, 40, 24, torch.float32)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_pairs_one_by_one(num_tokens: int) -> None:
    for normalize in (False, True):
        case = CASE._replace(num_tokens=num_tokens)
        operands = draw(case, residual=normalize)
        out = compute(case, operands, VECTORS, normalize=normalize)
        error = relative_error(out, reference(case, operands, normalize=normalize))
        assert error < BOUNDS[torch.float32]


@pytest.mark.parametrize("tuning", [TILES, STREAMED], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("num_tokens", [1, 6, 40])
def test_tiles_of_pairs(num_tokens: int, tuning: MixtureTuning) -> None:
    """Experts without a pair, with less than a tile of them, and with several tiles."""
    for top_k, num_experts in ((1, 3), (3, 7), (8, 8)):
        case = Mixture(num_tokens, top_k, num_experts, 40, 24, torch.float32)
        operands = draw(case, residual=top_k == 3)
        out = compute(case, operands, tuning, normalize=top_k == 3)
        error = relative_error(out, reference(case, operands, normalize=top_k == 3))
        assert error < BOUNDS[torch.float32]


@pytest.mark.parametrize("tuning", [VECTORS, TILES, STREAMED], ids=["vectors", "tiles", "streamed"])
def test_biases_and_bounds(tuning: MixtureTuning) -> None:
    operands = draw(CASE, bounded=True)
    out = compute(CASE, operands, tuning)
    assert relative_error(out, reference(CASE, operands)) < BOUNDS[torch.float32]
    operands.x[1, 3] = float("nan")
    assert bool(compute(CASE, operands, tuning)[1].isnan().all())


@pytest.mark.parametrize("tuning", [VECTORS, TILES], ids=["vectors", "tiles"])
def test_ranks_with_whole_experts_add_up(tuning: MixtureTuning) -> None:
    """Rows of other ranks' experts are never written (they are NaN here), and never read."""
    operands = draw(CASE, bounded=True)
    out = sum_of_ranks(CASE, operands, tuning)
    assert relative_error(out, reference(CASE, operands)) < BOUNDS[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    for tuning in (VECTORS, TILES):
        case = CASE._replace(dtype=dtype)
        operands = draw(case)
        out = compute(case, operands, tuning)
        assert out.dtype is dtype
        assert relative_error(out, reference(case, operands)) < BOUNDS[dtype]


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 16), (40, 64), (90, 16)])
def test_every_pair_is_in_a_tile_of_its_expert(
    num_tokens: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More pairs than are looked at in one go included; in the order of tokens."""
    monkeypatch.setattr(expert_routing, "_BLOCK", 128)
    monkeypatch.setattr(expert_routing, "_LARGE_BLOCK", 64)
    chosen = choose(torch.randn(num_tokens, 9), 2, normalize=True)
    tiles = align(chosen, 9, size)
    count = int(tiles.count)
    assert count <= tiles.capacity
    by_expert: dict[int, list[int]] = {}
    for expert, pairs in zip(
        tiles.experts[:count].tolist(), tiles.pairs.view(-1, size)[:count].tolist(), strict=True
    ):
        by_expert.setdefault(expert, []).extend(pairs)
    expected = chosen.experts.flatten().tolist()
    for expert, pairs in by_expert.items():
        own = [pair for pair, other in enumerate(expected) if other == expert]
        padding = len(pairs) - len(own)
        assert 0 <= padding < size
        assert pairs == own + [-1] * padding
    assert set(by_expert) == set(expected)


def test_experts_of_a_token_are_the_most_probable() -> None:
    logits = torch.randn(6, 11)
    logits[0, [2, 5]] = 4.0
    for normalize in (False, True):
        chosen = choose(logits, 3, normalize=normalize)
        factors, experts = logits.softmax(dim=-1).topk(3)
        if normalize:
            factors /= factors.sum(dim=-1, keepdim=True)
        assert chosen.experts[0, :2].tolist() == [2, 5]
        assert chosen.experts[1:].tolist() == experts[1:].tolist()
        torch.testing.assert_close(chosen.factors, factors)


@pytest.mark.parametrize("tuning", [VECTORS, TILES], ids=["vectors", "tiles"])
def test_rows_know_nothing_of_each_other(tuning: MixtureTuning) -> None:
    """The same bits whatever the other rows hold, be it NaN; experts of such rows exist."""
    operands = draw(CASE)
    out = compute(CASE, operands, tuning)
    others = operands._replace(x=operands.x.clone(), logits=operands.logits.clone())
    others.x[1:] = float("nan")
    others.logits[2:] = float("nan")
    with pytest.warns(RuntimeWarning, match="invalid value"):
        poisoned = compute(CASE, others, tuning)
    assert torch.equal(poisoned[:1], out[:1])
    assert bool(poisoned[1:].isnan().all())


def test_a_row_whose_logits_alone_are_not_numbers_does_not_pass_as_one() -> None:
    operands = draw(CASE)
    operands.logits[1, 3] = float("nan")
    chosen = choose(operands.logits, CASE.top_k, normalize=True)
    assert bool(((chosen.experts >= 0) & (chosen.experts < CASE.num_experts)).all())
    out = mixture(operands.x, operands.experts, chosen, VECTORS)
    assert bool(out[1].isnan().all())
    assert bool(out[[0, 2, 3, 4]].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared_memory", [99 * 1024, 163 * 1024, 227 * 1024])
def test_tiles_fit(shared_memory: int, dtype: torch.dtype) -> None:
    for num_tokens in (1, MAX_VECTOR_TOKENS, MAX_VECTOR_TOKENS + 1, 64, 256, 1024, 8192):
        case = Mixture(num_tokens, 8, 128, 2048, 768, dtype)
        tuning = mixture_tuning(case, shared_memory, copy_engine=shared_memory > 200_000)
        assert tuning.gate_up.kind == tuning.down.kind
        if tuning.gate_up.kind == "vector":
            continue
        assert tuning.gate_up.tokens == tuning.down.tokens
        for halves, part in ((2, tuning.gate_up), (1, tuning.down)):
            rows = halves * part.block_out + part.tokens
            assert rows * part.block_in * dtype.itemsize * part.num_stages <= shared_memory


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_operations_are_those_of_torch(num_tokens: int) -> None:
    case = Mixture(num_tokens, 3, 7, 40, 24, torch.float32)
    for bounded in (False, True):
        x, weights, _, residual = draw(case, bounded=bounded)
        assert residual is not None
        router = Affine(torch.randn(7, 40), torch.randn(7) if bounded else None)
        experts = Experts(weights, 3, normalize=bounded)
        ours = TritonOps().experts_onto(residual, x, router, experts)
        theirs = Ops().experts_onto(residual, x, router, experts)
        assert ours.delta is None
        torch.testing.assert_close(ours.hidden, Ops().total(theirs))
