"""Guessed tokens change how fast tokens come, never which."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, make_checkpoint
from doubles import (
    POISON,
    VOCAB_SIZE,
    ScriptedRunner,
    Trace,
    prompt,
    reference_generate,
    reference_logits,
    scripted_engine,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.triton_backend import TritonAttention
from parrot_engine.bench.speculation import run_forced
from parrot_engine.builtin.batch import BatchRow, RowOutcome
from parrot_engine.builtin.batcher import Batcher
from parrot_engine.builtin.contexts import Context
from parrot_engine.builtin.engine import BuiltinEngine
from parrot_engine.builtin.ngrams import MAX_PLACES, NgramIndex
from parrot_engine.builtin.sampler import sample
from parrot_engine.builtin.settings import MAX_SPECULATIVE_TOKENS, BuiltinSettings
from parrot_engine.builtin.speculation import Guesser, Speculation
from parrot_engine.builtin.step_plan import PlannedRow
from parrot_engine.exceptions import EngineStateError, SettingsError
from parrot_engine.llm import LLM
from parrot_engine.models.loader import load_runner
from parrot_engine.protocol import (
    Failed,
    Fill,
    FreeContext,
    Generate,
    Generated,
    SamplingParams,
)
from programs import check_program, random_program
from test_overlap import OverlapMachine

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# Guesses from the text


def naive_guess(tokens: Sequence[int], least: int, most: int, count: int) -> list[int]:
    """What `NgramIndex.guess` says, found by looking everywhere."""
    tail = tokens[len(tokens) - least :]
    places = [
        end
        for end in range(len(tokens) - 1, least - 1, -1)
        if list(tokens[end - least : end]) == list(tail)
    ][:MAX_PLACES]

    def agreement(end: int) -> int:
        length = 0
        while length < min(most, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    if not places:
        return []
    best = max(places, key=agreement)
    text = list(tokens)
    for place in range(best, best + count):
        text.append(text[place])
    return text[len(tokens) :]


texts = st.lists(st.integers(0, 3), max_size=80) | st.lists(st.integers(0, 1), max_size=60)


@given(
    text=texts,
    least=st.integers(1, 4),
    more=st.integers(0, 4),
    count=st.integers(1, 7),
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
@settings(max_examples=400, deadline=None)
def test_guesses_are_those_of_a_search_over_the_text(
    text: list[int], least: int, more: int, count: int, pieces: list[int]
) -> None:
    index = NgramIndex(least, least + more)
    grown: list[int] = []
    while len(grown) < len(text):
        piece = pieces[len(grown) % len(pieces)]
        grown += text[len(grown) : len(grown) + piece]
        assert index.extend(grown, 1000) > 0
        assert index.guess(grown, count) == naive_guess(grown, least, least + more, count)


def test_a_long_text_is_forgotten_from_its_beginning() -> None:
    index = NgramIndex(2, 4, max_indexed=100)
    text = [1000, 1001, 1002, *range(200), 1000, 1001]
    grown: list[int] = []
    for token in text:
        grown.append(token)
        index.extend(grown, 50)
        assert index.num_tokens == len(grown)
        assert len(index._earlier) <= 100
    assert index.guess(grown, 3) == []
    grown += [180, 181]
    index.extend(grown, 50)
    assert index.guess(grown, 3) == [182, 183, 184]


def test_the_index_takes_a_long_prompt_in_pieces() -> None:
    text = [5, 6, 7, 8, *range(100, 130), 5, 6, 7]
    index = NgramIndex(3, 8)
    taken = [index.extend(text, 10) for _ in range(5)]
    assert taken == [10, 10, 10, 7, 0]
    assert index.guess(text, 2) == [8, 100]


def test_generations_whose_guesses_are_wrong_pause_longer_and_longer() -> None:
    guesser = Guesser(3, 8)
    generated, tries, pauses = 0, 0, []
    while generated < 2000:
        if generated < guesser.resumes_at:
            pauses.append(guesser.resumes_at - generated)
            generated = guesser.resumes_at
        generated += 1
        tries += 1
        guesser.note(0, generated)
    assert pauses[:4] == [16, 32, 64, 128]
    assert max(pauses) == 512
    assert tries < 20
    generated = max(generated, guesser.resumes_at)
    guesser.note(4, generated)
    while guesser.resumes_at <= generated:
        generated += 1
        guesser.note(0, generated)
    assert guesser.resumes_at - generated == 16, "what was right is not remembered"


# Guesses that come out in all ways


class OracleSpeculation(Speculation):
    """Guesses what will come, with a share of errors."""

    def __init__(self, values: BuiltinSettings) -> None:
        super().__init__(values)
        self.source = random.Random(1)
        self.share_right = 0.8

    def guess(self, context: Context, guesser: Guesser, count: int) -> list[int]:
        generate = context.speculative_generate
        assert generate is not None
        assert generate.row is not None
        tokens = list(context.token_ids)
        row = replace(
            generate.row,
            generated_token_ids=list(generate.row.generated_token_ids),
            num_pending=0,
        )
        guesses: list[int] = []
        while len(guesses) < count:
            token = sample(reference_logits(tokens), [row])[0].token_id
            if token is None or self.source.random() > self.share_right:
                token = self.source.randrange(VOCAB_SIZE)
            guesses.append(token)
            tokens.append(token)
            row.generated_token_ids.append(token)
        return guesses


class OracleBatcher(Batcher):
    """With these guesses."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.speculation = OracleSpeculation(arguments[2])


