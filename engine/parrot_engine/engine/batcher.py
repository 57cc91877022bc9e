"""State of step planning that outlives a step: outcomes of rows, savings, counters.

A step is planned by `parrot_engine.engine.step_planner`. What steps leave of
`max_background_tokens` is saved up here, and what draft tokens and copies took is given back.
"""

from __future__ import annotations

from parrot_engine.batch import RowOutcome
from parrot_engine.engine.context_store import ContextStore
from parrot_engine.engine.contexts import Context, PlannedRow
from parrot_engine.engine.speculation import Speculation, parts_of
from parrot_engine.engine.step_planner import StepPlan, StepPlanner
from parrot_engine.kv_cache.block_pool import BlockPool
from parrot_engine.kv_cache.host_tier import HostTier
from parrot_engine.settings import BuiltinSettings

#: Bursts of background work that may be saved up.
_SAVED_BURSTS = 64


class Batcher:
    """Plans steps over the contexts of a store."""

    def __init__(
        self,
        store: ContextStore,
        pool: BlockPool,
        settings: BuiltinSettings,
        host: HostTier | None = None,
    ) -> None:
        """Plan over the contexts of `store`, with the blocks of `pool`, within `settings`.

        Blocks that had to leave the device are in `host`, if there is one.
        """
        self._store = store
        self._pool = pool
        self.settings = settings
        self.host = host
        #: Contexts whose KV was taken while they were running.
        self.preemptions = 0
        self.speculation = Speculation(settings) if settings.speculative_tokens > 0 else None
        #: Tokens that steps left of `max_background_tokens`.
        self._saved_background = 0

    def plan(self, before: StepPlan | None = None) -> StepPlan:
        """Choose what runs next, and give it blocks.

        Contexts whose Fill turns out to be wholly cached are completed on the way, so events may
        arise even when the plan has no rows.

        Args:
            before: the step in flight, whose outcome has not been applied; one without drafts.
        """
        settings = self.settings
        tokens, burst = settings.background_tokens, settings.background_burst
        planner = StepPlanner(
            self._store,
            self._pool,
            settings,
            host=self.host,
            speculation=self.speculation,
            before=before,
            background_tokens=min(burst, tokens + self._saved_background),
        )
        plan = planner.plan()
        self.preemptions += planner.preemptions
        if plan.rows:
            saved = self._saved_background + tokens - planner.background_taken
            self._saved_background = max(0, min(_SAVED_BURSTS * burst, saved))
        return plan

    def computed(self, planned: PlannedRow) -> None:
        """The tokens of a row have KV: blocks that became full can be found from now on."""
        context, size = planned.context, self.settings.block_size
        context.num_computed = planned.end
        first, last = planned.start // size, planned.end // size
        if first < last and self.settings.prefix_caching:
            table = context.block_table
            for index in range(first, last):
                block = table.ids[index]
                found = self._pool.register(block, context.digest(index))
                if found != block:
                    table.replace(index, found)

    def verify_drafts(
        self, planned: PlannedRow, outcome: RowOutcome
    ) -> list[tuple[PlannedRow, RowOutcome]]:
        """Split a row with draft tokens into rows of one token, which are to be applied one by one.

        Blocks that only wrong draft tokens needed are given back.
        """
        parts = parts_of(planned, outcome)
        context = planned.context
        generate = planned.generate
        if self.speculation is not None and generate is not None and context.is_at(generate):
            self.speculation.note(generate, len(planned.drafts), len(parts) - 1)
        if planned.epoch == context.epoch and context.state != "gone":
            self.trim(context, parts[-1][0].end)
        return parts

    def trim(self, context: Context, end: int) -> None:
        """Give back blocks that only draft tokens needed: the next token stands at position `end`.

        A row in flight may still write there, but before anything that is launched from now on.
        """
        kept = end // self.settings.block_size + 1
        self._pool.release_table(context.block_table.ids[kept:])
        context.block_table.truncate(kept)

    def finish(self, plan: StepPlan) -> None:
        """The step was launched, or failed to be: what runs later may use its sources again."""
        self._pool.release_table(plan.copy_sources)
