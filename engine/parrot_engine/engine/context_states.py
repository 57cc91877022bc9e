"""Which state each context is in, and what follows from it.

A context with work waits in the line or runs in the batch; one without is idle, and its KV can be
taken when blocks run out. So can that of one that is held: it has work, but cannot go on yet. This
module moves contexts between these and keeps the lists; why they move is decided by
`parrot_engine.engine.context_store` and `parrot_engine.engine.batcher`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from parrot_engine.engine.contexts import Context, ContextState
from parrot_engine.engine.waiting import WaitingLine
from parrot_engine.exceptions import ContextStateError
from parrot_engine.kv_cache.block_pool import BlockPool
from parrot_engine.protocol import Retention

_TRANSITIONS: dict[ContextState, frozenset[ContextState]] = {
    "unborn": frozenset({"idle", "gone"}),
    "waiting": frozenset({"running", "held", "idle", "gone"}),
    "running": frozenset({"waiting", "held", "idle", "gone"}),
    "held": frozenset({"waiting", "idle", "gone"}),
    "idle": frozenset({"waiting", "held", "gone"}),
    "gone": frozenset(),
}


class ContextStates:
    """All contexts of an engine, by state."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        #: Contexts with a place in the batch, in the order in which they got it.
        self.running: dict[Context, None] = {}
        #: Contexts in state `waiting`, except for one that the batcher took out to look at.
        self.line = WaitingLine()
        #: Idle and held contexts that hold KV, least recently used first; pinned ones apart.
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
        return self._count["waiting"] + self._count["held"] + self._count["unborn"]

    @property
    def num_held(self) -> int:
        """Of these, contexts that cannot go on yet."""
        return self._count["held"]

    @property
    def has_work(self) -> bool:
        """Whether any context waits or runs."""
        return bool(self.running) or self.num_waiting > 0

    def add(self, context: Context) -> None:
        """Take in a new context, which is unborn, or idle without KV."""
        self._all[context] = None
        self._count[context.state] += 1

    def start(self, context: Context) -> None:
        """Give a waiting context a place in the batch."""
        self.move(context, "running")

    def pause(self, context: Context) -> None:
        """Take the place in the batch away; the KV stays."""
        self.move(context, "waiting")

    def move(self, context: Context, state: ContextState) -> None:
        """Change a context's state; to the same one: its place in the line, or its last use.

        Raises:
            ContextStateError: the one does not follow the other.
        """
        old = context.state
        if old == state:
            if state in ("idle", "held"):
                self._place_idle(context)
            elif state == "waiting" and context.queued != context.rank:
                # The head of its queue changed (all of it was found in the prefix cache), or
                # became more urgent.
                self.line.add(context)
            return
        if state not in _TRANSITIONS[old]:
            raise self.illegal(context, f"cannot become {state}")
        self.line.remove(context)
        if old == "running":
            del self.running[context]
        elif old in ("idle", "held"):
            self._displace_idle(context)
        self._count[old] -= 1
        self._count[state] += 1
        context.state = state
        context.story.append(state)
        if state == "running":
            self.running[context] = None
        elif state == "waiting":
            self.line.add(context)
        elif state in ("idle", "held"):
            self._place_idle(context)

    def drop_blocks(self, context: Context, retention: Retention = "normal") -> None:
        """Give up a context's KV; its tokens stay and are computed again when needed."""
        self.pool.release_table(context.block_table.ids, retention)
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
        line = set(self.line)
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
            if (context.state in ("running", "waiting", "held")) != bool(
                context.pending and context.state != "unborn"
            ):
                raise self.illegal(context, "work and state do not match")
            if (context.state == "running") != (context in self.running):
                raise self.illegal(context, "not in the batch that it runs in")
            if context.is_held != (context.state == "held") and context.state != "unborn":
                raise self.illegal(context, "held without a grammar to wait for, or the reverse")
            if (context.state == "waiting") != (context in line):
                raise self.illegal(context, "waits without standing in the line")
            if context in line and context.queued != context.rank:
                raise self.illegal(context, "stands in the line under another rank")
            if (context.state in ("idle", "held") and held > 0) != (
                context in (self.idle_pinned if context.pin else self.idle)
            ):
                raise self.illegal(context, "its KV could not be found when blocks run out")
            if any(
                counted[state] != self._count[state]
                for state in ("waiting", "held", "idle", "unborn")
            ):
                raise self.illegal(context, "contexts are miscounted")
            if len(self.line) != counted["waiting"]:
                raise self.illegal(context, "the line is miscounted")
