"""Draft tokens change how fast tokens come, never which."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from harness.engine.doubles import POISON, prompt, reference_generate
from harness.engine.drafting import GREEDY, OracleBatcher, OracleSpeculation, drafting, expected
from harness.engine.overlap_machine import OverlapMachine, machine_limits
from harness.engine.programs import check_program, engine_limits, random_program
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.triton_backend import TritonAttention
from parrot_engine.batch import BatchRow, RowOutcome
from parrot_engine.engine.batcher import Batcher
from parrot_engine.engine.contexts import Context, PlannedRow
from parrot_engine.engine.ngrams import NgramProposer
from parrot_engine.engine.speculation import Speculation
from parrot_engine.exceptions import EngineStateError, SettingsError
from parrot_engine.protocol import Failed, Fill, FreeContext, Generate, Generated, SamplingParams
from parrot_engine.settings import MAX_SPECULATIVE_TOKENS, BuiltinSettings


@given(
    seed=st.integers(0, 2**32),
    length=st.sampled_from([4, 12, 40]),
    limits=engine_limits(
        num_blocks=st.sampled_from([*range(8, 40), 100]),
        max_batch_tokens=st.sampled_from([1, 2, 3, 5, 17, 30]),
        speculative_batch_tokens=st.sampled_from([3, 64]),
        overlap=st.sampled_from(["on", "off"]),
    ),
    share_right=st.sampled_from([0.5, 0.9, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_outputs_are_those_without_drafts(
    seed: int, length: int, limits: dict[str, Any], share_right: float
) -> None:
    trace, runner = drafting(**limits)
    trace.engine._batcher.speculation.share_right = share_right  # type: ignore[union-attr]
    check_program(trace, random_program(random.Random(seed), length=length))
    for batch in runner.batches:
        decodes = [row for row in batch.rows if row.logits != "none" and row.num_drafts]
        drafted = sum(len(row.token_ids) for row in decodes)
        assert batch.num_tokens <= limits["max_batch_tokens"]
        assert drafted <= max(limits["speculative_batch_tokens"], len(decodes))


class SpeculationMachine(OverlapMachine):
    """The same primitives to an engine that makes draft tokens and to one that does not."""

    limits = machine_limits(
        num_blocks=st.integers(8, 60),
        max_batch_tokens=st.sampled_from([2, 5, 20]),
        overlap=st.sampled_from(["on", "off"]),
    )
    engines = ({"speculative_tokens": 4, "batcher": OracleBatcher}, {"speculative_tokens": 0})


TestSpeculation = SpeculationMachine.TestCase


TestSpeculation.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


class BelievesEverything(OracleBatcher):
    """Takes what is sampled behind a wrong draft token for right."""

    def verify_drafts(
        self, planned: PlannedRow, outcome: RowOutcome
    ) -> list[tuple[PlannedRow, RowOutcome]]:
        parts = super().verify_drafts(planned, outcome)
        last, _ = parts[-1]
        rest = outcome.following[len(parts) - 1 :]
        return [*parts, *((last._replace(end=last.end), RowOutcome(token)) for token in rest)]


class KeepsBlocks(OracleBatcher):
    """Gives no block back that wrong draft tokens took."""

    def verify_drafts(
        self, planned: PlannedRow, outcome: RowOutcome
    ) -> list[tuple[PlannedRow, RowOutcome]]:
        return super().verify_drafts(planned._replace(epoch=-1), outcome)


class CountsDrafts(OracleBatcher):
    """Takes KV of wrong draft tokens for that of the tokens that came."""

    def verify_drafts(
        self, planned: PlannedRow, outcome: RowOutcome
    ) -> list[tuple[PlannedRow, RowOutcome]]:
        (first, _), *_ = parts = super().verify_drafts(planned, outcome)
        first.context.num_computed += 1
        return [(part._replace(end=part.end + 1), said) for part, said in parts]


@pytest.mark.parametrize("mutant", [BelievesEverything, KeepsBlocks, CountsDrafts])
def test_oracle_finds_bugs(mutant: type[Batcher]) -> None:
    """The negative control of the test above."""

    def survives(seed: int, batcher: type[Batcher]) -> bool:
        trace, _ = drafting(
            num_blocks=40, block_size=3, max_position=60, max_batch_tokens=30, batcher=batcher
        )
        try:
            check_program(trace, random_program(random.Random(seed)))
        except (AssertionError, EngineStateError):
            return False
        return True

    assert all(survives(seed, OracleBatcher) for seed in range(20))
    assert not all(survives(seed, mutant) for seed in range(20))


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.9, seed=5, top_k=4, top_p=0.9, min_p=0.01),
        SamplingParams(max_tokens=12, temperature=0.9, seed=5, min_tokens=9),
        SamplingParams(max_tokens=12, temperature=0, logit_bias={3: 5.0}, ignore_eos=True),
    ],
)
def test_right_drafts_save_steps(params: SamplingParams, overlap: str) -> None:
    trace, runner = drafting(overlap=overlap)
    trace.engine._batcher.speculation.share_right = 1.0  # type: ignore[union-attr]
    trace.submit(Fill(1, prompt(5)), Generate(1, params)).run()
    said = trace.tokens(1)
    assert said == expected(prompt(5), params)
    stats = trace.engine.stats()
    assert stats.accepted_tokens == stats.proposed_tokens > 0
    # The first token comes with the prompt, each further step brings one more than was drafted.
    assert len(runner.batches) == len(said) - stats.accepted_tokens


def test_drafts_into_the_block_that_is_there() -> None:
    trace, runner = drafting(overlap="off", block_size=32)
    trace.engine._batcher.speculation.share_right = 1.0  # type: ignore[union-attr]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    trace.submit(Fill(1, prompt(5)), Generate(1, params)).run()
    assert trace.tokens(1) == expected(prompt(5), params)
    assert [len(row.token_ids) for batch in runner.batches for row in batch.rows] == [5, 5, 5, 1]


def test_log_probabilities_are_those_without_drafts() -> None:
    outputs = []
    for tokens in (0, 4):
        trace, _ = drafting(speculative_tokens=tokens, batcher=OracleBatcher if tokens else Batcher)
        trace.submit(Fill(1, prompt(5)), Generate(1, replace(GREEDY, logprobs=2))).run()
        outputs.append([event.logprobs for event in trace.of(1, Generated)])
        assert (trace.engine.stats().accepted_tokens > 0) == (tokens > 0)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "params", [replace(GREEDY, repetition_penalty=1.3), replace(GREEDY, frequency_penalty=0.5)]
)
def test_draws_that_look_at_the_tokens_before_them_make_no_drafts(params: SamplingParams) -> None:
    trace, runner = drafting()
    trace.submit(Fill(1, prompt(5)), Generate(1, params)).run()
    assert trace.tokens(1) == expected(prompt(5), params)
    assert all(row.num_drafts == 0 for batch in runner.batches for row in batch.rows)


def test_nothing_is_planned_behind_drafts() -> None:
    trace, runner = drafting()
    for index in range(3):
        trace.submit(Fill(index, prompt(5, index)), Generate(index, GREEDY))
    trace.run()
    assert [trace.tokens(index) for index in range(3)] == [expected(prompt(5, i)) for i in range(3)]
    drafted = [
        number
        for number, batch in enumerate(runner.batches, start=1)
        if any(row.num_drafts for row in batch.rows)
    ]
    assert drafted
    launches = {what: place for place, what in enumerate(runner.log)}
    for number in drafted[:-1]:
        assert launches["outcome", number] < launches["launch", number + 1]


def test_drafts_behind_a_token_that_is_not_known_yet() -> None:
    trace, runner = drafting()

    class Late(OracleSpeculation):
        def propose(self, context: Context, proposer: NgramProposer, count: int) -> list[int]:
            return super().propose(context, proposer, count) if len(context.token_ids) > 8 else []

    trace.engine._batcher.speculation = Late(BuiltinSettings(speculative_tokens=3))
    trace.engine._batcher.speculation.share_right = 1.0  # type: ignore[union-attr]
    trace.submit(Fill(1, prompt(5)), Generate(1, GREEDY)).run()
    assert trace.tokens(1) == expected(prompt(5))
    rows = [row for batch in runner.batches for row in batch.rows if row.num_drafts]
    assert [row.pending for row in rows] == [0, *[None] * (len(rows) - 1)]
    assert trace.engine.stats().accepted_tokens == sum(row.num_drafts for row in rows) > 3


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_stop_token_among_right_drafts(overlap: str) -> None:
    whole = expected(prompt(5))
    for stop in range(1, len(whole)):
        params = replace(GREEDY, stop_token_ids=(whole[stop],))
        said = expected(prompt(5), params)
        trace, _ = drafting(overlap=overlap)
        trace.engine._batcher.speculation.share_right = 1.0  # type: ignore[union-attr]
        trace.submit(
            Fill(1, prompt(5)),
            Generate(1, params),
            # A fork of what the generation left, and the context's own continuation.
            Generate(2, GREEDY, parent_context_id=1),
            Fill(1, prompt(3)),
            Generate(1, GREEDY),
        ).run()
        assert trace.tokens(1) == [*said, *expected([*prompt(5), *said, *prompt(3)])]
        assert trace.tokens(2) == expected([*prompt(5), *said])
        assert trace.finish(1) == ["stop", "length"]


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_max_tokens_is_no_more_and_no_less(max_tokens: int) -> None:
    params = replace(GREEDY, max_tokens=max_tokens)
    trace, runner = drafting()
    trace.submit(Fill(1, prompt(5)), Generate(1, params)).run()
    assert trace.tokens(1) == expected(prompt(5), params)
    assert trace.finish(1) == ["length"]
    assert max(row.start + len(row.token_ids) for b in runner.batches for row in b.rows) < 5 + 10


def test_the_longest_context_is_no_longer() -> None:
    trace, _ = drafting(max_position=16)
    params = replace(GREEDY, max_tokens=100)
    trace.submit(Fill(1, prompt(5)), Generate(1, params)).run()
    assert trace.tokens(1) == reference_generate(prompt(5), params, max_context=16)[0]


class PoisonBatcher(OracleBatcher):
    """Proposes a token behind which no number is one."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)

        class Poison(Speculation):
            def propose(self, context: Context, proposer: NgramProposer, count: int) -> list[int]:
                return [POISON] * count

        self.speculation = Poison(arguments[2])


