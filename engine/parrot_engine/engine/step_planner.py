"""The scheduler of a step: one token budget for decodes and chunks of prefill.

A step is planned by walking over the contexts that have work in the order of their rank
(priority, then age). A running generation takes one token of the budget; whatever is known but not
computed yet (a prompt, or a context whose KV was dropped) takes as much of the rest as it can,
after the share of the generations that are still to come has been set aside: a long prompt never
stalls them. There is no prefill phase and no decode phase.

A step lasts as long as all of its tokens take. So a prompt gets no more than
`max_background_tokens` of a step in which something of a smaller priority number gets a token, nor
does one of more than `long_prompt_tokens` behind something of the same priority: whoever waits for
each token waits for a short step, and what nobody waits for fills the rest of it. What steps leave
of it is saved up, and up to `background_burst_tokens` of a step taken from that: where prompts come
now and then they are filled soon, and where there is always one steps stay short.

Blocks go by rank as well. Who needs one that is not free takes, in this order: cached prefixes
(least recently used leaf first), the KV of idle contexts, of waiting ones, and of running ones of
lower rank, the lowest first; pinned contexts after all others. A context whose KV was taken keeps
its tokens and computes them again, with the same outcome. As the walk goes down the ranks, nothing
is ever taken from a context that already has its place in the step, and the first always gets all
it needs: the oldest work makes progress in every step, so everything ends.

A step may be planned while the one before it is *in flight*: launched, but its outcome not applied.
A context with a row in flight goes on behind that row, with known tokens or with the one token that
the row samples (`BatchRow.pending`). It takes no part in the step when what it does next depends on
the outcome: a fill that is scored or complete, a generation that has all its tokens. A draw that
looks at the tokens before it (a penalty, a grammar) is made once the outcome has been applied,
while the device computes the step (`StepBatch.awaits_tokens`). Why this is right although blocks
change hands meanwhile:

- Steps run in the order of their launches. A block that is released and used again, by a context
  freed, preempted or ended while its row is in flight, is written by a later launch only, after
  that row read it. A copy planned now sees what the step in flight writes.
- `num_computed`, and with it what a fork inherits and which blocks can be found by their tokens,
  grows only when an outcome is applied: hashes are made of known tokens, of KV that was computed
  without a failure.
- A context whose KV is taken has another `epoch` from then on; rows of an earlier one do not count
  as computed when they are applied. Of those only the sampled token is kept.
- A row with draft tokens (`parrot_engine.engine.speculation`) counts as far as they were right, one
  token after the other. How far that is decides about what follows, so nothing is planned behind
  a step with such rows.
- A fork may share a block into which its parent's row in flight writes behind the fork's end. It
  copies the block before it writes there itself, as with every shared block.
"""

from __future__ import annotations

from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from parrot_engine.batch import (
    UNKNOWN_TOKEN,
    BatchRow,
    BatchRows,
    BlockCopy,
    LogitsNeed,
    ScoringRow,
    StepBatch,
)
from parrot_engine.engine.context_store import ContextStore
from parrot_engine.engine.contexts import Context, PendingGenerate, PlannedRow, Rank
from parrot_engine.engine.speculation import Speculation
from parrot_engine.exceptions import ContextStateError
from parrot_engine.kv_cache.block_pool import BlockPool, BlockTable
from parrot_engine.kv_cache.host_tier import HostTier
from parrot_engine.settings import BuiltinSettings

#: Waiting contexts whose blocks are loaded from the host before there is a place for them.
_LOOK_AHEAD = 4
#: What every row with a pending token computes.
_UNKNOWN = [UNKNOWN_TOKEN]


class StepPlan(NamedTuple):
    """A planned step; to be finished once it has been launched, or failed to be."""

    rows: list[PlannedRow]
    batch: StepBatch
    #: Sources of copies, kept from being used again until the step is launched.
    copy_sources: list[int]
    #: Hashes of the blocks of prefill that become full in this step.
    new_digests: set[bytes]
    #: Whether it has rows with draft tokens: nothing can be planned before its outcome is known.
    has_drafts: bool = False


