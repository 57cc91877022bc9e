"""The host tier: blocks leave the device, come back in time, and are what they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.engine.checkpoints import CONFIGS, make_checkpoint
from harness.engine.doubles import (
    POISON,
    ScriptedRunner,
    Trace,
    prompt,
    reference_generate,
    run_both_ways,
    scripted_engine,
)
from harness.engine.host_doubles import ScriptedCopies
from harness.engine.programs import check_program, engine_limits, random_program
from harness.engine_checks import greedy, run_until_idle, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.exceptions import SettingsError
from parrot_engine.kv_cache.block_hash import block_hash, prompt_hashes, root_hash
from parrot_engine.kv_cache.host_copies import HostMemory, Rows, pieces_of
from parrot_engine.kv_cache.host_rates import Rates, least_blocks
from parrot_engine.kv_cache.host_tier import HostTier
from parrot_engine.protocol import Fill, FreeContext, Generate, SamplingParams
from parrot_engine.settings import BuiltinSettings

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)

CopiesOf = Callable[[ScriptedRunner], ScriptedCopies]


@pytest.fixture(params=["off", "on"], autouse=True)
def overlap(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each test with overlapping steps, and without."""
    yield from run_both_ways(request.param)


def slots(count: int, **options: int | None) -> CopiesOf:
    return lambda runner: ScriptedCopies(runner, num_slots=count, **options)  # type: ignore[arg-type]


