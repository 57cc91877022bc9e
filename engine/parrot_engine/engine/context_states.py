"""The states of contexts, and the lists of contexts by state.

A context with work waits in the queue or runs in the batch; one without is idle, and its KV can be
taken when blocks run out. So can that of one whose grammar is pending: it has work, but cannot go
on yet. This module moves contexts between these and keeps the lists; why they move is decided by
`parrot_engine.engine.context_store` and `parrot_engine.engine.batcher`.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator

from parrot_engine.engine.contexts import Context, ContextState, Rank
from parrot_engine.exceptions import ContextStateError
from parrot_engine.kv_cache.block_pool import BlockPool
from parrot_engine.protocol import Retention

_TRANSITIONS: dict[ContextState, frozenset[ContextState]] = {
    "pending_fork": frozenset({"idle", "gone"}),
    "waiting": frozenset({"running", "pending_grammar", "idle", "gone"}),
    "running": frozenset({"waiting", "pending_grammar", "idle", "gone"}),
    "pending_grammar": frozenset({"waiting", "idle", "gone"}),
    "idle": frozenset({"waiting", "pending_grammar", "gone"}),
    "gone": frozenset(),
}

#: Stale entries that are tolerated even when the queue is short.
_STALE_ENTRIES = 64


class WaitingQueue:
    """Waiting contexts, the smallest rank first.

    `Context.queued_rank` is the rank under which a context stands here. An entry that does not
    agree is stale: its context left, or has another rank by now. Stale entries leave at the top, or
    all at once when they are the majority.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Rank, Context]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Context]:
        """All of them, in no order."""
        return (context for rank, context in self._entries if context.queued_rank == rank)

    def first(self) -> Context | None:
        """The context of the smallest rank; it stays."""
        while self._entries:
            rank, context = self._entries[0]
            if context.queued_rank == rank:
                return context
            heapq.heappop(self._entries)
        return None

    def pop(self) -> Context:
        """Take the context of the smallest rank out.

        Raises:
            IndexError: no context waits.
        """
        context = self.first()
        if context is None:
            raise IndexError("no context waits")
        heapq.heappop(self._entries)
        self.remove(context)
        return context

    def add(self, context: Context) -> None:
        """Queue a context by its present rank, which must not be its old one."""
        if context.queued_rank is None:
            self._length += 1
        context.queued_rank = context.rank
        heapq.heappush(self._entries, (context.rank, context))
        if len(self._entries) > 2 * self._length + _STALE_ENTRIES:
            self._entries = [
                (rank, other) for rank, other in self._entries if other.queued_rank == rank
            ]
            heapq.heapify(self._entries)

    def remove(self, context: Context) -> None:
        """Take a context out; does nothing for one that is not here."""
        if context.queued_rank is not None:
            context.queued_rank = None
            self._length -= 1


