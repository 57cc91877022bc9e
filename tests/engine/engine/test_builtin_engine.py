"""The builtin engine as a whole: outputs do not depend on how they came about."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.engine.checkpoints import CONFIGS, make_checkpoint
from harness.engine.doubles import (
    EOS,
    POISON,
    VOCAB_SIZE,
    ScriptedRunner,
    Trace,
    prompt,
    reference_generate,
    scripted_engine,
)
from harness.engine.programs import check_program, engine_limits, random_program
from harness.engine_checks import check_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_engine.engine import contexts
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.engine.contexts import Context
from parrot_engine.engine.step_planner import StepPlanner
from parrot_engine.exceptions import EngineStateError, SettingsError
from parrot_engine.kv_cache.block_hash import block_hash
from parrot_engine.kv_cache.block_pool import BlockPool, BlockTable
from parrot_engine.protocol import (
    Engine,
    Failed,
    Fill,
    FreeContext,
    Generate,
    Generated,
    SamplingParams,
)
from parrot_engine.settings import BuiltinSettings

pytestmark = pytest.mark.usefixtures("overlap")

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


# Any program, any limits


@given(
    seed=st.integers(0, 2**32),
    length=st.sampled_from([4, 12, 40]),
    limits=engine_limits(
        max_batch_tokens=st.sampled_from([1, 2, 3, 4, 5, 17, 500]),
        max_logprob_tokens=st.sampled_from([1, 3, 100]),
    ),
)
@settings(max_examples=120, deadline=None)
def test_outputs_do_not_depend_on_scheduling(
    seed: int, length: int, limits: dict[str, Any]
) -> None:
    engine, runner = scripted_engine(**limits)
    check_program(Trace(engine), random_program(random.Random(seed), length=length))
    assert all(batch.num_tokens <= limits["max_batch_tokens"] for batch in runner.batches)
    assert all(len(batch.rows) <= limits["max_batch_size"] for batch in runner.batches)


def _write_into_shared_blocks(planner: StepPlanner, table: BlockTable, tail: int) -> bool:
    del planner, table, tail
    return False


def _hash_without_parent(parent: bytes, token_ids: list[int]) -> bytes:
    return block_hash(b"", token_ids)


def _step_back_not_at_all(context: Context, position: int) -> None:
    del context, position


def _release_twice(pool: BlockPool, block: int, *how: Any) -> None:
    _release(pool, block, *how)
    if pool.references(block) > 0:
        _release(pool, block, *how)


def _keep_everything(pool: BlockPool, block: int, *how: Any) -> None:
    del pool, block, how


_release = BlockPool.release


#: What an engine with one bug does instead.
MUTANTS: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "no copy on write": (StepPlanner, "_must_copy", _write_into_shared_blocks),
    "hash without parent": (contexts, "block_hash", _hash_without_parent),
    "last token not recomputed": (Context, "step_back", _step_back_not_at_all),
    "double free": (BlockPool, "release", _release_twice),
    "leak": (BlockPool, "release", _keep_everything),
    "stale index": (BlockPool, "_forget", _keep_everything),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_oracle_finds_bugs(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above: it must not be possible to pass with a bug."""
    monkeypatch.setattr(*MUTANTS[mutant])

    def survives(seed: int) -> bool:
        engine, _ = scripted_engine(
            num_blocks=20, block_size=3, max_position=60, max_batch_tokens=7
        )
        try:
            check_program(Trace(engine), random_program(random.Random(seed)))
        except (AssertionError, EngineStateError):
            return False
        return True

    assert not all(survives(seed) for seed in range(40))


def test_oracle_passes_without_bugs() -> None:
    for seed in range(40):
        engine, _ = scripted_engine(
            num_blocks=20, block_size=3, max_position=60, max_batch_tokens=7
        )
        check_program(Trace(engine), random_program(random.Random(seed)))


def test_small_cache_gives_the_outputs_of_a_large_one() -> None:
    outputs = []
    for num_blocks in (200, 9):
        engine, _ = scripted_engine(num_blocks=num_blocks)
        trace = Trace(engine)
        for index in range(6):
            trace.submit(
                Fill(index, prompt(11, index)), Generate(index, replace(GREEDY, max_tokens=20))
            )
        trace.run()
        outputs.append([trace.tokens(index) for index in range(6)])
        assert (engine.stats().preemptions > 0) == (num_blocks == 9)
    assert outputs[0] == outputs[1]


# Sampling


def test_seeded_sampling_does_not_depend_on_the_batch() -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7, ignore_eos=True)
    alone, _ = scripted_engine()
    crowded, _ = scripted_engine(max_batch_tokens=9)
    first = Trace(alone).submit(Fill(1, prompt(9)), Generate(1, params)).run()
    trace = Trace(crowded)
    for index in range(2, 9):
        unseeded = replace(params, seed=None)
        trace.submit(Fill(index, prompt(3, index)), Generate(index, unseeded))
    trace.submit(Fill(1, prompt(9)), Generate(1, params)).run()
    assert first.tokens(1) == trace.tokens(1) == reference_generate(prompt(9), params)[0]


