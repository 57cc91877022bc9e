"""The time of many equal steps of an engine at once."""

from __future__ import annotations

from math import ceil, sqrt


class MacroStep:
    """Steps of one batch: a sum with a closed form.

    Step `i` (from 0) takes `first_s + i x growth_s`: each sequence that decodes has one more key to
    read in every step.
    """

    __slots__ = ("first_s", "growth_s", "planned", "since")

    def __init__(self) -> None:
        #: When it began, and steps that are meant to be done.
        self.since = 0.0
        self.planned = 0
        self.first_s = 0.0
        self.growth_s = 0.0

    def time_of(self, steps: int) -> float:
        """Seconds of the first `steps` steps."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def steps_until(self, elapsed: float) -> int:
        """Steps that have begun before so many seconds have passed: one at least."""
        first, growth = self.first_s, self.growth_s
        guess = elapsed / first
        if growth > 0.0:
            b = first - growth / 2
            guess = (sqrt(b * b + 2 * growth * max(elapsed, 0.0)) - b) / growth
        # Nearly right; the sums decide.
        steps = min(max(1, ceil(guess)), self.planned)
        while steps < self.planned and self.time_of(steps) < elapsed:
            steps += 1
        while steps > 1 and self.time_of(steps - 1) >= elapsed:
            steps -= 1
        return steps
