"""The steps of a simulated engine: who decodes, and how much is filled."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from parrot_bench.simulator.engines.sequences import EngineSequence


class DecodeBatch:
    """Sequences in decode: each gets one token a step.

    Args:
        block_tokens: of the engine's cache.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        #: By the step at whose end they are done.
        self._ends: list[tuple[int, tuple[int, int], EngineSequence]] = []
        #: How many they are.
        self.size = 0
        #: How many of them have which priority.
        self._priorities: dict[int, int] = {}
        #: Steps so far.
        self._steps = 0
        #: Keys that a step reads: each one once, and once more for each further sequence that has
        #: it in its prefix.
        self.context_tokens = 0
        self.repeated_tokens = 0

    def __iter__(self) -> Iterator[EngineSequence]:
        return (sequence for _, _, sequence in self._ends)

    @property
    def most_urgent(self) -> int | None:
        """The smallest priority among them; None when there are none."""
        return min(self._priorities, default=None)

    def join(self, sequence: EngineSequence) -> None:
        """Let a sequence decode whose prompt is filled; it has its first token."""
        self.size += 1
        priority = sequence.key[0]
        self._priorities[priority] = self._priorities.get(priority, 0) + 1
        sequence.join_step = self._steps
        sequence.finish_step = self._steps + sequence.output_tokens - sequence.generated
        heappush(self._ends, (sequence.finish_step, sequence.key, sequence))
        sequence.own_context = sequence.private + 1
        self.context_tokens += sequence.own_context
        for node in sequence.nodes:
            if node.readers:
                self.repeated_tokens += node.resident * self._block_tokens
            else:
                self.context_tokens += node.resident * self._block_tokens
            node.readers += 1

    def advance(self) -> None:
        """Give each of them a token."""
        self._steps += 1
        self.context_tokens += self.size

    def done(self) -> EngineSequence | None:
        """Return a sequence that has all its tokens, which is to leave; None without one."""
        ends = self._ends
        return ends[0][2] if ends and ends[0][0] <= self._steps else None

    def grown(self, sequence: EngineSequence) -> int:
        """The tokens that one of them got since it joined."""
        return self._steps - sequence.join_step

    def leave(self, sequence: EngineSequence) -> None:
        """Take out one of them; its nodes are still its own."""
        self.size -= 1
        priority = sequence.key[0]
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]
        self.context_tokens -= sequence.own_context + self.grown(sequence)
        if self._ends[0][2] is sequence:
            heappop(self._ends)
        else:
            self._ends.remove((sequence.finish_step, sequence.key, sequence))
            heapify(self._ends)
        for node in sequence.nodes:
            node.readers -= 1
            if node.readers:
                self.repeated_tokens -= node.resident * self._block_tokens
            else:
                self.context_tokens -= node.resident * self._block_tokens


class BackgroundBudget:
    """The share of a step for prompts that can wait, while something more urgent decodes.

    Tokens that steps leave of it are saved up, and later steps may take more at a time, as the
    builtin engine's do.

    Args:
        tokens: of a step, in the long run.
        burst: of a step at most; None: the same.
    """

    #: Bursts that may be saved up.
    MOST_SAVED = 64

    def __init__(self, tokens: int, burst: int | None) -> None:
        self._tokens = tokens
        self._burst = max(tokens, burst or 0)
        self._saved = 0

    @property
    def of_step(self) -> int:
        """Tokens that the next step may take."""
        return min(self._burst, self._tokens + self._saved)

    def passed(self, taken: int) -> None:
        """Count a step that has passed, and the tokens that it took."""
        saved = self._saved + self._tokens - taken
        self._saved = max(0, min(self.MOST_SAVED * self._burst, saved))


class StepBudget:
    """The tokens of a step that are left for prompts.

    Args:
        tokens: for all of them.
        background_tokens: for those that can wait for `urgent`; None sets them no limit.
        urgent: the most urgent priority that decodes in the step; None: nothing does.
    """

    __slots__ = ("_background", "_urgent", "background_taken", "tokens")

    def __init__(self, tokens: int, background_tokens: int | None, urgent: int | None) -> None:
        self.tokens = tokens
        #: Tokens that those which can wait fill.
        self.background_taken = 0
        self._background = background_tokens or 0
        self._urgent = None if background_tokens is None else urgent

    @property
    def is_shared(self) -> bool:
        """True if some get less than others."""
        return self._urgent is not None

    def _can_wait(self, sequence: EngineSequence) -> bool:
        return self._urgent is not None and sequence.key[0] > self._urgent

    def left_for(self, sequence: EngineSequence) -> int:
        """Tokens that a sequence may fill."""
        return min(self.tokens, self._background) if self._can_wait(sequence) else self.tokens

    def spend(self, sequence: EngineSequence, tokens: int) -> None:
        """Let a sequence fill some."""
        self.tokens -= tokens
        if self._can_wait(sequence):
            self._background -= tokens
            self.background_taken += tokens
