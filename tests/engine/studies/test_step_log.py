"""What the log of steps says of an engine's steps; graphs are repeated by calling the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import interpreted  # noqa: F401 -- skips this module where it cannot run
import pytest
from checkpoints import CONFIGS, make_checkpoint
from engine_studies.step_log import Gap, StepLog, StepRecord, by_kind, longest
from harness.engine_checks import greedy
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.protocol import Fill, Generate
from parrot_engine.runner.loader import load_runner
from parrot_engine.settings import BuiltinSettings
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")


def repeat(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """In place of a CUDA graph."""
    result = work()

    def replay() -> None:
        result.copy_(work())

    return replay, result


def test_steps_say_how_they_were_launched(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", CONFIGS["llama"])
    settings = BuiltinSettings(
        device="cpu", dtype="float32", num_blocks=16, kernels="triton", overlap="on"
    )
    runner = load_runner(folder, settings)
    runner.use_graphs(repeat, max_rows=4, max_context=64, max_tokens=4)
    log = StepLog(runner)
    engine = BuiltinEngine(log.runner, settings, model="m")
    # More tokens than any graph holds, then decodes, each launched before the last is waited for.
    engine.submit([Fill(1, [5, 6, 7, 8, 9, 10]), Generate(1, greedy(4))])
    for _ in range(5):
        with log.step() as step:
            step.is_tick = bool(engine.step().events)
    launched = [step.launched for step in log.steps]
    assert launched == [
        "6 tokens of 1 rows, kernel by kernel",
        "1 tokens of 1 rows, graph, captured first",
        "1 tokens of 1 rows, graph",
        "1 tokens of 1 rows, graph",
        "",
    ]
    # The first token of an idle engine is not left for the next step.
    assert [step.awaited for step in log.steps] == [launched[0], "", *launched[1:4]]
    for step in log.steps:
        assert 0 <= step.launch_s + step.wait_s <= step.seconds
    assert [len(gap.steps) for gap in log.gaps()] == [2, 1, 1]
    assert [(kind["launched"], kind["steps"]) for kind in by_kind(log.steps)] == [
        ("graph", 2),
        ("graph, captured first", 1),
        ("kernel by kernel", 1),
        ("nothing", 1),
    ]


def test_the_longest_gaps_come_first_and_the_median_last() -> None:
    gaps = [
        Gap(seconds, [StepRecord(begin=0.0, end=seconds - 0.25, launch_s=0.5)])
        for seconds in (1.0, 5.0, 2.0, 4.0, 3.0)
    ]
    told = longest(gaps)
    assert [gap["ms"] for gap in told] == [5000, 4000, 3000, 3000]
    assert told[0]["outside_ms"] == 250
    assert told[0]["steps"][0]["rest_ms"] == 4250
    assert longest([]) == []