def test_unseeded_sampling_follows_the_seed_of_the_engine() -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True)

    def sampled(seed: int | None, budget: int) -> list[list[int]]:
        engine, _ = scripted_engine(seed=seed, max_batch_tokens=budget)
        trace = Trace(engine)
        for index in range(3):
            trace.submit(Fill(index, prompt(6)), Generate(index, params))
        trace.run()
        return [trace.tokens(index) for index in range(3)]

    first = sampled(1, 100)
    assert first == sampled(1, 2)
    assert first != sampled(2, 100)
    assert first[0] != first[1]
    assert sampled(None, 100) != sampled(None, 100)


def _end_of(tokens: list[int], **values: object) -> tuple[list[int], list[str | None]]:
    engine, _ = scripted_engine(max_position=30)
    params = SamplingParams(temperature=0, **values)  # type: ignore[arg-type]
    trace = Trace(engine).submit(Fill(1, tokens), Generate(1, params)).run()
    return trace.tokens(1), list(trace.finish(1))


def test_end_of_text_ends_and_is_reported() -> None:
    forced = {"logit_bias": {EOS: 1000.0}, "max_tokens": 5}
    assert _end_of([1, 2], **forced) == ([EOS], ["stop"])
    assert _end_of([1, 2], **forced, ignore_eos=True) == ([EOS] * 5, ["length"])
    tokens, finish = _end_of([1, 2], **forced, min_tokens=3)
    assert finish == ["stop"]
    assert len(tokens) == 4
    assert EOS not in tokens[:3]


def test_stop_token_ends() -> None:
    bias = {9: 1000.0}
    assert _end_of([1], stop_token_ids=(9,), logit_bias=bias) == ([9], ["stop"])
    assert _end_of([1], stop_token_ids=(9,), logit_bias=bias, ignore_eos=True)[1] == ["stop"]


def test_length_ends() -> None:
    tokens, finish = _end_of([1] * 3, max_tokens=0)
    assert (tokens, finish) == ([], ["length"])
    tokens, finish = _end_of([1] * 25, max_tokens=100, ignore_eos=True)
    assert (len(tokens), finish) == (5, ["length"])
    assert _end_of([1] * 30, max_tokens=4) == ([], ["length"])