class ContextStates:
    """All contexts of an engine, by state."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        #: Contexts with a place in the batch, in the order in which they got it.
        self.running: dict[Context, None] = {}
        #: Contexts in state `waiting`, except for those that the batcher took out to look at.
        self.waiting = WaitingQueue()
        #: Contexts that hold KV and are idle or wait for a grammar, least recently used first;
        #: pinned ones apart.
        self.idle: OrderedDict[Context, None] = OrderedDict()
        self.idle_pinned: OrderedDict[Context, None] = OrderedDict()
        self._all: dict[Context, None] = {}
        self._count: Counter[ContextState] = Counter()

    def __iter__(self) -> Iterator[Context]:
        """Every context that is not gone."""
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_waiting(self) -> int:
        """Contexts that have work but no place in the batch."""
        return self._count["waiting"] + self._count["pending_grammar"] + self._count["pending_fork"]

    @property
    def num_pending_grammar(self) -> int:
        """Of these, contexts that cannot go on yet."""
        return self._count["pending_grammar"]

    @property
    def has_work(self) -> bool:
        """Whether any context waits or runs."""
        return bool(self.running) or self.num_waiting > 0

    def add(self, context: Context) -> None:
        """Take in a new context: its fork is pending, or it is idle without KV."""
        self._all[context] = None
        self._count[context.state] += 1

    def start(self, context: Context) -> None:
        """Give a waiting context a place in the batch."""
        self.move(context, "running")

    def pause(self, context: Context) -> None:
        """Take the place in the batch away; the KV stays."""
        self.move(context, "waiting")

    def move(self, context: Context, state: ContextState) -> None:
        """Change a context's state; to the same one: its place in the queue, or its last use.

        Raises:
            ContextStateError: the one does not follow the other.
        """
        old = context.state
        if old == state:
            if state in ("idle", "pending_grammar"):
                self._place_idle(context)
            elif state == "waiting" and context.queued_rank != context.rank:
                # The head of its queue changed (all of it was found in the prefix cache), or
                # became more urgent.
                self.waiting.add(context)
            return
        if state not in _TRANSITIONS[old]:
            raise self.illegal(context, f"cannot become {state}")
        self.waiting.remove(context)
        if old == "running":
            del self.running[context]
        elif old in ("idle", "pending_grammar"):
            self._displace_idle(context)
        self._count[old] -= 1
        self._count[state] += 1
        context.state = state
        context.story.append(state)
        if state == "running":
            self.running[context] = None
        elif state == "waiting":
            self.waiting.add(context)
        elif state in ("idle", "pending_grammar"):
            self._place_idle(context)

    def drop_blocks(self, context: Context, retention: Retention = "normal") -> None:
        """Give up a context's KV; its tokens stay and are computed again when needed."""
        self.pool.release_table(context.block_table.ids, retention, context.id)
        context.block_table.truncate(0)
        context.epoch += 1
        context.num_computed = 0
        self._displace_idle(context)
        context.story.append("KV dropped")

    def remove(self, context: Context) -> None:
        """The context is no more; its blocks are released."""
        self.drop_blocks(context, context.retention)
        self.move(context, "gone")
        del self._all[context]

    def _place_idle(self, context: Context) -> None:
        self._displace_idle(context)
        if context.block_table:
            (self.idle_pinned if context.pin else self.idle)[context] = None

    def _displace_idle(self, context: Context) -> None:
        self.idle.pop(context, None)
        self.idle_pinned.pop(context, None)

    def illegal(self, context: Context, problem: str) -> ContextStateError:
        """The exception for a context that was asked for something impossible; not raised."""
        return ContextStateError(
            f"context {context.id} ({context.state}, {len(context.token_ids)} tokens, "
            f"{context.num_computed} computed, {len(context.pending)} pending)",
            problem,
            list(context.story),
        )

    def check_integrity(self) -> None:
        """Check every context, and the block pool against all block tables.

        Raises:
            EngineStateError: something does not fit; the message tells what and its story.
        """
        self.pool.check_integrity(context.block_table.ids for context in self._all)
        counted: Counter[ContextState] = Counter(context.state for context in self._all)
        queued = set(self.waiting)
        for context in self._all:
            if not 0 <= context.num_computed <= len(context.token_ids):
                raise self.illegal(context, "computed more than it has")
            held, least = len(context.block_table), context.blocks_for(context.num_computed)
            end, flight = context.num_computed, context.in_flight
            if flight is not None and flight.epoch == context.epoch:
                end = max(end, flight.end)
            elif flight is not None and context.state == "running":
                raise self.illegal(context, "runs behind a row that does not count")
            if not least <= held <= end // context.block_size + 1:
                raise self.illegal(context, f"holds {held} blocks, needs {least}")
            if (context.state in ("running", "waiting", "pending_grammar")) != bool(
                context.pending and context.state != "pending_fork"
            ):
                raise self.illegal(context, "work and state do not match")
            if (context.state == "running") != (context in self.running):
                raise self.illegal(context, "not in the batch that it runs in")
            if (
                context.awaits_grammar != (context.state == "pending_grammar")
                and context.state != "pending_fork"
            ):
                raise self.illegal(context, "waits for no grammar, or does not wait for its own")
            if (context.state == "waiting") != (context in queued):
                raise self.illegal(context, "waits outside of the queue")
            if context in queued and context.queued_rank != context.rank:
                raise self.illegal(context, "is queued under another rank")
            if (context.state in ("idle", "pending_grammar") and held > 0) != (
                context in (self.idle_pinned if context.pin else self.idle)
            ):
                raise self.illegal(context, "its KV could not be found when blocks run out")
            if any(
                counted[state] != self._count[state]
                for state in ("waiting", "pending_grammar", "idle", "pending_fork")
            ):
                raise self.illegal(context, "contexts are miscounted")
            if len(self.waiting) != counted["waiting"]:
                raise self.illegal(context, "the queue is miscounted")
