"""How long an engine's steps take, learned from its counters.

A heartbeat says how many steps were run, how many tokens filled, and how many seconds the engine
was busy. Between two of them `busy = steps x a + filled x b` holds roughly: `a` is what a step
costs whatever is in it, `b` what a prefilled token adds. Both are fitted by least squares that
forget.
"""

from __future__ import annotations

from parrot_engine.protocol import EngineStats
from parrot_scheduler.task import StepModel

#: What an earlier reading counts when a new one comes.
_FORGET = 0.98
#: Readings before the fit is believed.
_ENOUGH = 5
#: A pull towards the first guess, in units of one squared step and one squared token.
_RIDGE = 1e-6


class StepTimes:
    """Fits one engine.

    Args:
        guess: believed until there are enough readings, and for what they cannot tell.
    """

    def __init__(self, guess: StepModel) -> None:
        self._guess = guess
        self._before: EngineStats | None = None
        self._readings = 0
        # Sums of the normal equations: steps², steps x filled, filled², and both with busy.
        self._ss = self._sf = self._ff = self._sb = self._fb = 0.0

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
        self._add(1.0, filled / steps, busy_s / steps)
        self._readings += 1
        return self._fit() if self._readings >= _ENOUGH else None

    def _add(self, steps: float, filled: float, busy_s: float) -> None:
        for name, value in (
            ("_ss", steps * steps),
            ("_sf", steps * filled),
            ("_ff", filled * filled),
            ("_sb", steps * busy_s),
            ("_fb", filled * busy_s),
        ):
            setattr(self, name, getattr(self, name) * _FORGET + value)

    def _fit(self) -> StepModel:
        guess = self._guess
        step_guess = guess.weights_s + guess.overhead_s
        ss, ff = self._ss + _RIDGE, self._ff + _RIDGE
        sb, fb = self._sb + _RIDGE * step_guess, self._fb + _RIDGE * guess.prefill_token_s
        determinant = ss * ff - self._sf * self._sf
        step_s = (sb * ff - fb * self._sf) / determinant
        token_s = (ss * fb - self._sf * sb) / determinant
        if step_s <= 0.0:
            step_s, token_s = 0.0, fb / ff
        if token_s <= 0.0:
            step_s, token_s = sb / ss, guess.prefill_token_s
        return StepModel(
            weights_s=step_s,
            context_token_s=guess.context_token_s,
            prefill_token_s=token_s,
            overhead_s=0.0,
        )