def expected(tokens: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return reference_generate(tokens, params)[0]


def talk(trace: Trace, number: int, tokens: list[int], **how: str) -> int:
    """A context of its own: filled, generated from, freed; returns how much of it was found."""
    trace.submit(Fill(number, tokens), Generate(number, GREEDY)).run()
    assert trace.tokens(number) == expected(tokens)
    trace.submit(FreeContext(number, **how)).run()  # type: ignore[arg-type]
    return trace.filled(number)[0].cached_tokens


# Any program, any limits


@given(
    seed=st.integers(0, 2**32),
    length=st.sampled_from([12, 40]),
    limits=engine_limits(
        max_batch_tokens=st.sampled_from([1, 3, 5, 17, 500]),
        speculative_tokens=st.sampled_from([0, 3]),
        prefix_caching=st.just(True),
    ),
    num_slots=st.integers(1, 40),
    chunk=st.integers(1, 4),
    is_late=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_outputs_do_not_depend_on_the_host_tier(
    seed: int, length: int, limits: dict[str, Any], num_slots: int, chunk: int, is_late: bool
) -> None:
    copies = slots(num_slots, chunk=chunk, seed=seed if is_late else None)
    engine, _ = scripted_engine(copies=copies, **limits)
    check_program(Trace(engine), random_program(random.Random(seed), length=length))
    assert engine.stats().host_blocks <= num_slots


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(8, 16),
    num_slots=st.integers(4, 40),
    is_late=st.booleans(),
)
def test_talks_that_go_on_in_turn(
    seed: int, num_blocks: int, num_slots: int, is_late: bool
) -> None:
    chance = random.Random(seed)
    engine, _ = scripted_engine(
        num_blocks=num_blocks,
        max_batch_tokens=8,
        copies=slots(num_slots, seed=seed if is_late else None),
    )
    trace = Trace(engine)
    talks = [prompt(chance.randint(4, 12), start) for start in range(6)]
    number = 0
    for _ in range(6):
        asked = []
        for index in chance.sample(range(6), 3):
            number += 1
            asked.append((number, index, list(talks[index])))
            trace.submit(Fill(number, talks[index]), Generate(number, GREEDY))
        trace.run()
        for number_, index, tokens in asked:
            answer = trace.tokens(number_)
            assert answer == expected(tokens)
            if len(tokens) < 24:
                talks[index] = [*tokens, *answer]
            retention = chance.choice(["keep", "normal", "normal", "drop"])
            trace.submit(FreeContext(number_, retention))  # type: ignore[arg-type]
        trace.run()


# What goes, what comes back


def test_contexts_beyond_the_device_come_back_from_the_host() -> None:
    engine, runner = scripted_engine(num_blocks=8, copies=slots(64))
    trace = Trace(engine)
    talks = [prompt(17, start) for start in range(8)]
    assert [talk(trace, number, tokens) for number, tokens in enumerate(talks)] == [0] * 8
    computed = runner.num_tokens
    assert [talk(trace, 10 + number, tokens) for number, tokens in enumerate(talks)] == [16] * 8
    # The prompts' last tokens and the answers.
    assert runner.num_tokens - computed == 8 * 4
    stats = engine.stats()
    assert stats.blocks_from_host >= 6 * 4
    assert 8 * 4 <= stats.host_blocks <= 64


def test_without_a_host_tier_they_are_computed_again() -> None:
    engine, _ = scripted_engine(num_blocks=8)
    trace = Trace(engine)
    talks = [prompt(17, start) for start in range(8)]
    assert [talk(trace, number, tokens) for number, tokens in enumerate(talks)] == [0] * 8
    assert [talk(trace, 10 + number, tokens) for number, tokens in enumerate(talks)] == [0] * 8
    stats = engine.stats()
    assert (stats.host_blocks, stats.blocks_to_host, stats.blocks_from_host) == (0, 0, 0)
    assert engine.info.host_blocks == 0


def test_idle_contexts_that_lost_their_kv_go_on_from_the_host() -> None:
    engine, runner = scripted_engine(num_blocks=10, copies=slots(64))
    trace = Trace(engine)
    for number in range(6):
        trace.submit(Fill(number, prompt(16, number))).run()
    computed = runner.num_tokens
    for number in range(6):
        trace.submit(Fill(number, [5]), Generate(number, GREEDY)).run()
        assert trace.tokens(number) == expected([*prompt(16, number), 5])
    assert runner.num_tokens - computed == 6 * 4


def test_what_was_dropped_is_not_copied() -> None:
    engine, _ = scripted_engine(num_blocks=8, copies=slots(64))
    trace = Trace(engine)
    for number in range(6):
        talk(trace, number, prompt(17, number), retention="drop")
    assert engine.stats().host_blocks == 0
    for number in range(6):
        talk(trace, 10 + number, prompt(17, number), retention="keep")
    assert engine.stats().host_blocks > 0


def test_the_oldest_goes_when_there_are_no_slots() -> None:
    engine, _ = scripted_engine(num_blocks=8, copies=slots(10))
    trace = Trace(engine)
    talks = [prompt(17, start) for start in range(6)]
    for number, tokens in enumerate(talks):
        talk(trace, number, tokens)
    assert engine.stats().host_blocks == 10
    assert talk(trace, 10, talks[4]) == 16
    assert talk(trace, 11, talks[0]) == 0


def test_nothing_is_copied_while_there_is_room() -> None:
    engine, _ = scripted_engine(num_blocks=256, max_batch_tokens=64, copies=slots(64))
    trace = Trace(engine)
    for number in range(6):
        talk(trace, number, prompt(17, number))
    assert engine.stats().blocks_to_host == 0


def test_short_runs_are_computed() -> None:
    for least, found in ((16, 16), (17, 0)):
        engine, _ = scripted_engine(num_blocks=8, copies=slots(64), host_min_tokens=least)
        trace = Trace(engine)
        talks = [prompt(17, start) for start in range(6)]
        for number, tokens in enumerate(talks):
            talk(trace, number, tokens)
        assert talk(trace, 10, talks[0]) == found


def test_others_go_on_while_blocks_come_back() -> None:
    held: list[ScriptedCopies] = []

    def never(runner: ScriptedRunner) -> ScriptedCopies:
        held.append(ScriptedCopies(runner, num_slots=64))
        return held[0]

    engine, _ = scripted_engine(num_blocks=12, max_batch_tokens=32, copies=never)
    trace = Trace(engine)
    for number in range(6):
        talk(trace, number, prompt(17, number))
    held[0].goes_on = lambda: False  # type: ignore[method-assign]
    long = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    trace.submit(Fill(20, prompt(9, 9)), Generate(20, long))
    trace.submit(Fill(21, prompt(17, 0)), Generate(21, GREEDY))
    for _ in range(20):
        trace.step()
    assert trace.tokens(20) == expected(prompt(9, 9), long)
    assert trace.tokens(21) == []
    assert engine.stats().waiting == 1
    # With nothing else to do, steps look again and again, and nothing breaks.
    assert trace.engine.step().has_work
    held[0].goes_on = lambda: True  # type: ignore[method-assign]
    trace.run()
    assert trace.tokens(21) == expected(prompt(17, 0))
    assert trace.filled(21)[0].cached_tokens == 16


def test_who_waits_for_a_place_has_its_blocks_brought_back_ahead() -> None:
    engine, _ = scripted_engine(num_blocks=16, max_batch_size=1, copies=slots(64))
    trace = Trace(engine)
    for number in range(8):
        talk(trace, number, prompt(17, number))
    before = engine.stats().blocks_from_host
    trace.submit(Fill(20, prompt(3, 9)), Generate(20, GREEDY))
    trace.submit(Fill(21, prompt(17, 0)), Generate(21, GREEDY))
    trace.step()
    assert engine.stats().running == 1
    assert engine.stats().blocks_from_host == before + 4
    trace.run()
    assert trace.filled(21)[0].cached_tokens == 16


def test_a_context_freed_while_its_blocks_come_back() -> None:
    engine, _ = scripted_engine(num_blocks=8, copies=slots(64, seed=1))
    trace = Trace(engine)
    for number in range(6):
        talk(trace, number, prompt(17, number))
    trace.submit(Fill(20, prompt(17, 0)), Generate(20, GREEDY)).step()
    trace.submit(FreeContext(20)).run()
    assert talk(trace, 21, prompt(17, 1)) == 16
    assert engine.stats().contexts == 0
    assert engine.stats().free_blocks == 8 or engine._host is not None


def test_blocks_of_poisoned_logits_are_not_found_again() -> None:
    engine, _ = scripted_engine(num_blocks=8, copies=slots(64))
    trace = Trace(engine)
    poisoned = [*prompt(9), POISON, *prompt(8)]
    trace.submit(Fill(1, poisoned), Generate(1, GREEDY)).run()
    failure = trace.failure(1)
    assert failure is not None
    assert failure.code == "numerical_error"
    for number in range(2, 8):
        talk(trace, number, prompt(17, number))
    trace.submit(FreeContext(1), Fill(1, poisoned), Generate(1, GREEDY)).run()
    assert trace.filled(1)[-1].cached_tokens == 0


def test_a_closed_engine_has_given_the_memory_back() -> None:
    made: list[ScriptedCopies] = []

    def make(runner: ScriptedRunner) -> ScriptedCopies:
        made.append(ScriptedCopies(runner, num_slots=4))
        return made[0]

    engine, _ = scripted_engine(copies=make)
    engine.close()
    engine.close()
    assert made[0].is_closed


# What the gateway is told


def test_a_block_on_the_host_is_not_told_to_be_gone() -> None:
    engine, _ = scripted_engine(num_blocks=8, copies=slots(12))
    trace = Trace(engine)
    known: set[int] = set()
    gone = False
    for number in range(12):
        tokens = prompt(17, number % 7)
        talk(trace, number, tokens)
        stored, evicted = engine.take_block_changes()
        assert not known & set(stored)
        assert set(evicted) <= known
        known = (known | set(stored)) - set(evicted)
        gone = gone or bool(evicted)
        assert set(prompt_hashes(tokens, 4)) <= known
        assert known == set(engine.take_block_changes(everything=True).stored)
        assert len(known) <= 8 + 12
    assert gone
    assert len(known) > 8


# Settings


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"host_memory_gb": -1.0}, "host_memory_gb"),
        ({"host_memory_gb": float("nan")}, "host_memory_gb"),
        ({"host_blocks": -1}, "host_blocks"),
        ({"host_min_tokens": 0}, "host_min_tokens"),
        ({"host_blocks": 4, "tensor_parallel": 2}, "host_blocks.*tensor_parallel"),
        ({"host_memory_gb": 1.0, "prefix_caching": False}, "host_memory_gb.*prefix_caching"),
    ],
)
def test_settings_are_checked(values: dict[str, float], match: str) -> None:
    with pytest.raises(SettingsError, match=match):
        BuiltinSettings(**values)  # type: ignore[arg-type]


