"""What runs in a step: one token budget for decodes and chunks of prefill.

A step is planned by walking over the contexts that have work in the order of their rank
(priority, then age). A running generation takes one token of the budget; whatever is known but not
computed yet (a prompt, or a context whose KV was dropped) takes as much of the rest as it can,
after the share of the generations that are still to come has been set aside: a long prompt never
stalls them. There is no prefill phase and no decode phase.

A step lasts as long as all of its tokens take. So a prompt gets no more than
`max_background_tokens` of a step in which something of a smaller priority number gets a token:
whoever waits for each token waits for a short step, and what nobody waits for fills the rest of it.

Blocks go by rank as well. Who needs one that is not free takes, in this order: cached prefixes
(least recently used leaf first), the KV of idle contexts, of waiting ones, and of running ones of
lower rank, the lowest first; pinned contexts after all others. A context whose KV was taken keeps
its tokens and computes them again, with the same outcome. As the walk goes down the ranks, nothing
is ever taken from a context that already has its place in the step, and the first always gets all
it needs: the oldest work makes progress in every step, so everything ends.

A step may be planned while the one before it is *in flight*: launched, but its outcome not applied.
A context with a row in flight goes on behind that row, with known tokens or with the one token that
the row samples (`BatchRow.pending`). It takes no part in the step when what it does next depends on
the outcome: a fill that is scored or complete, a draw that looks at the tokens before it, a
generation that has all its tokens. Why this is right although blocks change hands meanwhile:

- Steps run in the order of their launches. A block that is released and used again, by a context
  freed, preempted or ended while its row is in flight, is written by a later launch only, after
  that row read it. A copy planned now sees what the step in flight writes.
- `num_computed`, and with it what a fork inherits and which blocks can be found by their tokens,
  grows only when an outcome is applied: hashes are made of known tokens, of KV that was computed
  without a failure.
- A context whose KV is taken has another `epoch` from then on; rows of an earlier one do not count
  as computed when they are applied. Of those only the sampled token is kept.
- A row with guesses (`parrot_engine.engine.speculation`) counts as far as they were right, one
  token after the other. How far that is decides about what follows, so nothing is planned behind
  a step with such rows.
- A fork may share a block into which its parent's row in flight writes behind the fork's end. It
  copies the block before it writes there itself, as with every shared block.
"""

from __future__ import annotations

from parrot_engine.batch import RowOutcome, StepBatch
from parrot_engine.engine.context_store import ContextStore
from parrot_engine.engine.contexts import Context
from parrot_engine.engine.speculation import Speculation, parts_of
from parrot_engine.engine.step_plan import PlannedRow, StepPlan
from parrot_engine.engine.step_planner import StepWalk
from parrot_engine.kv_cache.block_pool import BlockPool
from parrot_engine.kv_cache.host_tier import HostTier
from parrot_engine.settings import BuiltinSettings


class Batcher:
    """Plans steps over the contexts of a store."""

    def __init__(self, store: ContextStore, pool: BlockPool, settings: BuiltinSettings) -> None:
        self._store = store
        self._pool = pool
        self._block_size = settings.block_size
        self.max_rows = settings.max_batch_size
        self.max_tokens = settings.max_batch_tokens
        self.max_background_tokens = settings.background_tokens
        self.max_logprob_tokens = settings.max_logprob_tokens
        self.prefix_caching = settings.prefix_caching
        #: Where blocks are that had to leave the device.
        self.host: HostTier | None = None
        #: Contexts whose KV was taken while they were running.
        self.preemptions = 0
        self.speculation = Speculation(settings) if settings.speculative_tokens > 0 else None

    def plan(self, before: StepPlan | None = None) -> StepPlan:
        """Choose what runs next, and give it blocks.

        Contexts whose Fill turns out to be wholly cached are completed on the way, so events may
        arise even when the plan has no rows.

        Args:
            before: the step in flight, whose outcome has not been applied; one without guesses.
        """
        step = StepWalk(self, self._store, self._pool, before)
        step.walk()
        batch = StepBatch(
            [planned.row for planned in step.rows],
            step.copies,
            [None if planned.generate is None else planned.generate.row for planned in step.rows],
            [planned.scoring for planned in step.rows],
        )
        return StepPlan(step.rows, batch, step.held, step.coming, step.has_guesses)

    def computed(self, planned: PlannedRow) -> None:
        """The tokens of a row have KV: blocks that became full can be found from now on."""
        context, size = planned.context, self._block_size
        context.num_computed = planned.end
        first, last = planned.row.start // size, planned.end // size
        if first < last and self.prefix_caching:
            table = context.block_table
            for index in range(first, last):
                block = table.ids[index]
                found = self._pool.register(block, context.digest(index))
                if found != block:
                    table.replace(index, found)

    def check_guesses(
        self, planned: PlannedRow, outcome: RowOutcome
    ) -> list[tuple[PlannedRow, RowOutcome]]:
        """What a row with guesses amounts to: rows of one token, to be applied one by one.

        Blocks that only wrong guesses needed are given back.
        """
        parts = parts_of(planned, outcome)
        context = planned.context
        generate = planned.generate
        if self.speculation is not None and generate is not None and context.is_at(generate):
            self.speculation.note(generate, planned.row.num_guesses, len(parts) - 1)
        if planned.epoch == context.epoch and context.state != "gone":
            self.trim(context, parts[-1][0].end)
        return parts

    def trim(self, context: Context, end: int) -> None:
        """Give back blocks that only guesses needed: the next token stands at position `end`.

        A row in flight may still write there, but before anything that is launched from now on.
        """
        kept = end // self._block_size + 1
        self._pool.release_table(context.block_table.ids[kept:])
        context.block_table.truncate(kept)

    def finish(self, plan: StepPlan) -> None:
        """The step was launched, or failed to be: what runs later may use its sources again."""
        self._pool.release_table(plan.held)
