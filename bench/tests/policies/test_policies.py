"""Duties of the policies for comparison, and their choices."""

from __future__ import annotations

import pytest
from harness.engine_pools import Engines, chain
from harness.placement_duties import (
    check_draining,
    check_no_engines,
    check_same_history,
    check_too_small,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_bench.policies import PATHS, PRESETS, preset_of
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.task import EngineDescription

every_policy = pytest.mark.parametrize("policy", PATHS.values(), ids=PATHS)


def test_presets_are_found_by_name_and_by_import_path() -> None:
    assert preset_of("parrot") == SchedulerConfig()
    for name, path in PATHS.items():
        assert preset_of(name) == preset_of(path) == PRESETS[name]
        assert PRESETS[name].place == path
    with pytest.raises(ValueError, match="there are parrot, paper, "):
        preset_of("best")


@every_policy
def test_every_placement_has_its_duties(policy: str) -> None:
    check_no_engines(policy)
    check_draining(policy)


@every_policy
@pytest.mark.parametrize("capacity", [1_100, 100_000])
def test_an_engine_too_small_is_passed_over(policy: str, capacity: int) -> None:
    check_too_small(policy, capacity)


@every_policy
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_the_same_history_leads_to_the_same_places(policy: str, seed: int) -> None:
    check_same_history(policy, seed)


@pytest.mark.parametrize("policy", ["lmetric", "prefix-linear"])
def test_engines_whose_blocks_are_seen_and_others_are_compared(policy: str) -> None:
    """Blocks that one engine is assumed to cache take nothing from what the other has."""
    engines = Engines(PATHS[policy], 1)
    engines.pool.prefixes.stored(0, chain(1, 100))
    description = EngineDescription("hidden", "m", 100_000, 64, 2048, block_tokens=0)
    hidden = engines.pool.join(description)
    engines.end(engines.put_on(hidden, engines.state(300, 10, template="x", template_tokens=100)))
    both = {"template": "x", "template_tokens": 100}
    choice = engines.choose(engines.state(1650, 10, chain(1, 100), **both))
    assert choice is not None
    assert (choice.row, choice.expected_cached_tokens) == (0, 1600)
    choice = engines.choose(engines.state(1650, 10, chain(2, 100), **both))
    assert choice is not None
    assert (choice.row, choice.expected_cached_tokens) == (hidden, 100)


def test_round_robin_takes_turns_over_those_that_are_there() -> None:
    engines = Engines(PATHS["round-robin"], 3)
    rows = [engines.place(engines.state(10, 1)) for _ in range(4)]
    assert [choice and choice.row for choice in rows] == [0, 1, 2, 0]
    engines.pool.drain(1)
    rows = [engines.place(engines.state(10, 1)) for _ in range(2)]
    assert [choice and choice.row for choice in rows] == [2, 0]


def test_least_loaded_counts_sequences_then_tokens_to_prefill() -> None:
    engines = Engines(PATHS["least-loaded"], 3)
    engines.load(0, 2)
    engines.put_on(1, engines.state(100, 10))
    engines.put_on(2, engines.state(50, 10))
    choice = engines.place(engines.state(10, 10))
    assert choice is not None
    assert (choice.row, choice.cost) == (2, 1.0)
    choice = engines.place(engines.state(10, 10))
    assert choice is not None
    assert choice.row == 1


def test_session_affinity_stays_until_the_engine_leaves() -> None:
    engines = Engines(PATHS["session-affinity"], 2)
    engines.load(0, 1)
    first = engines.state(100, 10, application="chat")
    assert (choice := engines.place(first)) is not None
    assert (choice.row, choice.decided_by) == (1, "load")
    others = engines.load(1, 30)
    second = engines.state(100, 10, application="chat")
    assert (choice := engines.place(second)) is not None
    assert (choice.row, choice.decided_by) == (1, "session")
    for state in (first, second, *others):
        engines.end(state)
    engines.pool.leave("e1")
    assert (choice := engines.place(engines.state(100, 10, application="chat"))) is not None
    assert (choice.row, choice.decided_by) == (0, "load")


def test_the_linear_cost_adds_prefill_and_decode() -> None:
    engines = Engines(PATHS["prefix-linear"], 2)
    engines.pool.prefixes.stored(0, chain(1, 100))
    engines.load(0, 2, prompt=500, output=200)
    # 1400 tokens of decodes there against 1600 that are cached there.
    assert (choice := engines.choose(engines.state(1700, 10, chain(1, 100)))) is not None
    assert (choice.row, choice.expected_cached_tokens) == (0, 1600)
    engines.load(0, 1)
    assert (choice := engines.choose(engines.state(1700, 10, chain(1, 100)))) is not None
    assert choice.row == 1


def test_lmetric_multiplies_and_chases_a_hot_engine() -> None:
    engines = Engines(PATHS["lmetric"], 2, max_batch=512)
    engines.pool.prefixes.stored(0, chain(1, 100))
    engines.load(0, 9, prompt=100, output=10)
    assert (choice := engines.choose(engines.state(1700, 10, chain(1, 100)))) is not None
    assert (choice.row, choice.cost) == (0, 100 * 10)
    engines.load(0, 10, prompt=100, output=10)
    assert (choice := engines.choose(engines.state(1700, 10, chain(1, 100)))) is not None
    assert (choice.row, choice.cost) == (1, 1700)
    # Nearly all cached: the product all but vanishes, whatever runs there.
    engines.load(0, 300, prompt=100, output=10)
    assert (choice := engines.choose(engines.state(1601, 10, chain(1, 100)))) is not None
    assert choice.row == 0


def test_queued_tokens_of_the_same_prefix_count_as_cached() -> None:
    engines = Engines(PATHS["round-robin"], 2)
    prompts = [engines.state(3200, 10, chain(1, 200)) for _ in range(4)]
    choices = [engines.place(state) for state in prompts]
    assert [c and c.expected_cached_tokens for c in choices] == [0, 0, 3199, 3199]


@every_policy
def test_silent_engines_are_believed_to_hold_what_ran_there(policy: str) -> None:
    engines = Engines(policy, 1, block_tokens=0, reports=False)
    first = engines.state(1000, 10, application="chat", template="t", template_tokens=300)
    assert (choice := engines.place(first)) is not None
    assert choice.expected_cached_tokens == 0
    engines.end(first)
    engines.application(first).context_tokens = 1010
    other = engines.state(900, 10, template="t", template_tokens=300)
    assert (choice := engines.choose(other)) is not None
    assert choice.expected_cached_tokens == 300
    again = engines.state(1200, 10, application="chat", template="t", template_tokens=300)
    assert (choice := engines.choose(again)) is not None
    assert choice.expected_cached_tokens == 1010


def test_lmetric_counts_the_queued_tokens_of_its_own_prefix() -> None:
    """So engines compute it anew."""
    engines = Engines(PATHS["lmetric"], 4)
    states = [engines.state(6500, 50, chain(1, 400) + chain(10 + i, 5)) for i in range(6)]
    choices = [engines.place(state) for state in states]
    assert len({choice.row for choice in choices if choice is not None}) == 4