def test_the_size_is_given_in_gb_or_blocks() -> None:
    assert BuiltinSettings().host_slots(1000) == 0
    assert not BuiltinSettings(host_memory_gb=1, host_blocks=0).has_host_tier
    assert BuiltinSettings(host_memory_gb=2).host_slots(10**6) == 2000
    assert BuiltinSettings(host_memory_gb=2, host_blocks=5).host_slots(10**6) == 5
    with pytest.raises(SettingsError, match=r"host_memory_gb.*1000000 bytes"):
        BuiltinSettings(host_memory_gb=1e-6).host_slots(10**6)


def test_more_than_the_host_has_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"host_memory_gb.*1e\+06 GB are asked for"):
        HostMemory(10**15, is_pinned=False)


def test_the_shortest_run_that_pays() -> None:
    # A block takes 16 ms to compute and 1 ms to bring back.
    assert least_blocks(Rates(start_s=0.040, block_s=0.001, token_s=0.001), 16) == 3
    assert least_blocks(Rates(start_s=0.0, block_s=0.001, token_s=0.001), 16) == 1
    assert least_blocks(Rates(start_s=0.0, block_s=0.016, token_s=0.001), 16) is None


# A model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("host"), CONFIGS["qwen3"])


def test_a_model_says_the_same_with_and_without(checkpoint: Path, overlap: str) -> None:
    said, found = [], []
    for host_blocks in (0, 64):
        values = BuiltinSettings(
            device="cpu",
            dtype="float32",
            num_blocks=12,
            max_batch_tokens=64,
            overlap=overlap,
            host_blocks=host_blocks,
            host_min_tokens=1,
        )
        engine = BuiltinEngine.load(checkpoint, values, model="tiny")
        tokens, cached = [], 0
        for number in range(16):
            own = [(7 * (number % 8) + at * at) % 250 for at in range(49)]
            run_until_idle(engine, Fill(number, own))
            events = run_until_idle(engine, Generate(number, greedy(6)), FreeContext(number))
            tokens.append(tokens_of(events, number))
            engine.check_integrity()
        cached = engine.stats().cached_tokens
        said.append(tokens)
        found.append(cached)
        engine.close()
    assert said[0] == said[1]
    assert found == [0, 8 * 48]


