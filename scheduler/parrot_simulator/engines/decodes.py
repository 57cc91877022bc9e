"""The sequences that a simulated engine decodes: who is done when, and what a step reads."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from parrot_simulator.engines.sequence import Sequence


class Decodes:
    """Sequences in decode: each gets one token a step.

    Args:
        block_tokens: of the engine's cache.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        #: By the step at whose end they are done.
        self._ends: list[tuple[int, tuple[int, int], Sequence]] = []
        #: How many of them have which priority.
        self._priorities: dict[int, int] = {}
        #: Steps so far.
        self._steps = 0
        #: Keys that a step reads: each one once, and once more for each further sequence that has
        #: it in its prefix.
        self.context_tokens = 0
        self.repeated_tokens = 0

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, _, sequence in self._ends)

    @property
    def most_urgent(self) -> int | None:
        """The smallest priority among them; None when there are none."""
        return min(self._priorities, default=None)

    @property
    def steps_to_next_end(self) -> int:
        """Steps until the first of them is done; there is one."""
        return self._ends[0][0] - self._steps

    def join(self, sequence: Sequence) -> None:
        """One whose prompt is filled, with its first token, begins to decode."""
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

    def advance(self, steps: int) -> None:
        """So many steps are done."""
        self._steps += steps
        self.context_tokens += steps * len(self._ends)

    def done(self) -> Sequence | None:
        """One that has all its tokens, which is to leave; None when there is none."""
        ends = self._ends
        return ends[0][2] if ends and ends[0][0] <= self._steps else None

    def grown(self, sequence: Sequence) -> int:
        """Tokens that one of them got since it joined."""
        return self._steps - sequence.join_step

    def leave(self, sequence: Sequence) -> None:
        """One of them decodes no more; its nodes are still its own."""
        priority = sequence.key[0]
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]
        self.context_tokens -= sequence.own_context + self.grown(sequence)
        entry = (sequence.finish_step, sequence.key, sequence)
        if self._ends[0] == entry:
            heappop(self._ends)
        else:
            self._ends.remove(entry)
            heapify(self._ends)
        for node in sequence.nodes:
            node.readers -= 1
            if node.readers:
                self.repeated_tokens -= node.resident * self._block_tokens
            else:
                self.context_tokens -= node.resident * self._block_tokens
