"""Retention: who keeps what, and for how long."""

from __future__ import annotations

import random

import numpy as np
import pytest
from harness.engine_pools import CONFIG, Engines
from hypothesis import given
from hypothesis import strategies as st
from parrot_scheduler.retention import (
    HAZARD,
    LEASE_S,
    MAX_LEASE_S,
    POLICIES,
    HazardRetention,
    chance_of_return,
)
from parrot_scheduler.task import DEFAULT_STEP_MODEL
from parrot_scheduler.task_state import Application

PREFILL_S = DEFAULT_STEP_MODEL.prefill_token_s
TARGET = CONFIG.working_set_target


def lease(fill: float, prefill_s: float = PREFILL_S) -> float:
    return float(HazardRetention(CONFIG).lease_s(np.array([fill]), np.array([prefill_s]))[0])


def paused(engines: Engines, name: str, row: int, tokens: float, since: float) -> Application:
    application = Application(name, "t", 0.0, idle_since=since, retained_tokens=tokens)
    application.last_engine = engines.pool.table.ids[row]
    engines.pool.retain(row, tokens)
    return application


def names(applications: list[Application]) -> list[str]:
    return [application.id for application in applications]


def test_policies_know_their_names() -> None:
    for name, factory in POLICIES.items():
        assert factory(CONFIG, random.Random(0)).name == name


def test_the_chance_of_return_falls_with_the_time_away() -> None:
    for idle_s, chance in HAZARD:
        assert chance_of_return(idle_s) == pytest.approx(chance)
    assert chance_of_return(15.0) == pytest.approx(0.26)
    assert chance_of_return(10_000.0) == pytest.approx(0.07)


def test_an_engine_filled_to_the_target_keeps_for_the_lease() -> None:
    assert lease(TARGET) == pytest.approx(LEASE_S)
    assert lease(0.3) == MAX_LEASE_S
    assert lease(0.95) < 10.0
    assert lease(1.0) == lease(1.5) == 0.0


@given(a=st.floats(0, 1.2), b=st.floats(0, 1.2), slower=st.floats(1, 10))
def test_less_memory_means_shorter_and_a_slow_engine_longer(
    a: float, b: float, slower: float
) -> None:
    assert lease(max(a, b)) <= lease(min(a, b))
    assert lease(a, PREFILL_S * slower) >= lease(a)


def test_the_longest_idle_goes_first_and_makes_room_for_the_others() -> None:
    engines = Engines("parrot", 1, capacity=10_000)
    keep = HazardRetention(CONFIG)
    applications = [
        paused(engines, "oldest", 0, 4000, since=0.0),
        paused(engines, "older", 0, 3000, since=60.0),
        paused(engines, "young", 0, 2500, since=90.0),
    ]
    assert names(keep.expired(applications, engines.pool, 100.0)) == ["oldest"]


def test_a_full_engine_does_not_cost_others_what_they_keep() -> None:
    engines = Engines("parrot", 2, capacity=10_000)
    keep = HazardRetention(CONFIG)
    applications = [
        paused(engines, "roomy", 1, 1000, since=0.0),
        paused(engines, "tight", 0, 9500, since=50.0),
    ]
    assert names(keep.expired(applications, engines.pool, 100.0)) == ["tight"]
    assert names(keep.expired(applications[:1], engines.pool, MAX_LEASE_S + 1.0)) == ["roomy"]


def test_memory_that_nobody_needs_is_not_taken_away() -> None:
    engines = Engines("parrot", 1, capacity=10_000)
    application = paused(engines, "a", 0, 9_000, since=0.0)
    keep = HazardRetention(CONFIG)
    assert lease(0.9) < 100.0
    assert names(keep.expired([application], engines.pool, 100.0)) == []
    engines.load(0, 1, prompt=400, output=200)
    assert names(keep.expired([application], engines.pool, 100.0)) == ["a"]


def test_nothing_is_kept_on_an_engine_that_left() -> None:
    engines = Engines("parrot", 1)
    application = Application(
        "a", "t", 0.0, idle_since=0.0, retained_tokens=10.0, last_engine="gone"
    )
    keep = HazardRetention(CONFIG)
    assert names(keep.expired([application], engines.pool, MAX_LEASE_S + 1.0)) == ["a"]


def test_a_clock_that_went_back_keeps() -> None:
    engines = Engines("parrot", 1, capacity=10_000)
    application = paused(engines, "a", 0, 9_900, since=100.0)
    assert HazardRetention(CONFIG).expired([application], engines.pool, 50.0) == []


def test_what_follows_decides_on_a_tasks_kv() -> None:
    engines = Engines("parrot", 1)
    keep = HazardRetention(CONFIG)

    def retention_of(prompt: int, output: int = 10, returns: float = 0.0, **known: object) -> str:
        application = Application("a", "t", 0.0, num_placed=1)
        state = engines.state(prompt, output, returns=returns)
        for name, value in known.items():
            setattr(state if name == "successors" else application, name, value)
        return keep.retention_of(state, application, engines.pool, 0.0)

    assert retention_of(100) == "normal"
    assert retention_of(100, successors=1) == "keep"
    assert retention_of(100, output=0) == "keep"
    assert retention_of(100, context_tokens=80) == "keep"
    assert retention_of(100, context_tokens=800) == "normal"
    assert retention_of(100, returns=0.9) == "keep"
    assert retention_of(100, returns=0.1) == "normal"
    assert retention_of(100, has_finished=True) == "drop"
    assert retention_of(100, has_finished=True, num_queued=1) == "normal"


def test_without_retention_nothing_is_kept_or_dropped() -> None:
    engines = Engines("parrot", 1)
    keep = POLICIES["none"](CONFIG, random.Random(0))
    state = engines.state(100, 10)
    assert keep.retention_of(state, Application("a", "t", 0.0), engines.pool, 0.0) == "normal"
    old = paused(engines, "a", 0, 90_000, since=0.0)
    assert keep.expired([old], engines.pool, 1e6) == []