def test_bits_come_back_as_they_were(checkpoint: Path) -> None:
    values = BuiltinSettings(
        device="cpu", dtype="bfloat16", num_blocks=12, host_blocks=64, host_min_tokens=1
    )
    engine = BuiltinEngine.load(checkpoint, values, model="tiny")
    host, pool, runner = engine._host, engine._pool, engine._runner
    assert isinstance(host, HostTier)
    assert runner is not None
    cache = runner.kv_cache  # type: ignore[attr-defined]
    kept: dict[bytes, torch.Tensor] = {}
    for number in range(16):
        own = [(7 * (number % 8) + at * at) % 250 for at in range(49)]
        run_until_idle(engine, Fill(number, own))
        for block in range(12):
            digest = pool.digest(block)
            if digest is not None:
                bits = cache[:, :, block].view(torch.int16).clone()
                assert torch.equal(kept.setdefault(digest, bits), bits)
        run_until_idle(engine, FreeContext(number))
    assert engine.stats().blocks_from_host > 12
    engine.close()


@pytest.mark.parametrize(("head_dim", "dtype"), [(8, torch.bfloat16), (3, torch.float16)])
def test_rows_of_a_matrix_are_the_blocks_of_the_cache(head_dim: int, dtype: torch.dtype) -> None:
    cache = torch.randn(3, 2, 7, 2, 4, head_dim).to(dtype)
    before = cache.clone()
    pieces = pieces_of(cache)
    rows = Rows(pieces)
    held = torch.empty((2, pieces.shape[0], pieces.shape[2]), dtype=pieces.dtype)
    rows.gather(rows.places([5, 1]), held)
    for index, block in enumerate((5, 1)):
        assert torch.equal(held[index].view(dtype).view(3, 2, 2, 4, -1), before[:, :, block])
    rows.scatter(rows.places([0, 6]), held)
    assert torch.equal(cache[:, :, [0, 6]], before[:, :, [5, 1]])
    assert torch.equal(cache[:, :, 1:6], before[:, :, 1:6])


def test_rates_are_measured_when_nothing_is_said(checkpoint: Path) -> None:
    values = BuiltinSettings(device="cpu", dtype="float32", num_blocks=12, host_blocks=8)
    engine = BuiltinEngine.load(checkpoint, values, model="tiny")
    events = run_until_idle(engine, Fill(1, list(range(40))), Generate(1, greedy(4)))
    assert len(tokens_of(events, 1)) == 4
    engine.close()


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_copy_that_is_forgotten_on_its_way_in_is_not_found(is_trusted: bool) -> None:
    """The host tier forgets a block that a failed context had computed meanwhile."""
    copies = ScriptedCopies(ScriptedRunner(num_blocks=1), num_slots=4)
    tier = HostTier(1, copies, reserve=1, least_blocks=1)
    pool, digest = tier.pool, block_hash(root_hash(""), prompt(4))
    pool.release(pool.register(pool.allocate(), digest))
    tier.copy_ahead([])
    tier.collect()
    # The device gives the block away; only the host has it.
    pool.release(pool.allocate())
    assert tier.load(tier.loadable([digest]), limit=1) == 1
    if not is_trusted:
        tier.slots.forget(digest)
    tier.collect()
    assert (pool.find(digest) is not None) == is_trusted
    assert pool.num_free == 1
