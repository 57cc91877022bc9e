"""Predicted times add up the terms of an engine's step model."""

from __future__ import annotations

import pytest
from harness.engine_pools import Engines
from parrot_scheduler.events import EngineReport
from parrot_scheduler.placement.prediction import predict_row
from parrot_scheduler.task import StepModel


@pytest.mark.parametrize(("sequences", "output"), [(1, 11), (1, 1), (4, 3)])
def test_a_task_waits_for_prefill_and_then_for_steps(sequences: int, output: int) -> None:
    engines = Engines("parrot", 2)
    model = StepModel(
        weights_s=1.0, context_token_s=0.01, prefill_token_s=0.5, overhead_s=0.25, sequence_s=0.125
    )
    engines.pool.report(1, EngineReport("e1", 0, 0, 0, model))
    engines.load(1, 2, prompt=100, output=20)
    state = engines.state(50, output, num_sequences=sequences)
    told = predict_row(state, 30.0, engines.pool.table.scalars, 1)
    context = 2 * (100 + 20) + 50 + sequences * output
    step_s = 1.0 + 0.25 + context * 0.01 + (2 + sequences) * 0.125
    assert told.step_s == pytest.approx(step_s)
    assert told.ttft_s == pytest.approx(30 * 0.5 + step_s)
    assert told.finish_s == pytest.approx(told.ttft_s + step_s * (output - 1))
