"""The time of many equal steps of an engine at once."""

from __future__ import annotations

from math import ceil, sqrt


class MacroStep:
    """Steps of one batch: a sum with a closed form.

    Step `i` (from 0) takes the longer of the arithmetic, always the same, and of reading the
    memory, which grows with every step: `max(compute_s, memory_s + i x growth_s)`.
    """

    __slots__ = ("compute_s", "growth_s", "memory_s", "planned", "since")

    def __init__(self) -> None:
        #: When it began, and steps that are meant to be done.
        self.since = 0.0
        self.planned = 0
        self.compute_s = 0.0
        self.memory_s = 0.0
        self.growth_s = 0.0

    def time_of(self, steps: int) -> float:
        """Seconds of the first `steps` steps."""
        compute, memory, growth = self.compute_s, self.memory_s, self.growth_s
        if memory >= compute:
            bound = 0
        elif compute - memory >= steps * growth:
            bound = steps
        else:
            bound = min(steps, ceil((compute - memory) / growth))
        rest = steps - bound
        first = memory + bound * growth
        return bound * compute + rest * first + growth * (rest * (rest - 1) / 2)

    def steps_until(self, elapsed: float) -> int:
        """Steps that have begun before so many seconds have passed: one at least."""
        compute, memory, growth = self.compute_s, self.memory_s, self.growth_s
        if memory >= compute and growth > 0.0:
            b = memory - growth / 2
            guess = (sqrt(b * b + 2 * growth * max(elapsed, 0.0)) - b) / growth
        else:
            guess = elapsed / max(compute, memory)
        # Nearly right; the sums decide.
        steps = min(max(1, ceil(guess)), self.planned)
        while steps < self.planned and self.time_of(steps) < elapsed:
            steps += 1
        while steps > 1 and self.time_of(steps - 1) >= elapsed:
            steps -= 1
        return steps