def test_logprobs_are_those_of_the_raw_logits() -> None:
    engine, _ = scripted_engine()
    params = replace(GREEDY, logprobs=2, temperature=0.0, frequency_penalty=1.0)
    trace = Trace(engine).submit(Fill(1, prompt(6)), Generate(1, params)).run()
    trace.submit(Fill(2, [*prompt(6), *trace.tokens(1)], prompt_logprobs=2)).run()
    scores = [score for event in trace.of(1, Generated) for score in event.logprobs or []]
    again = (trace.filled(2)[0].prompt_logprobs or [])[6:]
    assert len(scores) == len(again) == 8
    for one, other in zip(scores, again, strict=True):
        assert other is not None
        assert one.token_id == other.token_id
        assert math.isclose(one.logprob, other.logprob, abs_tol=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
    assert all(event.logprobs is None for event in _generated(replace(params, logprobs=None)))


def _generated(params: SamplingParams) -> Iterator[Generated]:
    engine, _ = scripted_engine()
    trace = Trace(engine).submit(Fill(1, prompt(6)), Generate(1, params)).run()
    return iter(trace.of(1, Generated))


# What goes wrong


def test_nan_fails_its_context_alone_and_leaves_no_trace_in_the_cache() -> None:
    engine, _ = scripted_engine()
    trace = Trace(engine)
    bad = [*prompt(8), POISON, 1, 2, 3]
    trace.submit(Fill(1, bad), Generate(1, GREEDY), Fill(2, prompt(8)), Generate(2, GREEDY))
    trace.run()
    failure = trace.failure(1)
    assert failure is not None
    assert failure.code == "numerical_error"
    assert trace.tokens(2) == reference_generate(prompt(8), GREEDY)[0]
    trace.submit(Fill(3, bad)).run()
    assert trace.filled(3)[0].cached_tokens <= 8


def test_nan_in_prompt_logprobs() -> None:
    engine, _ = scripted_engine(max_batch_tokens=3)
    trace = Trace(engine).submit(Fill(1, [1, 2, POISON, 4], prompt_logprobs=0)).run()
    assert [failure.code for failure in trace.of(1, Failed)] == ["numerical_error"]


def test_exception_in_the_runner_fails_its_batch_alone(caplog: pytest.LogCaptureFixture) -> None:
    engine, runner = scripted_engine(max_batch_size=2)
    trace = Trace(engine)
    for index in range(3):
        trace.submit(Fill(index, prompt(5, index)), Generate(index, GREEDY))
    trace.submit(Generate(10, GREEDY, parent_context_id=0))
    trace.step()
    runner.error = RuntimeError("device on fire")
    trace.run()
    for index in (0, 1, 10):
        failure = trace.failure(index)
        assert failure is not None
        assert failure.code == "engine_error"
        assert "fire" not in failure.message
    assert "device on fire" in caplog.text
    assert trace.tokens(2) == reference_generate(prompt(5, 2), GREEDY)[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("top_k", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("logit_bias", {VOCAB_SIZE: 1.0}),
        ("logit_bias", {1: float("nan")}),
        ("logprobs", -1),
        ("logprobs", VOCAB_SIZE + 1),
        ("seed", 2**64),
        ("stop_token_ids", (VOCAB_SIZE,)),
    ],
)
def test_bad_sampling_parameter_is_named(name: str, value: object) -> None:
    engine, runner = scripted_engine()
    params = replace(SamplingParams(), **{name: value})  # type: ignore[arg-type]
    trace = Trace(engine).submit(Fill(1, prompt(5)), Generate(1, params)).run()
    failure = trace.failure(1)
    assert failure is not None
    assert failure.code == "invalid_request"
    assert failure.message.startswith(name)
    assert runner.batches == []


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
def test_token_outside_the_vocabulary(token: int) -> None:
    engine, _ = scripted_engine()
    trace = Trace(engine).submit(Fill(1, [1, token])).run()
    failure = trace.failure(1)
    assert failure is not None
    assert failure.code == "invalid_request"
    assert "token_ids[1]" in failure.message


def test_edge_values_of_sampling_are_accepted() -> None:
    engine, _ = scripted_engine()
    params = SamplingParams(
        max_tokens=3,
        temperature=1e-9,
        top_p=1e-9,
        top_k=10**6,
        min_p=1.0,
        logit_bias={3: -math.inf},
        seed=-(2**63),
        logprobs=VOCAB_SIZE,
        ignore_eos=True,
    )
    trace = Trace(engine).submit(Fill(1, prompt(4)), Generate(1, params)).run()
    assert trace.finish(1) == ["length"]
    assert 3 not in trace.tokens(1)


# The engine as others see it


def test_info_and_stats() -> None:
    engine, runner = scripted_engine(num_blocks=8, block_size=4, max_position=100, max_batch_size=3)
    assert isinstance(engine, Engine)
    info = engine.info
    assert info.kind == "builtin"
    assert info.max_context_tokens == 32
    assert (info.num_blocks, info.block_size, info.vocab_size) == (8, 4, VOCAB_SIZE)
    assert info.max_batch_size == 3
    assert info.default_sampling == {"temperature": 0.5}
    trace = Trace(engine).submit(Fill(1, prompt(9)), Generate(1, replace(GREEDY, max_tokens=2)))
    trace.run()
    trace.submit(Fill(2, prompt(9))).run()
    stats = engine.stats()
    assert stats.steps == len(runner.batches)
    assert (stats.filled_tokens, stats.cached_tokens, stats.generated_tokens) == (18, 8, 2)
    assert (stats.contexts, stats.running, stats.waiting) == (2, 0, 0)
    assert stats.free_blocks == 8 - 4
    trace.submit(FreeContext(1), FreeContext(2)).run()
    stats = engine.stats()
    assert (stats.contexts, stats.free_blocks, stats.cached_blocks) == (0, 8, 2)


def test_reads_that_were_shared_count_from_the_engines_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = 5
    monkeypatch.setattr(ScriptedRunner, "read_once_tokens", property(lambda _: counted))
    engine, _ = scripted_engine()
    assert engine.stats().read_once_tokens == 0, "those of plans that were tried before"
    counted = 12
    assert engine.stats().read_once_tokens == 7


def test_scripted_runner_passes_the_checks_of_every_engine() -> None:
    check_engine(lambda: scripted_engine()[0])


@pytest.mark.parametrize("num_blocks", [64, 17])
def test_real_model_passes_the_checks_of_every_engine(tmp_path: Path, num_blocks: int) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS["qwen3"])
    values = BuiltinSettings(device="cpu", dtype="float32", num_blocks=num_blocks)
    check_engine(lambda: BuiltinEngine.load(folder, values, model="tiny"))


def test_nothing_to_do() -> None:
    engine, runner = scripted_engine()
    assert engine.step() == ([], False)
    engine.submit([FreeContext(5)])
    assert engine.step() == ([], False)
    assert runner.batches == []
    engine.close()
    engine.close()


def test_limit_of_contexts_is_the_smallest_of_three() -> None:
    assert scripted_engine(max_context_tokens=9)[0].info.max_context_tokens == 9
    assert scripted_engine(max_context_tokens=999)[0].info.max_context_tokens == 256
    assert scripted_engine(num_blocks=5)[0].info.max_context_tokens == 20
    trace = Trace(scripted_engine(max_context_tokens=9)[0]).submit(Fill(1, prompt(10))).run()
    assert "at most 9" in trace.of(1, Failed)[0].message


def test_closed_engine_does_not_run() -> None:
    engine, _ = scripted_engine()
    engine.close()
    engine.submit([Fill(1, [1])])
    with pytest.raises(EngineStateError, match="after close"):
        engine.step()


def test_runner_and_settings_must_agree() -> None:
    _, runner = scripted_engine(block_size=4)
    with pytest.raises(SettingsError, match="block_size"):
        BuiltinEngine(runner, BuiltinSettings(block_size=8), model="scripted")
