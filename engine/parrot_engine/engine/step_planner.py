"""The walk over the ranks that plans a step, by the rules in `parrot_engine.engine.batcher`."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from parrot_engine.batch import (
    UNKNOWN_TOKEN,
    BatchRow,
    BlockCopy,
    LogitsNeed,
    ScoringRow,
)
from parrot_engine.engine.context_store import ContextStore
from parrot_engine.engine.contexts import Context, Flight, PendingGenerate
from parrot_engine.engine.decodes import plain_decode, wants_one
from parrot_engine.engine.step_plan import PlannedRow, StepPlan
from parrot_engine.exceptions import ContextStateError
from parrot_engine.kv_cache.block_pool import BlockPool
from parrot_engine.kv_cache.block_table import BlockTable

if TYPE_CHECKING:
    from parrot_engine.engine.batcher import Batcher

#: Waiting contexts for whom blocks are brought back before there is a place for them.
_LOOK_AHEAD = 4
#: What every row with a pending token computes.
_UNKNOWN = [UNKNOWN_TOKEN]


class StepWalk:
    """One walk over the ranks; what it planned is in its public attributes afterwards."""

    def __init__(
        self, batcher: Batcher, store: ContextStore, pool: BlockPool, before: StepPlan | None
    ) -> None:
        self._batcher = batcher
        self._store = store
        self._states = store.states
        self._pool = pool
        self._budget = batcher.max_tokens
        #: Left for prompts behind something more urgent that gets a token, and the priority of
        #: the first that does: as ranks are walked down, no other is more urgent.
        self._background_budget = batcher.max_background_tokens
        self._urgent: int | None = None
        self._logprob_budget = batcher.max_logprob_tokens
        #: Running contexts by rank; those before `_index` have had their turn.
        self._running = sorted(self._states.running, key=attrgetter("rank"))
        self._index = 0
        #: Running contexts, not yet planned, that want a single token; None until it is asked for.
        self._decodes: set[Context] | None = None
        self._may_admit = True
        #: Blocks that the running contexts which had their turn still need for known tokens; None
        #: until it is asked for.
        self._num_missing_blocks: int | None = None
        #: Whether a step is in flight, and the hashes of the blocks that become full in it.
        self._is_behind = before is not None
        self._coming_before: set[bytes] = set() if before is None else before.coming
        self.coming: set[bytes] = set()
        self.rows: list[PlannedRow] = []
        self.copies: list[BlockCopy] = []
        self.held: list[int] = []
        self.has_guesses = False
        speculation = batcher.speculation
        self._guesses = {} if speculation is None else speculation.choose(self._running)

    def walk(self) -> None:
        """Plan one row after the other, from the smallest rank on."""
        put_back: list[Context] = []
        everybody, line = self._running, self._states.line
        while self._budget > 0:
            running = everybody[self._index] if self._index < len(everybody) else None
            waiting = line.first() if self._may_admit else None
            if waiting is not None and (running is None or waiting.rank < running.rank):
                if len(self._states.running) >= self._batcher.max_rows:
                    if running is None:
                        break
                    self._pause(everybody.pop())
                    continue
                line.pop()
                if not self._admit(waiting):
                    put_back.append(waiting)
            elif running is not None:
                self._index += 1
                if self._decodes is not None:
                    self._decodes.discard(running)
                generate = plain_decode(running, self._pool)
                if generate is not None:
                    self._plan_decode(running, generate)
                elif running.in_flight is None:
                    self._plan(running)
                else:
                    self._plan_behind(running, running.in_flight)
                if self._num_missing_blocks is not None and running.state == "running":
                    self._num_missing_blocks += running.num_missing_blocks
            else:
                break
        put_back += self._look_ahead()
        for context in put_back:
            line.add(context)

    # Places in the batch

    def _admit(self, context: Context) -> bool:
        if context.in_flight is not None:
            # It lost its place in this very step, maybe its KV too: rows in flight of a running
            # context always count.
            return False
        self._match(context)
        if self._comes_anyway(context):
            return False
        others = bool(self.rows) or self._is_behind
        if others and self._index == len(self._running) and not self._fits(context):
            # Nobody overtakes it: what gets free is for the first in the line.
            self._may_admit = False
            return False
        if self._comes_from_host(context):
            return False
        self._states.start(context)
        self._running.insert(self._index, context)
        return True

    def _pause(self, context: Context) -> None:
        if self._decodes is not None:
            self._decodes.discard(context)
        self._states.pause(context)

    def _fits(self, context: Context) -> bool:
        """Whether its known tokens fit beside those of the contexts that run already.

        All of these must have had their turn.
        """
        if self._num_missing_blocks is None:
            self._num_missing_blocks = sum(
                other.num_missing_blocks for other in self._states.running
            )
        wanted = self._num_missing_blocks + context.num_missing_blocks
        # One more for a shared block that has to be copied.
        wanted += 1 if context.block_table else 0
        self._reclaim(wanted, context, preempt=False)
        return self._pool.num_free >= wanted

    def _comes_anyway(self, context: Context) -> bool:
        """Whether a row of this step, or of the one in flight, computes the next block it needs."""
        if not self.coming and not self._coming_before:
            return False
        index = context.num_computed // context.block_size
        if self._gain(context, index) <= 0:
            return False
        digest = context.digest(index)
        return digest in self.coming or digest in self._coming_before

    # The host tier

    def _comes_from_host(self, context: Context) -> bool:
        """Whether the next block it needs is brought back, maybe from now on; room is made."""
        host = self._batcher.host
        if host is None or self._gain(context, context.num_computed // context.block_size) <= 0:
            return False
        if host.is_coming(context.digest(context.num_computed // context.block_size)):
            return True
        missing = host.missing(context)
        if not missing:
            return False
        if not host.room:
            # It is its turn as soon as others' blocks are there.
            return True
        self._reclaim(min(len(missing), host.room), context, preempt=True)
        return host.fetch(missing, self._pool.num_free) > 0

    def _look_ahead(self) -> list[Context]:
        """Have blocks brought back for those who come next; returns whom it took out of the line.

        Into blocks that nobody else is going to need, so nothing is taken from anybody.
        """
        host, seen = self._batcher.host, list[Context]()
        if host is None or not host.slots or not self._states.line:
            return seen
        missing = sum(context.num_missing_blocks for context in self._states.running)
        while len(seen) < _LOOK_AHEAD and host.room:
            context = self._states.line.first()
            if context is None:
                break
            seen.append(self._states.line.pop())
            if context.in_flight is not None:
                continue
            self._match(context)
            # One more where the first of them takes the place of a block computed in part.
            missing += context.num_missing_blocks + 1
            if missing > self._pool.num_free:
                break
            host.fetch(host.missing(context), self._pool.num_free)
        return seen

    # Tokens

    def _plan_decode(self, context: Context, generate: PendingGenerate) -> None:
        """Give a context the row of `plain_decode`: as `_plan_known` would, without asking."""
        generate.begin(context.token_ids).num_pending = 0
        if self._urgent is not None and generate.priority > self._urgent:
            self._background_budget = max(0, self._background_budget - 1)
        start = context.num_computed
        row = BatchRow(context.token_ids[start:], start, context.block_table.array(), "last")
        if self._guesses:
            row = self._with_guesses(context, row)
        self._add(context, row, generate, None)

    def _plan(self, context: Context) -> None:
        """Give a running context its row, if there are tokens to compute and blocks for them."""
        self._match(context)
        while context.num_remaining == 0:
            self._store.settle(context)
            if context.state != "running":
                return
            if context.num_remaining == 0:
                raise ContextStateError(
                    f"context {context.id}",
                    "running without anything to compute",
                    list(context.story),
                )
            self._match(context)
        if not self._comes_from_host(context):
            self._plan_known(context, context.num_computed)

    def _plan_behind(self, context: Context, flight: Flight) -> None:
        """Go on behind a row in flight, if its outcome does not matter."""
        start, generate = flight.end, flight.generate
        if generate is None:
            fill = context.fill
            if start < len(context.token_ids) and (fill is None or not fill.needs_scores):
                self._plan_known(context, start)
        elif context.goes_on_unseen(generate) and self._make_room(context, start, 1):
            assert generate.row is not None
            generate.row.num_pending = 1
            row = BatchRow(_UNKNOWN, start, context.block_table.array(), "last", flight.number)
            self._add(context, self._with_guesses(context, row), generate, None)

    def _plan_known(self, context: Context, start: int) -> None:
        """A row of tokens that are known, from `start` on."""
        end = len(context.token_ids)
        wanted = end - start
        if wanted > 1:
            # NOTE: at least one token for the first, or many generations under a small budget
            # would keep it from ever starting.
            wanted = min(wanted, max(self._budget - self._num_decodes(), 0 if self.rows else 1))
        is_background = self._urgent is not None and context.rank[0] > self._urgent
        if is_background and wanted > 1:
            wanted = min(wanted, self._background_budget)
        fill = context.fill
        scored = False
        if fill is not None and fill.needs_scores:
            first = context.first_needed()
            if start < first:
                wanted = min(wanted, first - start)
            else:
                scored = True
                wanted = min(wanted, self._logprob_budget)
        count = self._make_room(context, start, wanted) if wanted > 0 else 0
        if count == 0:
            return
        generate = context.generate if start + count == end else None
        if generate is not None:
            generate.begin(context.token_ids).num_pending = 0
        need: LogitsNeed = "all" if scored else "last" if generate is not None else "none"
        if scored:
            self._logprob_budget -= count
        if is_background:
            self._background_budget = max(0, self._background_budget - count)
        self._note_coming(context, start, start + count)
        tokens = context.token_ids[start : start + count]
        row = BatchRow(tokens, start, context.block_table.array(), need)
        scoring = None
        if scored and fill is not None and fill.prompt_logprobs is not None:
            # The last known token has nothing behind it to score.
            targets = context.token_ids[start + 1 : start + 1 + count]
            scoring = ScoringRow(targets, fill.prompt_logprobs)
        if generate is not None and count == 1 and not scored:
            row = self._with_guesses(context, row)
        self._add(context, row, generate, scoring)

    def _with_guesses(self, context: Context, row: BatchRow) -> BatchRow:
        """A row of the one token that comes next, with as many guesses as there is room for."""
        guesses = self._guesses.get(context)
        if guesses is None:
            return row
        count = min(len(guesses), self._budget - 1 - self._num_decodes())
        count = self._make_spare_room(context, row.start + 1, count)
        if count <= 0:
            return row
        self.has_guesses = True
        return row._replace(
            token_ids=row.token_ids + guesses[:count],
            block_table=context.block_table.array(),
            logits="all",
            num_guesses=count,
        )

    def _add(
        self,
        context: Context,
        row: BatchRow,
        generate: PendingGenerate | None,
        scoring: ScoringRow | None,
    ) -> None:
        end = row.start + len(row.token_ids)
        planned = PlannedRow(context, row, generate, scoring, end, len(self.rows), context.epoch)
        context.in_flight = planned
        self.rows.append(planned)
        self._budget -= end - row.start
        if generate is not None and self._urgent is None:
            self._urgent = context.rank[0]

    def _num_decodes(self) -> int:
        """Running contexts, not yet planned, that want a single token."""
        if self._decodes is None:
            self._decodes = {
                context for context in self._running[self._index :] if wants_one(context)
            }
        return len(self._decodes)

    def _match(self, context: Context) -> None:
        """Take over cached blocks that hold what the context would compute next."""
        if not self._batcher.prefix_caching or context.num_remaining == 1:
            return
        table = context.block_table
        while True:
            index = context.num_computed // context.block_size
            gain = self._gain(context, index)
            block = self._pool.find(context.digest(index)) if gain > 0 else None
            if block is None:
                return
            self._pool.retain(block)
            if index < len(table):
                self._pool.release_table(table.ids[index:])
                table.truncate(index)
            table.append(block)
            context.note_found(context.num_computed, context.num_computed + gain)
            context.num_computed += gain

    def _gain(self, context: Context, index: int) -> int:
        """Tokens that need not be computed if block `index` is found; the block is full."""
        end = (index + 1) * context.block_size
        if end > len(context.token_ids) or context.num_remaining == 1:
            return 0
        return min(end, context.first_needed()) - context.num_computed

    def _note_coming(self, context: Context, start: int, end: int) -> None:
        if self._batcher.prefix_caching and end - start > 1:
            size = context.block_size
            self.coming.update(map(context.digest, range(start // size, end // size)))

    # Blocks

    def _make_room(self, context: Context, start: int, wanted: int) -> int:
        """Blocks of its own for tokens from `start` on; returns for how many of them."""
        table, size = context.block_table, context.block_size
        tail = start // size
        if wanted == 1 and tail < len(table.ids) and self._pool.is_private(table.ids[tail]):
            return 1
        copy = self._must_copy(table, tail)
        missing = context.blocks_for(start + wanted) - len(table) + copy
        if missing > self._pool.num_free:
            self._reclaim(missing, context, preempt=True)
            copy = self._must_copy(table, tail)
        new_blocks = self._pool.num_free - copy
        count = min(wanted, (len(table) + new_blocks) * size - start) if new_blocks >= 0 else 0
        if count <= 0:
            return 0
        if copy:
            source, target = table.ids[tail], self._pool.allocate()
            table.replace(tail, target)
            # The reference is kept until the step is launched.
            self.copies.append(BlockCopy(source, target))
            self.held.append(source)
        elif tail < len(table):
            self._pool.withdraw(table.ids[tail])
        for _ in range(context.blocks_for(start + count) - len(table)):
            table.append(self._pool.allocate())
        return count

    def _make_spare_room(self, context: Context, start: int, wanted: int) -> int:
        """Blocks for guesses from `start` on, of those that nobody will need in this step.

        `start - 1` has its block. Returns for how many of them.
        """
        table, size = context.block_table, context.block_size
        missing = context.blocks_for(start + wanted) - len(table)
        if missing > 0:
            # Whoever is still to come may begin a block, and have to copy one.
            others = len(self._running) - self._index + int(self._may_admit)
            spare = self._pool.num_free - self._budget // size - 2 * others
            for _ in range(min(missing, spare)):
                table.append(self._pool.allocate())
        return min(wanted, len(table) * size - start)

    def _must_copy(self, table: BlockTable, tail: int) -> bool:
        """Whether others share the block that is to be written; `held` ones only keep theirs."""
        if tail >= len(table):
            return False
        block = table.ids[tail]
        return self._pool.references(block) - self.held.count(block) > 1

    def _reclaim(self, wanted: int, context: Context, *, preempt: bool) -> None:
        """Take KV from others until `wanted` blocks are free, or nobody is left to take from."""
        for pinned in (False, True):
            if self._pool.num_free >= wanted:
                return
            idle = self._states.idle_pinned if pinned else self._states.idle
            while idle and self._pool.num_free < wanted:
                self._states.drop_blocks(next(iter(idle)))
            behind = [
                other
                for other in self._states.line
                if other.block_table and other.pin == pinned and other.rank > context.rank
            ]
            for other in sorted(behind, key=lambda other: other.rank, reverse=True):
                if self._pool.num_free >= wanted:
                    return
                self._states.drop_blocks(other)
            if not preempt:
                return
            for other in reversed(self._running[self._index :]):
                if self._pool.num_free >= wanted:
                    return
                if other.pin == pinned:
                    self._preempt(other)

    def _preempt(self, context: Context) -> None:
        self._running.remove(context)
        self._pause(context)
        self._states.drop_blocks(context)
        self._batcher.preemptions += 1
        # Whoever gave way does not come back within the step.
        self._may_admit = False
