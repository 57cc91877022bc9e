"""How long an engine's steps take, learned from its counters.

A heartbeat says how many steps were run, how many tokens filled, how much KV is in use, and how
many seconds the engine was busy. Between two of them, for a step on average,

    busy = a + b x filled tokens + c x tokens in use

holds roughly: `a` is what a step costs whatever is in it, `b` what a prefilled token adds, `c` what
a token of a running context adds to each step. They are fitted by least squares that forget, drawn
to a first guess by as much as a few readings weigh: what the readings cannot tell stays as guessed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from parrot_engine.protocol import EngineStats
from parrot_scheduler.task import StepModel

#: What an earlier reading counts when a new one comes.
_FORGET = 0.98
#: Readings before the fit is believed.
_ENOUGH = 5
#: What the first guess counts, in readings of a step that takes as long as guessed.
_GUESS_COUNTS = 0.05
#: A term is never less than this share of its guess: none is free.
_LEAST = 0.02


class StepTimes:
    """Fits one engine.

    Args:
        guess: believed until there are enough readings, and for what they cannot tell.
        capacity_tokens: tokens of KV that fit on the engine; 0: it does not tell of them.
        block_tokens: tokens of one block.
    """

    def __init__(self, guess: StepModel, capacity_tokens: int = 0, block_tokens: int = 0) -> None:
        self._guess = guess
        self._capacity = capacity_tokens
        self._block_tokens = block_tokens
        self._before: EngineStats | None = None
        self._readings = 0
        #: What a unit of each term takes, as guessed: the fit is in multiples of these.
        self._units = np.array(
            [guess.weights_s + guess.overhead_s, guess.prefill_token_s, guess.context_token_s]
        )
        self._squares = np.eye(3) * _GUESS_COUNTS
        self._products = np.full(3, _GUESS_COUNTS)

    def note(self, stats: EngineStats) -> StepModel | None:
        """A heartbeat came; a new model when it tells something."""
        before, self._before = self._before, stats
        if before is None:
            return None
        steps = stats.steps - before.steps
        busy_s = stats.busy_s - before.busy_s
        filled = (stats.filled_tokens - stats.cached_tokens) - (
            before.filled_tokens - before.cached_tokens
        )
        if steps <= 0 or busy_s <= 0.0 or filled < 0:
            return None
        # Per step, so that a long interval does not outweigh a short one by its square.
        terms = np.array([1.0, filled / steps, (self._used(before) + self._used(stats)) / 2])
        # In steps of the guessed length.
        row = terms * self._units / self._units[0]
        keep = np.eye(3) * (_GUESS_COUNTS * (1.0 - _FORGET))
        self._squares = self._squares * _FORGET + np.outer(row, row) + keep
        self._products = self._products * _FORGET + row * (busy_s / steps / self._units[0])
        self._products += _GUESS_COUNTS * (1.0 - _FORGET)
        self._readings += 1
        return self._fit() if self._readings >= _ENOUGH else None

    def _used(self, stats: EngineStats) -> float:
        """Tokens that contexts hold."""
        return max(0.0, float(self._capacity - stats.free_blocks * self._block_tokens))

    def _fit(self) -> StepModel:
        step_s, token_s, context_s = _solve(self._squares, self._products) * self._units
        return StepModel(
            weights_s=float(step_s),
            context_token_s=float(context_s),
            prefill_token_s=float(token_s),
            overhead_s=0.0,
        )


def _solve(
    squares: npt.NDArray[np.float64], products: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The least squares, none of the three below its least."""
    found = np.full(len(products), _LEAST)
    free = np.ones(len(products), dtype=bool)
    while free.any():
        rest = products[free] - squares[np.ix_(free, ~free)] @ found[~free]
        values = np.linalg.solve(squares[np.ix_(free, free)], rest)
        found[free] = np.maximum(values, _LEAST)
        if (values >= _LEAST).all():
            break
        free[np.flatnonzero(free)[values < _LEAST]] = False
    return found