def test_scores_behind_a_wrong_draft_do_not_matter() -> None:
    trace, _ = drafting(batcher=PoisonBatcher)
    trace.submit(Fill(1, prompt(5)), Generate(1, GREEDY)).run()
    assert trace.of(1, Failed) == []
    assert trace.tokens(1) == expected(prompt(5))
    assert trace.engine.stats().proposed_tokens > 0
    assert trace.engine.stats().accepted_tokens == 0


def test_wrong_drafts_cost_few_steps() -> None:
    trace, runner = drafting(batcher=PoisonBatcher)
    params = replace(GREEDY, max_tokens=150)
    trace.submit(Fill(1, prompt(5)), Generate(1, params)).run()
    drafted = sum(row.num_drafts > 0 for batch in runner.batches for row in batch.rows)
    assert 1 <= drafted <= 10
    assert len(runner.batches) == 150


def test_few_who_draft_do_not_hold_up_many() -> None:
    """One of twelve has something to propose: not worth that all of them wait."""
    trace, runner = drafting(num_blocks=400, max_batch_size=16)
    slow = replace(GREEDY, max_tokens=30)

    class One(OracleSpeculation):
        def propose(self, context: Context, proposer: NgramProposer, count: int) -> list[int]:
            return super().propose(context, proposer, count) if context.id == 0 else []

    trace.engine._batcher.speculation = One(BuiltinSettings(speculative_tokens=1))
    for index in range(12):
        trace.submit(Fill(index, prompt(5, index)), Generate(index, slow))
    trace.run()
    assert all(row.num_drafts == 0 for batch in runner.batches for row in batch.rows)
    trace.submit(*[FreeContext(index) for index in range(12)])
    trace.submit(Fill(0, prompt(6)), Generate(0, slow)).run()
    assert any(row.num_drafts for batch in runner.batches for row in batch.rows)


