"""A planned step: its rows, and what each is for."""

from __future__ import annotations

from typing import NamedTuple

from parrot_engine.batch import BatchRow, ScoringRow, StepBatch
from parrot_engine.engine.contexts import Context, PendingGenerate


class PlannedRow(NamedTuple):
    """One row of a step, and what its outcome is for."""

    context: Context
    row: BatchRow
    #: The Generate that gets a token from the row's last logits.
    generate: PendingGenerate | None
    #: The following tokens of a Fill that the row's leading logits score.
    scoring: ScoringRow | None
    #: Position behind the row's last token.
    end: int
    #: The index of the row in its step.
    number: int
    #: The context's epoch when it was planned.
    epoch: int


class StepPlan(NamedTuple):
    """A planned step; `Batcher.finish` it once it has been launched, or failed to be."""

    rows: list[PlannedRow]
    batch: StepBatch
    #: Sources of copies, kept from being used again until the step is launched.
    held: list[int]
    #: Hashes of the blocks of prefill that become full in this step.
    coming: set[bytes]
    #: Whether it has rows with guesses: nothing can be planned before its outcome is known.
    has_guesses: bool = False