def guessing(**options: Any) -> tuple[Trace, ScriptedRunner]:
    """An engine whose guesses are mostly right."""
    engine, runner = scripted_engine(
        **{"batcher": OracleBatcher, "speculative_tokens": 4, "overlap": "on", **options}
    )
    return Trace(engine), runner


def expected(tokens: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return reference_generate(tokens, params)[0]


@given(
    seed=st.integers(0, 2**32),
    length=st.sampled_from([4, 12, 40]),
    block_size=st.integers(1, 5),
    num_blocks=st.sampled_from([*range(8, 40), 100]),
    max_batch_size=st.integers(1, 5),
    max_batch_tokens=st.sampled_from([1, 2, 3, 5, 17, 30]),
    batch_tokens=st.sampled_from([3, 64]),
    prefix_caching=st.booleans(),
    overlap=st.sampled_from(["on", "off"]),
    share_right=st.sampled_from([0.5, 0.9, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_outputs_are_those_without_guesses(
    seed: int,
    length: int,
    block_size: int,
    num_blocks: int,
    max_batch_size: int,
    max_batch_tokens: int,
    batch_tokens: int,
    prefix_caching: bool,
    overlap: str,
    share_right: float,
) -> None:
    trace, runner = guessing(
        num_blocks=num_blocks,
        block_size=block_size,
        max_position=60,
        max_batch_size=max_batch_size,
        max_batch_tokens=max_batch_tokens,
        prefix_caching=prefix_caching,
        speculative_batch_tokens=batch_tokens,
        overlap=overlap,
    )
    trace.engine._batcher.speculation.share_right = share_right  # type: ignore[union-attr]
    check_program(trace, random_program(random.Random(seed), length=length))
    for batch in runner.batches:
        decodes = [row for row in batch.rows if row.logits != "none" and row.num_guesses]
        assert batch.num_tokens <= max_batch_tokens
        assert sum(len(row.token_ids) for row in decodes) <= max(batch_tokens, len(decodes))


class SpeculationMachine(OverlapMachine):
    """The same primitives to an engine that makes guesses and to one that does not."""

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(8, 60),
        rows=st.integers(1, 4),
        budget=st.sampled_from([2, 5, 20]),
        caching=st.booleans(),
        overlap=st.sampled_from(["on", "off"]),
    )
    def start(  # type: ignore[override]
        self,
        block_size: int,
        num_blocks: int,
        rows: int,
        budget: int,
        caching: bool,
        overlap: str,
    ) -> None:
        for guesses in (4, 0):
            engine, _ = scripted_engine(
                num_blocks=num_blocks,
                block_size=block_size,
                max_position=40,
                max_batch_size=rows,
                max_batch_tokens=budget,
                prefix_caching=caching,
                seed=7,
                overlap=overlap,
                speculative_tokens=guesses,
                batcher=OracleBatcher if guesses else Batcher,
            )
            self.traces.append(Trace(engine))


TestSpeculation = SpeculationMachine.TestCase
TestSpeculation.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


class BelievesEverything(OracleBatcher):
    """Takes what is sampled behind a wrong guess for right."""

    def check_guesses(
        self, planned: PlannedRow, outcome: RowOutcome
    ) -> list[tuple[PlannedRow, RowOutcome]]:
        parts = super().check_guesses(planned, outcome)
        last, _ = parts[-1]
        rest = outcome.following[len(parts) - 1 :]
        return [*parts, *((last._replace(end=last.end), RowOutcome(token)) for token in rest)]


class KeepsBlocks(OracleBatcher):
    """Gives no block back that wrong guesses took."""

    def check_guesses(
        self, planned: PlannedRow, outcome: RowOutcome
    ) -> list[tuple[PlannedRow, RowOutcome]]:
        return super().check_guesses(planned._replace(epoch=-1), outcome)


class CountsGuesses(OracleBatcher):
    """Takes KV of wrong guesses for that of the tokens that came."""

    def check_guesses(
        self, planned: PlannedRow, outcome: RowOutcome
    ) -> list[tuple[PlannedRow, RowOutcome]]:
        (first, _), *_ = parts = super().check_guesses(planned, outcome)
        first.context.num_computed += 1
        return [(part._replace(end=part.end + 1), said) for part, said in parts]


@pytest.mark.parametrize("mutant", [BelievesEverything, KeepsBlocks, CountsGuesses])
def test_oracle_finds_bugs(mutant: type[Batcher]) -> None:
    """The negative control of the test above."""

    def survives(seed: int, batcher: type[Batcher]) -> bool:
        trace, _ = guessing(
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
def test_right_guesses_save_steps(params: SamplingParams, overlap: str) -> None:
    trace, runner = guessing(overlap=overlap)
    trace.engine._batcher.speculation.share_right = 1.0  # type: ignore[union-attr]
    trace.submit(Fill(1, prompt(5)), Generate(1, params)).run()
    said = trace.tokens(1)
    assert said == expected(prompt(5), params)
    stats = trace.engine.stats()
    assert stats.accepted_tokens == stats.proposed_tokens > 0
    # The first token comes with the prompt, each further step brings one more than was guessed.
    assert len(runner.batches) == len(said) - stats.accepted_tokens


def test_log_probabilities_are_those_without_guesses() -> None:
    outputs = []
    for tokens in (0, 4):
        trace, _ = guessing(speculative_tokens=tokens, batcher=OracleBatcher if tokens else Batcher)
        trace.submit(Fill(1, prompt(5)), Generate(1, replace(GREEDY, logprobs=2))).run()
        outputs.append([event.logprobs for event in trace.of(1, Generated)])
        assert (trace.engine.stats().accepted_tokens > 0) == (tokens > 0)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "params", [replace(GREEDY, repetition_penalty=1.3), replace(GREEDY, frequency_penalty=0.5)]
)
def test_draws_that_look_at_the_tokens_before_them_make_no_guesses(params: SamplingParams) -> None:
    trace, runner = guessing()
    trace.submit(Fill(1, prompt(5)), Generate(1, params)).run()
    assert trace.tokens(1) == expected(prompt(5), params)
    assert all(row.num_guesses == 0 for batch in runner.batches for row in batch.rows)


def test_nothing_is_planned_behind_guesses() -> None:
    trace, runner = guessing()
    for index in range(3):
        trace.submit(Fill(index, prompt(5, index)), Generate(index, GREEDY))
    trace.run()
    assert [trace.tokens(index) for index in range(3)] == [expected(prompt(5, i)) for i in range(3)]
    guessed = [
        number
        for number, batch in enumerate(runner.batches, start=1)
        if any(row.num_guesses for row in batch.rows)
    ]
    assert guessed
    launches = {what: place for place, what in enumerate(runner.log)}
    for number in guessed[:-1]:
        assert launches["outcome", number] < launches["launch", number + 1]


def test_guesses_behind_a_token_that_is_not_known_yet() -> None:
    trace, runner = guessing()

    class Late(OracleSpeculation):
        def guess(self, context: Context, guesser: Guesser, count: int) -> list[int]:
            return super().guess(context, guesser, count) if len(context.token_ids) > 8 else []

    trace.engine._batcher.speculation = Late(BuiltinSettings(speculative_tokens=3))
    trace.engine._batcher.speculation.share_right = 1.0  # type: ignore[union-attr]
    trace.submit(Fill(1, prompt(5)), Generate(1, GREEDY)).run()
    assert trace.tokens(1) == expected(prompt(5))
    rows = [row for batch in runner.batches for row in batch.rows if row.num_guesses]
    assert [row.pending for row in rows] == [0, *[None] * (len(rows) - 1)]
    assert trace.engine.stats().accepted_tokens == sum(row.num_guesses for row in rows) > 3


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_stop_token_among_right_guesses(overlap: str) -> None:
    whole = expected(prompt(5))
    for stop in range(1, len(whole)):
        params = replace(GREEDY, stop_token_ids=(whole[stop],))
        said = expected(prompt(5), params)
        trace, _ = guessing(overlap=overlap)
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
    trace, runner = guessing()
    trace.submit(Fill(1, prompt(5)), Generate(1, params)).run()
    assert trace.tokens(1) == expected(prompt(5), params)
    assert trace.finish(1) == ["length"]
    assert max(row.start + len(row.token_ids) for b in runner.batches for row in b.rows) < 5 + 10


def test_the_longest_context_is_no_longer() -> None:
    trace, _ = guessing(max_position=16)
    params = replace(GREEDY, max_tokens=100)
    trace.submit(Fill(1, prompt(5)), Generate(1, params)).run()
    assert trace.tokens(1) == reference_generate(prompt(5), params, max_context=16)[0]


class PoisonBatcher(OracleBatcher):
    """Guesses a token behind which no number is one."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)

        class Poison(Speculation):
            def guess(self, context: Context, guesser: Guesser, count: int) -> list[int]:
                return [POISON] * count

        self.speculation = Poison(arguments[2])


def test_scores_behind_a_wrong_guess_do_not_matter() -> None:
    trace, _ = guessing(batcher=PoisonBatcher)
    trace.submit(Fill(1, prompt(5)), Generate(1, GREEDY)).run()
    assert trace.of(1, Failed) == []
    assert trace.tokens(1) == expected(prompt(5))
    assert trace.engine.stats().proposed_tokens > 0
    assert trace.engine.stats().accepted_tokens == 0


def test_wrong_guesses_cost_few_steps() -> None:
    trace, runner = guessing(batcher=PoisonBatcher)
    params = replace(GREEDY, max_tokens=150)
    trace.submit(Fill(1, prompt(5)), Generate(1, params)).run()
    guessed = sum(row.num_guesses > 0 for batch in runner.batches for row in batch.rows)
    assert 1 <= guessed <= 10
    assert len(runner.batches) == 150


def test_few_who_guess_do_not_hold_up_many() -> None:
    """One of twelve has something to guess: not worth that all of them wait."""
    trace, runner = guessing(num_blocks=400, max_batch_size=16)
    slow = replace(GREEDY, max_tokens=30)

    class One(OracleSpeculation):
        def guess(self, context: Context, guesser: Guesser, count: int) -> list[int]:
            return super().guess(context, guesser, count) if context.id == 0 else []

    trace.engine._batcher.speculation = One(BuiltinSettings(speculative_tokens=1))
    for index in range(12):
        trace.submit(Fill(index, prompt(5, index)), Generate(index, slow))
    trace.run()
    assert all(row.num_guesses == 0 for batch in runner.batches for row in batch.rows)
    trace.submit(*[FreeContext(index) for index in range(12)])
    trace.submit(Fill(0, prompt(6)), Generate(0, slow)).run()
    assert any(row.num_guesses for batch in runner.batches for row in batch.rows)


def test_guesses_take_no_block_that_others_need() -> None:
    outputs = []
    for tokens in (0, 4):
        trace, _ = guessing(
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


def test_freed_while_guesses_are_in_flight() -> None:
    trace, _ = guessing()
    trace.submit(Fill(1, prompt(5)), Generate(1, GREEDY), Fill(2, prompt(6)), Generate(2, GREEDY))
    for _ in range(3):
        trace.step()
    said = len(trace.tokens(1))
    trace.submit(FreeContext(1), Fill(3, prompt(7)), Generate(3, GREEDY)).run()
    assert len(trace.tokens(1)) == said
    assert trace.tokens(2) == expected(prompt(6))
    assert trace.tokens(3) == expected(prompt(7))


def test_a_failed_step_with_guesses_fails_its_rows() -> None:
    trace, runner = guessing()
    trace.submit(Fill(1, prompt(5)), Generate(1, GREEDY))
    trace.step()
    runner.late_error = RuntimeError("device on fire")
    trace.run()
    assert [failure.code for failure in trace.of(1, Failed)] == ["engine_error"]
    trace.submit(Fill(2, prompt(5)), Generate(2, GREEDY)).run()
    assert trace.tokens(2) == expected(prompt(5))


# With models


def _model_outputs(folder: Path, **options: Any) -> tuple[list[list[int]], int]:
    values = BuiltinSettings(device="cpu", dtype="float32", **options)
    engine = BuiltinEngine.load(folder, values, model="tiny")
    trace = Trace(engine)
    for index, params in enumerate(
        [
            replace(GREEDY, max_tokens=40),
            replace(GREEDY, max_tokens=40, frequency_penalty=0.5),
            SamplingParams(max_tokens=40, temperature=0.3, seed=3, ignore_eos=True),
            SamplingParams(max_tokens=40, top_k=5, seed=4, min_tokens=5),
            replace(GREEDY, max_tokens=33),
        ]
    ):
        repeating = [7 + index, 8, 9, 10 + index, 11] * (4 + index)
        trace.submit(Fill(index, repeating), Generate(index, params))
        trace.submit(Generate(10 + index, params, parent_context_id=index))
    trace.run()
    accepted = engine.stats().accepted_tokens
    said = [trace.tokens(index) for index in [*range(5), *range(10, 15)]]
    engine.close()
    return said, accepted


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_model_says_the_same_with_and_without(name: str, overlap: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS[name])
    plain, none = _model_outputs(folder, num_blocks=200, overlap=overlap)
    assert none == 0
    for num_blocks in (200, 14):
        said, accepted = _model_outputs(
            folder,
            num_blocks=num_blocks,
            overlap=overlap,
            speculative_tokens=5,
            speculative_min_ngram=1,
        )
        assert said == plain
        assert accepted > 0


def test_the_kernels_say_the_same_with_and_without(tmp_path: Path) -> None:
    """Triton's kernels, interpreted where there is no GPU."""
    folder = make_checkpoint(tmp_path, CONFIGS["llama"])
    outputs = []
    for tokens in (0, 3):
        values = BuiltinSettings(
            device="cpu",
            dtype="float32",
            kernels="triton",
            num_blocks=40,
            speculative_tokens=tokens,
            speculative_min_ngram=1,
        )
        engine = BuiltinEngine.load(folder, values, model="tiny")
        trace = Trace(engine)
        trace.submit(Fill(1, [5, 6, 7] * 5), Generate(1, replace(GREEDY, max_tokens=6))).run()
        assert (engine.stats().proposed_tokens > 0) == (tokens > 0)
        outputs.append(trace.tokens(1))
        engine.close()
    assert outputs[0] == outputs[1]


def test_several_processes_say_what_one_does(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS["llama"])
    options = {"num_blocks": 100, "speculative_tokens": 4, "speculative_min_ngram": 1}
    (plain, _), (said, accepted) = (
        _model_outputs(folder, tensor_parallel=size, **options) for size in (1, 2)
    )
    assert said == plain
    assert accepted > 0


def test_the_demo_model_repeats_and_is_guessed() -> None:
    text = "The ship lay in the harbour, and the captain walked along the deck. "
    params = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
    outputs = []
    for tokens in (0, 7):
        with LLM(device="cpu", dtype="float32", speculative_tokens=tokens) as llm:
            said = llm.generate([text * 3, text], params)
            outputs.append([each.outputs[0].token_ids for each in said])
            stats = llm.stats()
            # Ends in the middle of what a step brought, and of one of its tokens.
            stop = said[0].outputs[0].text[20:24]
            ended = llm.generate(text * 3, replace(params, stop=(stop,)))[0].outputs[0]
            assert ended.text == said[0].outputs[0].text.partition(stop)[0]
            with llm.context() as context:
                context.fill(text * 3)
                again = context.generate(replace(params, stop=(stop,)))
                assert again.token_ids == ended.token_ids
    assert outputs[0] == outputs[1]
    assert 0 < stats.accepted_tokens <= stats.proposed_tokens
    # Fewer steps than tokens of one sequence: some of them brought several.
    assert stats.steps < 80


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


def test_attention_splits_the_keys_of_a_row_with_guesses() -> None:
    """As for a decode: a single program that reads all of a long context would take long."""
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


# The benchmark


def test_the_benchmark_forces_what_it_says(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS["qwen3"])
    runner = load_runner(folder, BuiltinSettings(device="cpu", dtype="float32", num_blocks=1200))
    entries = run_forced(runner, [2], [4], prompt_tokens=10, steps=4)
    forced = [entry for entry in entries if entry["case"] == "forced"]
    assert [entry["tokens_per_step"] for entry in forced] == [2.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert [entry["proposed_per_step"] for entry in forced] == [0.0, *[8.0] * 5]
    assert all(entry["ms"] > 0 for entry in entries)
