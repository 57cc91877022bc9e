"""The line of contexts that have work but no place in the batch.

Orders them by rank and knows nothing else about them; which state a context is in is
`parrot_engine.engine.context_states`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from parrot_engine.engine.contexts import Context, Rank

#: Stale entries that are put up with even when the line is short.
_STALE_ENTRIES = 64


class WaitingLine:
    """Waiting contexts, the smallest rank first.

    `Context.queued` is the rank under which a context stands here. An entry that does not agree
    is stale: its context left, or has another rank by now. Stale entries leave at the top, or all
    at once when they are the majority.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Rank, Context]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Context]:
        """All of them, in no order."""
        return (context for rank, context in self._entries if context.queued == rank)

    def first(self) -> Context | None:
        """The context of the smallest rank; it stays."""
        while self._entries:
            rank, context = self._entries[0]
            if context.queued == rank:
                return context
            heapq.heappop(self._entries)
        return None

    def pop(self) -> Context:
        """Take the context of the smallest rank out.

        Raises:
            IndexError: nobody waits.
        """
        context = self.first()
        if context is None:
            raise IndexError("the line is empty")
        heapq.heappop(self._entries)
        self.remove(context)
        return context

    def add(self, context: Context) -> None:
        """Let a context stand in the line by its present rank, which must not be its old one."""
        if context.queued is None:
            self._length += 1
        context.queued = context.rank
        heapq.heappush(self._entries, (context.rank, context))
        if len(self._entries) > 2 * self._length + _STALE_ENTRIES:
            self._entries = [(rank, other) for rank, other in self._entries if other.queued == rank]
            heapq.heapify(self._entries)

    def remove(self, context: Context) -> None:
        """Let a context leave; does nothing for one that is not here."""
        if context.queued is not None:
            context.queued = None
            self._length -= 1
