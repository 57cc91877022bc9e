"""The outcome of a step: waited for, and applied as far as it still matters.

Between launch and outcome a context may have been freed or have failed, lost its KV, or have ended
its generation. What lies in the model's numbers or the runner becomes a failure of the contexts.
"""

from __future__ import annotations

import logging

import torch

from parrot_engine.batch import Launch, RowOutcome, SampledToken
from parrot_engine.engine.batcher import Batcher, StepPlan
from parrot_engine.engine.context_store import ContextStore
from parrot_engine.engine.contexts import PendingGenerate, PlannedRow
from parrot_engine.exceptions import ShardError

_log = logging.getLogger(__name__)

#: In place of a token behind scores that are not finite.
_UNSOUND = SampledToken(None, None)


class StepResults:
    """Applies outcomes to the contexts of a store, whose steps a batcher has planned."""

    def __init__(self, store: ContextStore, batcher: Batcher) -> None:
        self._store = store
        self._batcher = batcher

    def apply(self, plan: StepPlan, launch: Launch) -> None:
        """Wait for the outcome of a step, and apply it.

        Raises:
            ShardError: a process of a tensor-parallel engine was lost.
        """
        try:
            outcomes = launch.outcome()
        except ShardError:
            # The other ranks hold parts of every context.
            raise
        except torch.cuda.OutOfMemoryError:
            _log.exception("No memory for a step of %d tokens", plan.batch.num_tokens)
            self._fail(
                plan,
                f"the device has no memory left for a step of {plan.batch.num_tokens} tokens; "
                "a smaller max_batch_tokens or KV cache leaves more",
            )
        except Exception:
            _log.exception("A step of %d contexts failed", len(plan.rows))
            self._fail(
                plan, "the engine failed while computing this context; its log has the details"
            )
        else:
            for planned, outcome in zip(plan.rows, outcomes, strict=True):
                if planned.row.num_drafts == 0:
                    self._apply_row(planned, outcome)
                    continue
                if planned.context.in_flight is planned:
                    planned.context.in_flight = None
                for part in self._batcher.verify_drafts(planned, outcome):
                    self._apply_row(*part)

    def _fail(self, plan: StepPlan, problem: str) -> None:
        """Give up what a step was to compute, except for rows that are of no use any more."""
        for planned in plan.rows:
            context = planned.context
            if context.state != "gone" and planned.epoch == context.epoch:
                self._store.fail(context, "engine_error", problem)

    def _apply_row(self, planned: PlannedRow, outcome: RowOutcome) -> None:
        """Apply the outcome of a row, as far as it still matters.

        Meanwhile the context may have been freed or have failed; it may have lost its KV: then only
        its token counts; and its generation may be over.
        """
        context, token, generate = planned.context, outcome.token, planned.generate
        if context.in_flight is planned:
            context.in_flight = None
        if context.state == "gone":
            return
        is_next = context.is_at(generate)
        if planned.epoch == context.epoch:
            if outcome.is_sound:
                self._batcher.computed(planned)
                if not is_next:
                    self._count_filled(planned, outcome)
                    is_next = context.is_at(generate)
            else:
                token = _UNSOUND
        elif not is_next:
            return
        if token is not None and token.token_id is None:
            problem = _grammar_problem(generate)
            if problem:
                self._store.fail(context, "invalid_request", problem)
            else:
                self._store.fail(
                    context,
                    "numerical_error",
                    "the model's logits are not finite for this context",
                    invalidate=True,
                )
            return
        goes_on = False
        if generate is not None and token is not None and is_next:
            goes_on = self._store.add_token(context, generate, token)
            if not goes_on and context.in_flight is not None:
                context.discard_in_flight()
                self._batcher.trim(context, context.num_computed)
        if not goes_on or context.state != "running":
            self._store.settle(context)

    def _count_filled(self, planned: PlannedRow, outcome: RowOutcome) -> None:
        """Count computed tokens for the fill at the head of the queue, if there is one."""
        context = planned.context
        fill = context.fill
        if fill is not None:
            fill.reached = max(fill.reached, planned.end)
            fill.scores.extend(outcome.scores)
            self._store.complete_fill(context)
            # Forks in front of a Generate are of the context without its tokens, or its failure.
            self._store.fork_pending(context)


def _grammar_problem(generate: PendingGenerate | None) -> str:
    """The reason why a generation's grammar allows no token any more; empty if it allows one."""
    row = None if generate is None else generate.row
    matcher = None if row is None else row.matcher
    return "" if matcher is None else matcher.problem or ""
