"""The measurement of the scheduler's decisions, with every preset."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from parrot_bench.policies import PRESETS
from parrot_bench.scheduler_decisions import measure


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_measured(preset: str) -> None:
    ticks = itertools.count()
    config = replace(PRESETS[preset], explain=True)
    (row,) = measure(lambda: next(ticks) / 1024, engines=(2,), calls=30, config=config)
    tick_us = 1e6 / 1024
    assert (row.engines, row.calls) == (2, 30)
    # Each look at this clock takes as long, and what the core did beside it scales a row.
    assert row.decision_us == row.decision_p99_us == row.progress_us == row.end_us == tick_us
    assert row.heap_pairs_per_s == 20_000 * 1024
    assert row.reference_decision_us == pytest.approx(tick_us * 20_000 * 1024 / 1.5e6)
    assert row.reference_call_us == pytest.approx(3 * row.reference_decision_us)