@pytest.mark.parametrize("rows", [8, 40])
@pytest.mark.parametrize("share_right", [1.0, 0.0])
def test_many_draft_as_long_as_drafts_are_right(rows: int, share_right: float) -> None:
    trace, runner = drafting(
        num_blocks=1000,
        max_batch_size=rows,
        max_batch_tokens=512,
        speculative_batch_tokens=256,
        speculative_tokens=4,
    )
    trace.engine._batcher.speculation.share_right = share_right  # type: ignore[union-attr]
    params = replace(GREEDY, max_tokens=40)
    for index in range(rows):
        trace.submit(Fill(index, prompt(5, index)), Generate(index, params))
    trace.run()
    for index in range(rows):
        assert trace.tokens(index) == expected(prompt(5, index), params)
    drafted = sum(any(row.num_drafts for row in batch.rows) for batch in runner.batches)
    stats = trace.engine.stats()
    if share_right:
        assert stats.accepted_tokens == stats.proposed_tokens > 0.7 * stats.generated_tokens
        assert max(sum(row.num_drafts for row in batch.rows) for batch in runner.batches) == min(
            4 * rows, 256 - rows
        )
    else:
        assert drafted <= 10


def test_drafts_take_no_block_that_others_need() -> None:
    outputs = []
    for tokens in (0, 4):
        trace, _ = drafting(
            num_blocks=24,
            max_batch_size=4,
            max_batch_tokens=16,
            speculative_tokens=tokens,
            batcher=OracleBatcher if tokens else Batcher,
        )
        params = replace(GREEDY, max_tokens=14)
        for index in range(4):
            trace.submit(Fill(index, prompt(7, index)), Generate(index, params))
        trace.run()
        assert trace.engine.stats().preemptions == 0
        outputs.append([trace.tokens(index) for index in range(4)])
    assert outputs[0] == outputs[1]


