"""How many tokens of prompts a simulated engine fills in a step, and for whom."""

from __future__ import annotations

from parrot_simulator.engines.sequence import Sequence


class StepBudget:
    """What is left of a step for prompts.

    Args:
        tokens: for all of them.
        background_tokens: for those that can wait for `urgent`; None sets them no limit.
        urgent: the most urgent priority that decodes in the step; None: nothing does.
    """

    __slots__ = ("_background", "_urgent", "tokens")

    def __init__(self, tokens: int, background_tokens: int | None, urgent: int | None) -> None:
        self.tokens = tokens
        self._background = background_tokens or 0
        self._urgent = None if background_tokens is None else urgent

    @property
    def is_shared(self) -> bool:
        """Whether some get less than others."""
        return self._urgent is not None

    def _can_wait(self, sequence: Sequence) -> bool:
        return self._urgent is not None and sequence.key[0] > self._urgent

    def left_for(self, sequence: Sequence) -> int:
        """Tokens that a sequence may fill."""
        return min(self.tokens, self._background) if self._can_wait(sequence) else self.tokens

    def spend(self, sequence: Sequence, tokens: int) -> None:
        """A sequence fills so many, which may be more than are left."""
        self.tokens -= tokens
        if self._can_wait(sequence):
            self._background -= tokens
