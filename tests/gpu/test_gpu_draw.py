"""Draws on the device against float64, and the whole sampler with them."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.engine.draw_cases import Wish, hard_rows, may_yield, unfit_rows
from parrot_engine.batch import SamplingRow
from parrot_engine.protocol import SamplingParams
from parrot_engine.runner.sampler import sample
from parrot_engine.runner.step_inputs import uniforms
from torch import Tensor

pytestmark = pytest.mark.gpu

WISHES = [
    Wish(),
    Wish(0.8, top_p=0.95),
    Wish(1.0, top_k=50),
    Wish(0.7, top_k=200, top_p=0.9),
    Wish(1.5, top_p=0.999, min_p=0.01),
    Wish(1.0, min_p=0.2),
    Wish(1e-4, top_p=0.5),
    Wish(1e30, top_k=3, top_p=0.0),
]


def _uniform(seed: int) -> float:
    """The first number of a stream."""
    return float(uniforms([seed], [0])[0])


def _rows(wish: Wish, count: int, seed: int) -> list[SamplingRow]:
    params = SamplingParams(
        temperature=wish.temperature,
        top_k=wish.top_k or 0,
        top_p=1.0 if wish.top_p is None else wish.top_p,
        min_p=wish.min_p or 0.0,
    )
    return [SamplingRow(params, [], [], seed + index, frozenset()) for index in range(count)]


def _tokens(logits: Tensor, rows: list[SamplingRow]) -> list[int | None]:
    return [outcome.token_id for outcome in sample(logits.cuda(), rows, kernels="triton")]


@pytest.mark.parametrize("vocab_size", [1, 200, 4097, 128_256, 151_936])
@pytest.mark.parametrize("wish", WISHES)
def test_equals_the_reference(vocab_size: int, wish: Wish) -> None:
    logits = hard_rows(vocab_size, vocab_size)
    for seed in (0, 100):
        rows = _rows(wish, len(logits), seed)
        found = _tokens(logits, rows)
        assert found == _tokens(logits, rows)
        for at, token in enumerate(found):
            assert token is not None
            assert may_yield(logits[at], wish, _uniform(seed + at), token), (at, token)


def test_rows_of_all_kinds_and_rows_that_are_unfit() -> None:
    logits = torch.cat([hard_rows(128_256, 3)[:8], unfit_rows(128_256)])
    rows = [_rows(WISHES[at % 8], 1, at)[0] for at in range(len(logits))]
    rows[5] = SamplingRow(SamplingParams(temperature=0), [], [], 0, frozenset())
    found = _tokens(logits, rows)
    assert found[8:] == [None] * 3
    assert found[5] == int(logits[5].argmax())
    for at in (0, 1, 2, 3, 4, 6, 7):
        token = found[at]
        assert token is not None
        assert may_yield(logits[at], WISHES[at], _uniform(at), token)
    # In any other company the same.
    assert _tokens(logits.flip(0), rows[::-1])[::-1] == found


def test_many_rows_at_once() -> None:
    logits = 2 * torch.randn(256, 128_256, generator=torch.Generator().manual_seed(0))
    rows = _rows(Wish(0.8, top_p=0.95), 256, 7)
    for at, token in enumerate(_tokens(logits, rows)[:32]):
        assert token is not None
        assert may_yield(logits[at], Wish(0.8, top_p=0.95), _uniform(7 + at), token)
