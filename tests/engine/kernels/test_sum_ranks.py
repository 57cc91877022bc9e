"""Sums over ranks with residual and norm in Triton's interpreter, against float64."""

from __future__ import annotations

import harness.engine.interpreted  # noqa: F401 -- skips this module where it cannot run
import pytest
import torch
import torch.nn.functional as F
from harness.engine.attention_cases import relative_error
from parrot_engine.kernels.sum_ranks import BOXES, Exchange, empty_boxes, sum_ranks_onto
from torch import Tensor

pytestmark = pytest.mark.usefixtures("poison")

EPS = 1e-5
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3}
BITS = {torch.float32: torch.int32, torch.float16: torch.int16}
MAX_ROWS = 4


class Ranks:
    """Ranks of which one computes: the shares of the others lie in its boxes before it begins."""

    def __init__(self, ranks: int, rank: int, size: int, dtype: torch.dtype) -> None:
        count, self.nothing = empty_boxes(ranks, MAX_ROWS, size, dtype)
        self.boxes = [
            torch.full((count,), self.nothing, dtype=BITS[dtype]).view(BOXES, ranks, MAX_ROWS, size)
            for _ in range(ranks)
        ]
        addresses = torch.tensor([boxes.data_ptr() for boxes in self.boxes])
        self.exchange = Exchange(rank, addresses, torch.zeros(MAX_ROWS, dtype=torch.int32))

    def send(self, shares: list[Tensor], box: int) -> None:
        """Put the shares of all other ranks where they write them."""
        own = self.exchange.rank
        for rank, share in enumerate(shares):
            if rank != own:
                self.boxes[own][box, rank, : len(share)] = share.view(self.boxes[own].dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("ranks", "rank", "rows", "size"), [(2, 0, 3, 100), (2, 1, 1, 896), (4, 2, 4, 64)]
)
def test_every_turn_sums_normalises_and_empties(
    ranks: int, rank: int, rows: int, size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    them = Ranks(ranks, rank, size, dtype)
    weight = torch.randn(size, generator=generator).to(dtype)
    for turn in range(5):
        hidden, *shares = torch.randn(ranks + 1, rows, size, generator=generator).to(dtype)
        # What an empty place looks like must not be sent.
        shares[rank][0, :3] = -0.0
        box = turn % BOXES
        them.send(shares, box)
        norm = (weight, EPS) if turn < 4 else None
        out, summed = sum_ranks_onto(shares[rank], hidden, them.exchange, norm)
        exact = torch.stack([hidden, *shares]).double().sum(0)
        assert relative_error(summed, exact) < BOUNDS[dtype]
        if norm is None:
            assert out is summed
        else:
            exact = F.rms_norm(summed.double(), (size,), weight.double(), EPS)
            assert relative_error(out, exact) < BOUNDS[dtype]
        for other, boxes in enumerate(them.boxes):
            if other != rank:
                sent = boxes[box, rank, :rows]
                assert not (sent == them.nothing).any()
                assert torch.equal(sent.view(dtype), shares[rank])
        # What came the turn before is gone, and what came now is gone by the next.
        assert (them.boxes[rank][box - 1] == them.nothing).all()
        assert them.exchange.turns.tolist() == [turn + 1] * rows + [0] * (MAX_ROWS - rows)


def test_rows_count_their_turns_for_themselves() -> None:
    them = Ranks(2, 0, 16, torch.float32)
    ones = torch.ones(MAX_ROWS, 16)
    for turn, rows in enumerate((4, 1, 2, 4)):
        for row in range(rows):
            box = int(them.exchange.turns[row]) % BOXES
            them.boxes[0][box, 1, row] = (ones[row] * (turn + 2)).view(torch.int32)
        _, summed = sum_ranks_onto(ones[:rows], ones[:rows], them.exchange)
        assert torch.equal(summed, ones[:rows] * (turn + 4))
    assert them.exchange.turns.tolist() == [4, 3, 2, 2]
