"""How long an engine's steps take, learned from its counters.

A heartbeat reports how many steps were run, how many tokens filled and generated, how much KV is in
use, and how many seconds the engine was busy. Between two of them, for a step on average,

    busy = a + b x filled tokens + c x tokens in use + d x generated tokens

holds roughly: `a` is what a step costs whatever is in it, `b` what a prefilled token adds, `c` what
a token of a running context adds to each step, `d` what a sequence does. Readings are few, noisy
and much alike, so each engine is fitted by what it differs from a first guess, in two parts: one
factor for all four,
which engines of one kind share (a slow machine, or a busy one), and least squares that forget for
the rest, drawn to that factor by as much as a few readings weigh.
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
#: What the common factor counts against an engine's own readings.
_PRIOR = 3.0
#: A term is never less than this share of its guess: none is free.
_LEAST = 0.02
#: The common factor is reported for an idle engine when it changed by so much.
_MIN_CHANGE = 1.25


class Scale:
    """The factor by which steps take longer than guessed, over all engines of one kind."""

    def __init__(self) -> None:
        self.readings = 0
        self._busy_s = self._guessed_s = 0.0

    @property
    def factor(self) -> float:
        """1 until there is a reading."""
        return self._busy_s / self._guessed_s if self._guessed_s else 1.0

    def add(self, busy_s: float, guessed_s: float) -> None:
        """A reading."""
        self._busy_s = self._busy_s * _FORGET + busy_s
        self._guessed_s = self._guessed_s * _FORGET + guessed_s
        self.readings += 1


class StepTimes:
    """Fits one engine.

    Args:
        guess: believed until there are enough readings.
        capacity_tokens: tokens of KV that fit on the engine; 0: unknown.
        block_tokens: tokens of one block.
        scale: shared by engines of its kind, with the same guess.
    """

    def __init__(
        self,
        guess: StepModel,
        capacity_tokens: int = 0,
        block_tokens: int = 0,
        scale: Scale | None = None,
    ) -> None:
        self._capacity = capacity_tokens
        self._block_tokens = block_tokens
        self._scale = Scale() if scale is None else scale
        self._before: EngineStats | None = None
        #: The common factor at the last report.
        self._reported_factor = 1.0
        #: What a unit of each term takes, as guessed: the fit is in multiples of these.
        self._units = np.array(
            [
                guess.weights_s + guess.overhead_s,
                guess.prefill_token_s,
                guess.context_token_s,
                guess.sequence_s,
            ]
        )
        self._squares = np.zeros((4, 4))
        self._products = np.zeros(4)

    def note(self, stats: EngineStats) -> StepModel | None:
        """Take in a heartbeat; returns a new model if it changes something."""
        before, self._before = self._before, stats
        if before is None:
            return None
        steps = stats.steps - before.steps
        busy_s = stats.busy_s - before.busy_s
        filled = (stats.filled_tokens - stats.cached_tokens) - (
            before.filled_tokens - before.cached_tokens
        )
        used = (self._used(before) + self._used(stats)) / 2
        generated = max(0, stats.generated_tokens - before.generated_tokens)
        return self.add(steps, filled, used, busy_s, generated)

    def add(
        self, steps: int, filled: float, used: float, busy_s: float, generated: float = 0.0
    ) -> StepModel | None:
        """Take in a reading; returns a new model if it changes something.

        Args:
            steps: that were run.
            filled: tokens of prompts computed in all of them.
            used: tokens that contexts held, on average.
            busy_s: that they took together.
            generated: tokens in all of them; 0 where it is not known.
        """
        is_reading = steps > 0 and busy_s > 0.0 and filled >= 0
        if is_reading:
            terms = np.array([1.0, filled / steps, used, generated / steps]) * self._units
            guessed_s = float(terms.sum())
            # Each reading counts alike: by how far off it is, not by how long its steps were.
            row = terms / guessed_s
            self._squares = self._squares * _FORGET + np.outer(row, row)
            self._products = self._products * _FORGET + row * (busy_s / steps / guessed_s)
            self._scale.add(busy_s, guessed_s * steps)
        if self._scale.readings < _ENOUGH:
            return None
        change = self._scale.factor / self._reported_factor
        if not is_reading and 1 / _MIN_CHANGE < change < _MIN_CHANGE:
            return None
        self._reported_factor = self._scale.factor
        return self._fit()

    def _used(self, stats: EngineStats) -> float:
        """Tokens that contexts hold."""
        return max(0.0, float(self._capacity - stats.free_blocks * self._block_tokens))

    def _fit(self) -> StepModel:
        # Drawn to the common factor, in all directions alike.
        squares = self._squares + np.eye(4) * _PRIOR / 3
        products = self._products + self._scale.factor * _PRIOR / 3
        step_s, token_s, context_s, sequence_s = _solve(squares, products) * self._units
        return StepModel(
            weights_s=float(step_s),
            context_token_s=float(context_s),
            prefill_token_s=float(token_s),
            overhead_s=0.0,
            sequence_s=float(sequence_s),
        )


def _solve(
    squares: npt.NDArray[np.float64], products: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The least squares, none of the four below its least."""
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
