"""Steps that overlap: the next is launched before the outcome of this one is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.engine.checkpoints import CONFIGS, make_checkpoint
from harness.engine.doubles import (
    EOS,
    POISON,
    ScriptedRunner,
    Trace,
    prompt,
    reference_generate,
    scripted_engine,
)
from harness.engine.overlap_machine import OverlapMachine, said_of
from hypothesis import settings
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.exceptions import SettingsError
from parrot_engine.protocol import (
    Failed,
    Fill,
    Filled,
    FreeContext,
    Generate,
    Generated,
    SamplingParams,
)
from parrot_engine.settings import BuiltinSettings

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def expected(tokens: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return reference_generate(tokens, params)[0]


def overlapping(**options: object) -> tuple[Trace, ScriptedRunner]:
    engine, runner = scripted_engine(**{"overlap": "on", **options})  # type: ignore[arg-type]
    return Trace(engine), runner


def waits(runner: ScriptedRunner) -> list[int]:
    """Steps whose outcome was waited for before anything else was launched."""
    last = len(runner.batches)
    return [
        number
        for index, (what, number) in enumerate(runner.log)
        if what == "outcome" and number < last and ("launch", number + 1) in runner.log[index:]
    ]


# What overlaps


def test_steps_are_launched_ahead() -> None:
    trace, runner = overlapping()
    trace.submit(Fill(1, prompt(5)), Generate(1, GREEDY)).run()
    assert trace.tokens(1) == expected(prompt(5))
    # The first token is waited for; the last step has nothing behind it.
    assert waits(runner) == [1]
    assert [row.pending for batch in runner.batches for row in batch.rows] == [None, None, *[0] * 4]


def test_nothing_overlaps_when_it_is_off() -> None:
    trace, runner = overlapping(overlap="off")
    trace.submit(Fill(1, prompt(5)), Generate(1, GREEDY)).run()
    assert waits(runner) == [1, 2, 3, 4, 5]


def test_chunks_of_a_prompt_are_launched_ahead() -> None:
    trace, runner = overlapping(max_batch_tokens=4)
    trace.submit(Fill(1, prompt(19)), Generate(1, GREEDY)).run()
    assert trace.tokens(1) == expected(prompt(19))
    # Four chunks, and the last three tokens with the first token of the answer.
    assert waits(runner) == [5]


@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, repetition_penalty=1.4),
        replace(GREEDY, presence_penalty=0.7),
        replace(GREEDY, frequency_penalty=0.7),
    ],
)
def test_draws_that_look_at_the_tokens_before_them_wait(params: SamplingParams) -> None:
    trace, runner = overlapping()
    trace.submit(Fill(1, prompt(5)), Generate(1, params)).run()
    assert trace.tokens(1) == expected(prompt(5), params)
    # The steps do not: they are launched ahead, and draw once the token before is known.
    assert waits(runner) == [1]
    drawn = [entry for entry in runner.log if entry[0] == "sample"]
    assert drawn == [("sample", number) for number in range(3, 7)]
    for _, number in drawn:
        at = runner.log.index(("sample", number))
        assert runner.log[at - 2 : at] == [("launch", number), ("outcome", number - 1)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=9, temperature=0.9, seed=5, min_tokens=6),
        SamplingParams(max_tokens=9, temperature=0.9, seed=5, top_k=4, top_p=0.9, min_p=0.01),
        SamplingParams(max_tokens=9, temperature=0, logit_bias={3: 5.0}, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0, logprobs=2, ignore_eos=True),
    ],
)
def test_other_draws_need_no_known_tokens(params: SamplingParams) -> None:
    trace, runner = overlapping()
    trace.submit(Fill(1, prompt(5)), Generate(1, params)).run()
    assert trace.tokens(1) == expected(prompt(5), params)
    assert waits(runner) == [1]


def test_a_draw_that_waits_holds_up_nobody_else() -> None:
    trace, runner = overlapping()
    slow = replace(GREEDY, repetition_penalty=1.4)
    trace.submit(Fill(1, prompt(5)), Generate(1, slow), Fill(2, prompt(6)), Generate(2, GREEDY))
    trace.run()
    assert trace.tokens(1) == expected(prompt(5), slow)
    assert trace.tokens(2) == expected(prompt(6))
    assert not waits(runner)
    # Nor do they take turns.
    assert [len(batch.rows) for batch in runner.batches] == [1, 1, 2, 2, 2, 2, 1, 1]


def test_auto_looks_whether_the_device_waits() -> None:
    trace, runner = overlapping(overlap="auto", device="cuda:0")
    runner.is_ready = False
    trace.submit(Fill(1, prompt(5)), Generate(1, GREEDY)).run()
    assert waits(runner) == [1]
    runner.log.clear()
    runner.is_ready = True
    trace.submit(Fill(2, prompt(5, 3)), Generate(2, GREEDY)).run()
    assert trace.tokens(2) == expected(prompt(5, 3))
    assert all(row.pending is None for batch in runner.batches[6:] for row in batch.rows)


def test_auto_waits_on_a_cpu() -> None:
    trace, runner = overlapping(overlap="auto")
    trace.submit(Fill(1, prompt(5)), Generate(1, GREEDY)).run()
    assert waits(runner) == [1, 2, 3, 4, 5]


def test_setting_is_checked() -> None:
    with pytest.raises(SettingsError, match="overlap"):
        scripted_engine(overlap="maybe")


# First tokens, last tokens


def test_first_tokens_of_an_idle_engine_come_at_once() -> None:
    trace, _ = overlapping()
    for index in range(3):
        trace.submit(Fill(index, prompt(5, index)), Generate(index, GREEDY))
    events = trace.step()
    assert [type(event) for event in events] == [Filled, Generated] * 3


def test_end_of_text_drops_the_row_launched_behind_it() -> None:
    trace, runner = overlapping()
    trace.submit(Fill(1, prompt(5)), Generate(1, GREEDY)).run()
    generated = trace.tokens(1)
    ends = replace(GREEDY, stop_token_ids=(generated[2],))
    wanted = expected(prompt(5), ends)
    before = len(runner.batches)
    trace.submit(Fill(2, prompt(5)), Generate(2, ends)).run()
    assert trace.tokens(2) == wanted
    assert trace.finish(2) == ["stop"]
    assert len(runner.batches) - before == len(wanted) + 1
    assert runner.log[-1] == ("outcome", len(runner.batches)), "something stayed in flight"
    # The context is as if that row had never been.
    trace.submit(Fill(2, prompt(4, 9)), Generate(2, GREEDY)).run()
    assert trace.tokens(2)[len(wanted) :] == expected([*prompt(5), *wanted, *prompt(4, 9)])


def test_length_needs_no_row_too_many() -> None:
    trace, runner = overlapping()
    trace.submit(Fill(1, prompt(5)), Generate(1, GREEDY)).run()
    assert len(runner.batches) == GREEDY.max_tokens


def test_work_behind_an_end_of_text_goes_on_at_once() -> None:
    forced = SamplingParams(max_tokens=5, temperature=0, logit_bias={EOS: 1000.0})
    other = replace(GREEDY, max_tokens=30)
    trace, _ = overlapping()
    trace.submit(Fill(9, prompt(4)), Generate(9, other))
    trace.step()
    trace.submit(
        Fill(1, prompt(5)),
        Generate(1, forced),
        Fill(1, prompt(3), prompt_logprobs=0),
        Generate(2, GREEDY, parent_context_id=1),
        Generate(1, GREEDY),
    ).run()
    text = [*prompt(5), EOS, *prompt(3)]
    assert trace.tokens(1) == [EOS, *expected(text)]
    assert trace.tokens(2) == expected(text)
    assert trace.tokens(9) == expected(prompt(4), other)


# What happens to a context while a row of it is in flight


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_freed_while_in_flight(steps: int) -> None:
    trace, _ = overlapping(num_blocks=6)
    long = replace(GREEDY, max_tokens=12)
    trace.submit(Fill(1, prompt(6)), Generate(1, long), Fill(2, prompt(5)), Generate(2, long))
    for _ in range(steps):
        trace.step()
    said = len(trace.tokens(1))
    # Whoever comes gets its blocks.
    trace.submit(FreeContext(1), Fill(3, prompt(7, 4)), Generate(3, GREEDY)).run()
    assert len(trace.tokens(1)) == said
    assert trace.tokens(2) == expected(prompt(5), long)
    assert trace.tokens(3) == expected(prompt(7, 4))


def test_generation_cancelled_behind_a_fill_in_flight_that_a_fork_waits_for() -> None:
    trace, _ = overlapping()
    trace.submit(Fill(9, prompt(4)), Generate(9, replace(GREEDY, max_tokens=20)))
    trace.step()
    trace.submit(Fill(1, prompt(6)), Generate(2, GREEDY, parent_context_id=1), Generate(1, GREEDY))
    trace.step()
    trace.submit(FreeContext(1)).run()
    assert trace.tokens(1) == []
    assert trace.tokens(2) == expected(prompt(6))
    assert trace.engine.stats().contexts == 2


def test_preempted_while_in_flight_keeps_its_token() -> None:
    outputs = []
    for overlap in ("on", "off"):
        trace, _ = overlapping(overlap=overlap, num_blocks=8, prefix_caching=False)
        params = replace(GREEDY, max_tokens=16)
        for index in range(3):
            trace.submit(Fill(index, prompt(7, index)), Generate(index, params))
        trace.run()
        assert trace.engine.stats().preemptions > 0
        outputs.append([trace.tokens(index) for index in range(3)])
    assert outputs[0] == outputs[1]
    assert outputs[0][2] == expected(prompt(7, 2), params)


def test_nan_fails_its_context_and_the_row_behind_it_is_dropped() -> None:
    trace, _ = overlapping(max_batch_tokens=20)
    long = replace(GREEDY, max_tokens=20)
    trace.submit(Fill(9, prompt(4)), Generate(9, long))
    trace.step()
    trace.submit(Fill(1, [*prompt(8), POISON]), Generate(1, GREEDY)).run()
    assert [failure.code for failure in trace.of(1, Failed)] == ["numerical_error"]
    assert trace.tokens(9) == expected(prompt(4), long)


# Failures of the device


def test_failed_launch_leaves_the_step_in_flight_alone() -> None:
    trace, runner = overlapping()
    long = replace(GREEDY, max_tokens=20)
    two = replace(long, max_tokens=2)
    trace.submit(Fill(1, prompt(5)), Generate(1, long), Fill(2, prompt(6, 3)), Generate(2, two))
    trace.step()
    trace.step()
    before = len(trace.tokens(1))
    # The second takes no part in the step that fails: its last token is in flight.
    assert len(trace.tokens(2)) == 1
    runner.error = RuntimeError("device on fire")
    trace.run()
    assert [failure.code for failure in trace.of(1, Failed)] == ["engine_error"]
    assert trace.tokens(1) == expected(prompt(5), long)[: before + 1]
    assert trace.tokens(2) == expected(prompt(6, 3), two)


def test_failed_draw_fails_the_rows_of_its_step() -> None:
    trace, runner = overlapping()
    slow = replace(GREEDY, max_tokens=20, repetition_penalty=1.3)
    trace.submit(Fill(1, prompt(5)), Generate(1, slow))
    trace.step()
    trace.step()
    runner.draw_error = RuntimeError("device on fire")
    trace.step()
    assert runner.draw_error is None
    trace.submit(Fill(2, prompt(6, 3)), Generate(2, slow)).run()
    assert [failure.code for failure in trace.of(1, Failed)] == ["engine_error"]
    generated = trace.tokens(1)
    assert generated == expected(prompt(5), slow)[: len(generated)]
    assert trace.tokens(2) == expected(prompt(6, 3), slow)


def test_failed_outcome_fails_its_own_rows() -> None:
    trace, runner = overlapping(max_batch_tokens=6)
    trace.submit(Fill(1, prompt(4)), Generate(1, GREEDY))
    trace.step()
    runner.late_error = RuntimeError("device on fire")
    trace.step()
    trace.submit(Fill(2, prompt(5, 3)), Generate(2, GREEDY)).run()
    assert [failure.code for failure in trace.of(1, Failed)] == ["engine_error"]
    assert trace.tokens(2) == expected(prompt(5, 3))
    assert trace.engine.stats().free_blocks > 0
    assert runner.late_error is None


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_out_of_device_memory(overlap: str, caplog: pytest.LogCaptureFixture) -> None:
    trace, runner = overlapping(overlap=overlap)
    runner.error = torch.cuda.OutOfMemoryError("tried to allocate 20 GiB")
    trace.submit(Fill(1, prompt(5)), Generate(1, GREEDY)).run()
    failure = trace.failure(1)
    assert failure is not None
    assert failure.code == "engine_error"
    assert "no memory left for a step of 5 tokens" in failure.message
    assert "20 GiB" in caplog.text
    trace.submit(Fill(2, prompt(5)), Generate(2, GREEDY)).run()
    assert trace.tokens(2) == expected(prompt(5))


def test_a_failed_launch_does_not_fail_what_had_ended() -> None:
    """A row launched behind an end of text is of no use, whether it fails or not."""
    forced = SamplingParams(max_tokens=5, temperature=0, min_tokens=1, logit_bias={EOS: 1000.0})
    trace, runner = overlapping()
    trace.submit(Fill(1, prompt(5)), Generate(1, forced))
    trace.step()
    trace.step()
    runner.error = RuntimeError("device on fire")
    trace.run()
    assert trace.finish(1) == ["stop"]
    assert trace.failure(1) is None


# With a model


def test_a_model_says_the_same_with_and_without(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS["qwen3"])
    outputs = []
    for overlap in ("off", "on"):
        values = BuiltinSettings(
            device="cpu", dtype="float32", num_blocks=20, max_batch_tokens=40, overlap=overlap
        )
        engine = BuiltinEngine.load(folder, values, model="tiny")
        trace = Trace(engine)
        for index, params in enumerate(
            [
                replace(GREEDY, max_tokens=20),
                SamplingParams(max_tokens=20, top_k=30, top_p=0.9, seed=3, logprobs=2),
                replace(GREEDY, max_tokens=20, frequency_penalty=0.5),
                SamplingParams(max_tokens=20, seed=4, min_tokens=5),
            ]
        ):
            trace.submit(Fill(index, prompt(20 + 9 * index, index)), Generate(index, params))
        trace.submit(Fill(9, prompt(30), prompt_logprobs=1)).run()
        outputs.append([said_of(trace, index) for index in (0, 1, 2, 3, 9)])
        engine.close()
    assert outputs[0] == outputs[1]


TestOverlap = OverlapMachine.TestCase
TestOverlap.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
