"""The measurement of the scheduler's decisions, with every preset."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from parrot_bench.scheduler_decisions import measure
from parrot_scheduler.config import PRESETS

#: Placement policies that wait for room on an engine.
WAITING = ("parrot", "paper")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_measured(preset: str) -> None:
    """Policies that make no task wait have none waiting."""
    ticks = itertools.count()
    config = replace(PRESETS[preset], max_wait_s=1e9, max_hold_s=1e9, starvation_s=1e8)
    (row,) = measure(
        lambda: next(ticks) / 1024, engines=(2,), queued=20, decisions=30, config=config
    )
    assert row.queued == (20 if PRESETS[preset].place in WAITING else 0)
    assert row.decisions >= 30
    assert row.longest_step_ms == 1000 / 1024
    # A row is scaled by what the core did beside it: each look at this clock takes as long.
    assert row.heap_rounds_per_s == 1024 * 50_000
    assert row.reference_decisions_per_s == row.decisions_per_s * 690_000 / row.heap_rounds_per_s
    assert row.memory_mb > 1
