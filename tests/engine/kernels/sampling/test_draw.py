"""Draws in Triton's interpreter against float64; tests/gpu has the same on a GPU."""

from __future__ import annotations

import harness.engine.interpreted  # noqa: F401 -- skips this module where it cannot run
import pytest
import torch
from harness.engine.draw_cases import Wish, hard_rows, may_yield, unfit_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_engine.kernels.sampling.draw import draw
from torch import Tensor

#: One column, less than a segment's lanes, a block of columns, and one more.
SIZES = [1, 5, 63, 65, 300, 4096, 4097]

wishes = st.builds(
    Wish,
    st.sampled_from([1e-6, 0.05, 0.8, 1.0, 3.0, 1e30]),
    st.none() | st.sampled_from([1, 2, 7, 50, 4096, 10**9]),
    st.none() | st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 1 - 2.0**-53, 1.0]),
    st.none() | st.sampled_from([1e-9, 0.02, 0.5, 1.0]),
)


def _drawn(
    logits: Tensor, batch: list[Wish], points: Tensor, rows: list[int] | None = None
) -> list[int]:
    """A token for each row of logits; -7 where none is drawn."""
    tokens = torch.full((len(logits),), -7, dtype=torch.int64)
    size = logits.shape[1]
    floors, top_k, top_p = (
        [getattr(wish, name) for wish in batch] for name in ("min_p", "top_k", "top_p")
    )
    draw(
        logits,
        logits.max(dim=-1).values,
        tokens,
        rows=None if rows is None else torch.tensor(rows),
        temperatures=torch.tensor([wish.temperature for wish in batch], dtype=torch.float64),
        points=points,
        floors=torch.tensor([p or 0.0 for p in floors]).double().log() if any(floors) else None,
        top_k=torch.tensor([k or size for k in top_k]) if any(top_k) else None,
        top_p=None
        if top_p.count(None) == len(top_p)
        else torch.tensor([1.0 if p is None else p for p in top_p], dtype=torch.float64),
    )
    found: list[int] = tokens.tolist()
    return found


def _points(count: int, seed: int) -> Tensor:
    points = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    points[0], points[-1] = 0.0, 1 - 2.0**-53
    return points


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SIZES), st.lists(wishes, min_size=13, max_size=13), st.integers(0, 10_000))
def test_equals_the_reference(size: int, batch: list[Wish], seed: int) -> None:
    logits = hard_rows(size, seed)
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed))
    logits = logits[order]
    points = _points(len(logits), seed)
    untouched = logits.clone()
    found = _drawn(logits, batch, points)
    assert torch.equal(logits, untouched)
    for row, wish, point, token in zip(logits, batch, points.tolist(), found, strict=True):
        assert may_yield(row, wish, point, token), (wish, point, token)


@pytest.mark.parametrize(
    "wish", [Wish(), Wish(top_k=9), Wish(top_p=0.8), Wish(top_k=40, top_p=0.9, min_p=0.1)]
)
def test_many_points_of_one_row(wish: Wish) -> None:
    logits = 2 * torch.randn(1, 500, generator=torch.Generator().manual_seed(1))
    points = _points(120, 2)
    found = _drawn(logits.repeat(120, 1), [wish] * 120, points)
    for point, token in zip(points.tolist(), found, strict=True):
        assert may_yield(logits[0], wish, point, token), (point, token)


def test_control_the_reference_notices_a_wrong_draw() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(1))
    [token] = _drawn(logits[None], [Wish(top_p=0.5)], torch.tensor([0.5], dtype=torch.float64))
    assert may_yield(logits, Wish(top_p=0.5), 0.5, token)
    assert not may_yield(logits, Wish(top_p=0.5), 0.51, token)
    assert not may_yield(logits, Wish(top_p=0.7), 0.5, token)
    assert not may_yield(logits, Wish(top_p=0.5, temperature=1.1), 0.5, token)


def test_rows_that_draw_among_others() -> None:
    logits = torch.cat([hard_rows(300, 4)[:4], unfit_rows(300)])
    rows = [3, 1, 5, 4, 6]
    batch = [Wish(0.7, top_p=0.9), Wish(top_k=3), Wish(top_k=3), Wish(top_p=0.9), Wish()]
    points = _points(5, 6)
    found = _drawn(logits, batch, points, rows)
    assert [found[index] for index in (0, 2, 4, 5, 6)] == [-7] * 5
    for at in range(2):
        assert may_yield(logits[rows[at]], batch[at], float(points[at]), found[rows[at]])


def test_ties_at_the_border_are_kept() -> None:
    logits = torch.zeros(1, 64)
    logits[0, 7] = -1.0
    points = torch.arange(63, dtype=torch.float64).add(0.5).div(63)
    found = _drawn(logits.repeat(63, 1), [Wish(top_k=1, top_p=0.01)] * 63, points)
    assert found == [token for token in range(64) if token != 7]


def test_does_not_depend_on_the_other_rows() -> None:
    logits = hard_rows(700, 9)
    batch = [Wish(0.8, top_k=30, top_p=0.9)] * len(logits)
    points = _points(len(logits), 3)
    together = _drawn(logits, batch, points)
    alone = [
        _drawn(logits[at : at + 1], batch[:1], points[at : at + 1])[0] for at in range(len(logits))
    ]
    assert together == alone