class StepPlanner:
    """Plans one step, by one walk over the ranks.

    Args:
        store: the contexts.
        pool: blocks.
        settings: limits.
        host: has blocks that had to leave the device; None: there is no such tier.
        speculation: drafts tokens; None: none are.
        before: the step in flight, whose outcome has not been applied.
        background_tokens: of prompts behind something more urgent, at most.
    """

    def __init__(
        self,
        store: ContextStore,
        pool: BlockPool,
        settings: BuiltinSettings,
        *,
        host: HostTier | None,
        speculation: Speculation | None,
        before: StepPlan | None,
        background_tokens: int,
    ) -> None:
        self._store = store
        self._states = store.states
        self._pool = pool
        self._settings = settings
        self._host = host
        #: Contexts whose KV was taken while they were running.
        self.preemptions = 0
        self._budget = settings.max_batch_tokens
        #: Left for prompts behind something more urgent that gets a token, and the priority of
        #: the first that does: as ranks are walked down, no other is more urgent.
        self._background_tokens = self._background_budget = background_tokens
        self._urgent: int | None = None
        self._logprob_budget = settings.max_logprob_tokens
        #: Running contexts by rank; those before `_index` have had their turn.
        self._running = sorted(self._states.running, key=attrgetter("rank"))
        self._index = 0
        #: Running contexts, not yet planned, that take a single token; None until first needed.
        self._decodes: set[Context] | None = None
        self._may_admit = True
        #: Blocks that the running contexts which had their turn still need for known tokens; None
        #: until first needed.
        self._num_missing_blocks: int | None = None
        #: Whether a step is in flight, and the hashes of the blocks that become full in it.
        self._is_behind = before is not None
        self._digests_in_flight: set[bytes] = set() if before is None else before.new_digests
        self._new_digests: set[bytes] = set()
        self._rows: list[PlannedRow] = []
        self._batch_rows = BatchRows()
        self._copies: list[BlockCopy] = []
        self._copy_sources: list[int] = []
        self._has_drafts = False
        self._awaits_tokens = False
        #: Adapters of the rows so far.
        self._adapters: set[str] = set()
        self._drafts = {} if speculation is None else speculation.choose(self._running)

    @property
    def background_taken(self) -> int:
        """Tokens behind something more urgent."""
        return self._background_tokens - self._background_budget

    def plan(self) -> StepPlan:
        """The plan; called once."""
        self._walk()
        rows = self._rows
        batch = StepBatch(
            self._batch_rows,
            self._copies,
            [None if planned.generate is None else planned.generate.row for planned in rows],
            [planned.scoring for planned in rows],
            self._awaits_tokens,
            [planned.context.adapter for planned in rows] if self._adapters else (),
        )
        return StepPlan(rows, batch, self._copy_sources, self._new_digests, self._has_drafts)

    def _walk(self) -> None:
        """Plan one row after the other, from the smallest rank on."""
        put_back: list[Context] = []
        candidates, queue = self._running, self._states.waiting
        while self._budget > 0:
            running = candidates[self._index] if self._index < len(candidates) else None
            waiting = queue.first() if self._may_admit else None
            if waiting is not None and (running is None or waiting.rank < running.rank):
                if len(self._states.running) >= self._settings.max_batch_size:
                    if running is None:
                        break
                    self._pause(candidates.pop())
                    continue
                queue.pop()
                if not self._admit(waiting):
                    put_back.append(waiting)
            elif running is not None:
                if self._plan_decodes(None if waiting is None else waiting.rank):
                    continue
                self._index += 1
                if self._decodes is not None:
                    self._decodes.discard(running)
                if not self._takes_adapter(running):
                    continue
                if running.in_flight is None:
                    self._plan(running)
                else:
                    self._plan_behind(running, running.in_flight)
                if self._num_missing_blocks is not None and running.state == "running":
                    self._num_missing_blocks += running.num_missing_blocks
            else:
                break
        put_back += self._look_ahead()
        for context in put_back:
            queue.add(context)

    # Places in the batch

    def _admit(self, context: Context) -> bool:
        if context.in_flight is not None:
            # It lost its place in this very step, maybe its KV too: rows in flight of a running
            # context always count.
            return False
        if not self._has_room_for_adapter(context):
            return False
        self._match(context)
        if self._is_being_computed(context):
            return False
        others = bool(self._rows) or self._is_behind
        if others and self._index == len(self._running) and not self._fits(context):
            # None overtakes it: what gets free is for the first in the queue.
            self._may_admit = False
            return False
        if self._waits_for_host(context):
            return False
        self._states.move(context, "running")
        self._running.insert(self._index, context)
        return True

    def _has_room_for_adapter(self, context: Context) -> bool:
        """Return True if the step has room for the adapter of a context's row."""
        adapter, adapters = context.adapter, self._adapters
        return not adapter or adapter in adapters or len(adapters) < self._settings.max_loras

    def _takes_adapter(self, context: Context) -> bool:
        """Give the step the adapter of a context, if there is room for it."""
        if not self._has_room_for_adapter(context):
            return False
        if context.adapter:
            self._adapters.add(context.adapter)
        return True

    def _pause(self, context: Context) -> None:
        if self._decodes is not None:
            self._decodes.discard(context)
        self._states.move(context, "waiting")

    def _fits(self, context: Context) -> bool:
        """Return True if its known tokens fit in addition to those of the running contexts.

        All of these must have had their turn.
        """
        if self._num_missing_blocks is None:
            self._num_missing_blocks = sum(
                other.num_missing_blocks for other in self._states.running
            )
        needed = self._num_missing_blocks + context.num_missing_blocks
        # One more for a shared block that has to be copied.
        needed += 1 if context.block_table else 0
        self._reclaim(needed, context, preempt=False)
        return self._pool.num_free >= needed

    def _is_being_computed(self, context: Context) -> bool:
        """Return True if a row of this step or the one in flight computes its next block."""
        if not self._new_digests and not self._digests_in_flight:
            return False
        index = context.num_computed // context.block_size
        if self._gain(context, index) <= 0:
            return False
        digest = context.digest(index)
        return digest in self._new_digests or digest in self._digests_in_flight

    # The host tier

    def _waits_for_host(self, context: Context) -> bool:
        """Return True if its next block is being loaded, maybe from now on; room is made."""
        host = self._host
        if host is None or self._gain(context, context.num_computed // context.block_size) <= 0:
            return False
        if host.is_loading(context.digest(context.num_computed // context.block_size)):
            return True
        loadable = host.loadable(context.reusable_digests())
        if not loadable:
            return False
        if not host.room:
            # It is loaded as soon as the blocks of others have arrived.
            return True
        self._reclaim(min(len(loadable), host.room), context, preempt=True)
        return host.load(loadable, self._pool.num_free) > 0

    def _look_ahead(self) -> list[Context]:
        """Load blocks from the host for the contexts that are next; returns those taken out.

        Into free blocks that no running context is going to need: none is preempted for it.
        """
        host, seen = self._host, list[Context]()
        if host is None or not host.slots or not self._states.waiting:
            return seen
        missing = sum(context.num_missing_blocks for context in self._states.running)
        while len(seen) < _LOOK_AHEAD and host.room:
            context = self._states.waiting.first()
            if context is None:
                break
            seen.append(self._states.waiting.pop())
            if context.in_flight is not None:
                continue
            self._match(context)
            # One more where the first of them takes the place of a block computed in part.
            missing += context.num_missing_blocks + 1
            if missing > self._pool.num_free:
                break
            host.load(host.loadable(context.reusable_digests()), self._pool.num_free)
        return seen

    # Tokens

    def _plan_decodes(self, until: Rank | None) -> bool:
        """Plan the running contexts that are next, as long as each goes on by a single token.

        Most rows of most steps are of this kind: a Generate at the head of its context's queue
        that goes on with its one known token, or with the one that its row in flight samples, into
        a block that it has. A few comparisons find them, and the rows are those of `_plan_known`
        and `_plan_behind`: a Generate at the head of a running context has its grammar and room,
        and one token alone is neither looked for among cached blocks nor loaded from the host.

        Stops at the first context of another kind, with draft tokens, or of a rank above `until`.

        Returns:
            Whether any was planned.
        """
        running, rows, drafts, decodes = self._running, self._rows, self._drafts, self._decodes
        size, is_private = self._settings.block_size, self._pool.is_private
        begin, columns = len(rows), self._batch_rows
        for context in islice(running, self._index, self._index + self._budget):
            generate, in_flight = context.pending[0], context.in_flight
            if not isinstance(generate, PendingGenerate) or context in drafts:
                break
            if context.adapter and not self._takes_adapter(context):
                break
            if until is not None and (generate.priority, generate.number) > until:
                break
            start = context.num_computed if in_flight is None else in_flight.end
            table = context.block_table
            ids, tail = table.ids, start // size
            if tail >= len(ids) or not is_private(ids[tail]):
                break
            if in_flight is None:
                if len(context.token_ids) != start + 1:
                    break
                tokens, pending = context.token_ids[start:], None
                generate.begin(context.token_ids).num_pending = 0
                if self._urgent is not None and generate.priority > self._urgent:
                    self._background_budget = max(0, self._background_budget - 1)
            else:
                tokens, pending, sampling = _UNKNOWN, in_flight.number, generate.row
                if in_flight.generate is not generate or sampling is None:
                    break
                if not context.continues_in_flight(generate):
                    break
                sampling.num_pending = 1
                self._awaits_tokens |= sampling.needs_history
            columns.token_ids.append(tokens)
            columns.starts.append(start)
            columns.block_tables.append(table.array())
            columns.pending.append(pending)
            planned = PlannedRow(
                context, generate, None, start, start + 1, len(rows), context.epoch
            )
            context.in_flight = planned
            rows.append(planned)
            if self._urgent is None:
                self._urgent = generate.priority
            if decodes is not None:
                decodes.discard(context)
        count = len(rows) - begin
        columns.logits += ["last"] * count
        columns.num_drafts += [0] * count
        self._index += count
        self._budget -= count
        return count > 0

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
        if not self._waits_for_host(context):
            self._plan_known(context, context.num_computed)

    def _plan_behind(self, context: Context, in_flight: PlannedRow) -> None:
        """Go on behind a row in flight, if its outcome does not matter."""
        start, generate = in_flight.end, in_flight.generate
        if generate is None:
            fill = context.fill
            if start < len(context.token_ids) and (fill is None or not fill.needs_scores):
                self._plan_known(context, start)
        elif context.continues_in_flight(generate) and self._make_room(context, start, 1):
            assert generate.row is not None
            generate.row.num_pending = 1
            self._awaits_tokens |= generate.row.needs_history
            row = BatchRow(_UNKNOWN, start, context.block_table.array(), "last", in_flight.number)
            self._add(context, self._with_drafts(context, row), generate, None)

    def _plan_known(self, context: Context, start: int) -> None:
        """A row of tokens that are known, from `start` on."""
        end = len(context.token_ids)
        count = end - start
        if count > 1:
            # NOTE: at least one token for the first, or many generations under a small budget
            # would keep it from ever starting.
            count = min(count, max(self._budget - self._num_decodes(), 0 if self._rows else 1))
        is_background = self._gives_way(context, end - start)
        if is_background and count > 1:
            count = min(count, self._background_budget)
        fill = context.fill
        scored = False
        if fill is not None and fill.needs_scores:
            first = context.first_needed()
            if start < first:
                count = min(count, first - start)
            else:
                scored = True
                count = min(count, self._logprob_budget)
        count = self._make_room(context, start, count) if count > 0 else 0
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
        self._note_new_digests(context, start, start + count)
        tokens = context.token_ids[start : start + count]
        row = BatchRow(tokens, start, context.block_table.array(), need)
        scoring = None
        if scored and fill is not None and fill.prompt_logprobs is not None:
            # The last known token has nothing behind it to score.
            targets = context.token_ids[start + 1 : start + 1 + count]
            scoring = ScoringRow(targets, fill.prompt_logprobs)
        if generate is not None and count == 1 and not scored:
            row = self._with_drafts(context, row)
        self._add(context, row, generate, scoring)

    def _gives_way(self, context: Context, num_tokens: int) -> bool:
        """Return True if a context's known tokens may take only the background's budget.

        That is so behind a more urgent generation and, of a long prompt, behind one as urgent.
        """
        limit = self._settings.long_prompt_tokens
        if self._urgent is None:
            return False
        if context.rank[0] > self._urgent:
            return True
        fill = context.fill
        if fill is not None and num_tokens > 1:
            num_tokens = len(fill.token_ids) - fill.cached_tokens
        return limit is not None and num_tokens > limit

    def _with_drafts(self, context: Context, row: BatchRow) -> BatchRow:
        """A row of the token that comes next, with as many draft tokens as there is room for."""
        drafts = self._drafts.get(context)
        if drafts is None:
            return row
        count = min(len(drafts), self._budget - 1 - self._num_decodes())
        count = self._make_spare_room(context, row.start + 1, count)
        if count <= 0:
            return row
        self._has_drafts = True
        return row._replace(
            token_ids=row.token_ids + drafts[:count],
            block_table=context.block_table.array(),
            logits="all",
            num_drafts=count,
        )

    def _add(
        self,
        context: Context,
        row: BatchRow,
        generate: PendingGenerate | None,
        scoring: ScoringRow | None,
    ) -> None:
        end = row.start + len(row.token_ids)
        drafts = row.token_ids[1:] if row.num_drafts else ()
        planned = PlannedRow(
            context, generate, scoring, row.start, end, len(self._rows), context.epoch, drafts
        )
        self._batch_rows.append(row)
        context.in_flight = planned
        self._rows.append(planned)
        self._budget -= end - row.start
        if generate is not None and self._urgent is None:
            self._urgent = context.rank[0]

    def _num_decodes(self) -> int:
        """The number of running contexts, not yet planned, that take a single token."""
        if self._decodes is None:
            self._decodes = {
                context for context in self._running[self._index :] if context.wants_one_token
            }
        return len(self._decodes)

    def _match(self, context: Context) -> None:
        """Take over cached blocks that hold what the context would compute next."""
        if not self._settings.prefix_caching or context.num_remaining == 1:
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

    def _note_new_digests(self, context: Context, start: int, end: int) -> None:
        if self._settings.prefix_caching and end - start > 1:
            size = context.block_size
            self._new_digests.update(map(context.digest, range(start // size, end // size)))

    # Blocks

    def _make_room(self, context: Context, start: int, num_tokens: int) -> int:
        """Blocks of its own for tokens from `start` on; returns for how many of them."""
        table, size = context.block_table, context.block_size
        tail = start // size
        if num_tokens == 1 and tail < len(table.ids) and self._pool.is_private(table.ids[tail]):
            return 1
        copy = self._must_copy(table, tail)
        missing = context.blocks_for(start + num_tokens) - len(table) + copy
        if missing > self._pool.num_free:
            self._reclaim(missing, context, preempt=True)
            copy = self._must_copy(table, tail)
        new_blocks = self._pool.num_free - copy
        count = min(num_tokens, (len(table) + new_blocks) * size - start) if new_blocks >= 0 else 0
        if count <= 0:
            return 0
        if copy:
            source, target = table.ids[tail], self._pool.allocate()
            table.replace(tail, target)
            # The reference is kept until the step is launched.
            self._copies.append(BlockCopy(source, target))
            self._copy_sources.append(source)
        elif tail < len(table):
            self._pool.withdraw(table.ids[tail])
        for _ in range(context.blocks_for(start + count) - len(table)):
            table.append(self._pool.allocate())
        return count

    def _make_spare_room(self, context: Context, start: int, num_tokens: int) -> int:
        """Blocks for draft tokens from `start` on, of those that this step has no other use for.

        `start - 1` has its block. Returns for how many of them.
        """
        table, size = context.block_table, context.block_size
        missing = context.blocks_for(start + num_tokens) - len(table)
        if missing > 0:
            # A context still to be planned may begin a block, and have to copy one.
            others = len(self._running) - self._index + int(self._may_admit)
            spare = self._pool.num_free - self._budget // size - 2 * others
            for _ in range(min(missing, spare)):
                table.append(self._pool.allocate())
        return min(num_tokens, len(table) * size - start)

    def _must_copy(self, table: BlockTable, tail: int) -> bool:
        """Return True if others share the block to be written; `copy_sources` only keep theirs."""
        if tail >= len(table):
            return False
        block = table.ids[tail]
        return self._pool.references(block) - self._copy_sources.count(block) > 1

    def _reclaim(self, num_blocks: int, context: Context, *, preempt: bool) -> None:
        """Take KV from others until `num_blocks` are free, or none is left to take from."""
        for pinned in (False, True):
            if self._pool.num_free >= num_blocks:
                return
            idle = self._states.idle_pinned if pinned else self._states.idle
            while idle and self._pool.num_free < num_blocks:
                self._states.drop_blocks(next(iter(idle)))
            behind = [
                other
                for other in self._states.waiting
                if other.block_table and other.pin == pinned and other.rank > context.rank
            ]
            for other in sorted(behind, key=lambda other: other.rank, reverse=True):
                if self._pool.num_free >= num_blocks:
                    return
                self._states.drop_blocks(other)
            if not preempt:
                return
            for other in reversed(self._running[self._index :]):
                if self._pool.num_free >= num_blocks:
                    return
                if other.pin == pinned:
                    self._preempt(other)

    def _preempt(self, context: Context) -> None:
        self._running.remove(context)
        self._pause(context)
        self._states.drop_blocks(context)
        self.preemptions += 1
        # A preempted context does not come back within the step.
        self._may_admit = False