def test_freed_while_drafts_are_in_flight() -> None:
    trace, _ = drafting()
    trace.submit(Fill(1, prompt(5)), Generate(1, GREEDY), Fill(2, prompt(6)), Generate(2, GREEDY))
    for _ in range(3):
        trace.step()
    said = len(trace.tokens(1))
    trace.submit(FreeContext(1), Fill(3, prompt(7)), Generate(3, GREEDY)).run()
    assert len(trace.tokens(1)) == said
    assert trace.tokens(2) == expected(prompt(6))
    assert trace.tokens(3) == expected(prompt(7))


def test_a_failed_step_with_drafts_fails_its_rows() -> None:
    trace, runner = drafting()
    trace.submit(Fill(1, prompt(5)), Generate(1, GREEDY))
    trace.step()
    runner.late_error = RuntimeError("device on fire")
    trace.run()
    assert [failure.code for failure in trace.of(1, Failed)] == ["engine_error"]
    trace.submit(Fill(2, prompt(5)), Generate(2, GREEDY)).run()
    assert trace.tokens(2) == expected(prompt(5))


# Settings and kernels


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_tokens", -1),
        ("speculative_tokens", MAX_SPECULATIVE_TOKENS + 1),
        ("speculative_min_ngram", 0),
        ("speculative_max_ngram", 2),
        ("speculative_batch_tokens", 0),
    ],
)
def test_settings_are_checked(name: str, value: int) -> None:
    with pytest.raises(SettingsError, match=name):
        BuiltinSettings(**{name: value})  # type: ignore[arg-type]


def test_attention_splits_the_keys_of_a_row_with_drafts() -> None:
    """One program that reads all of a long context would take long, as for a decode."""
    attention = TritonAttention(
        AttentionShape(32, 8, 128, 16),
        windows=[None],
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    count = MAX_SPECULATIVE_TOKENS + 1
    for start in (100, 4000):
        row = BatchRow([1] * count, start, np.arange(300, dtype=np.int32), "all", None, count - 1)
        work = attention.lay_out([row]).lists[None]
        assert len(work.tiles) == 0
        assert len(work.narrow) >= start // 512
