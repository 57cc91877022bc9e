"""Duties of the placement policy, which any other has as well."""

from __future__ import annotations

import sys
from typing import Any

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

every_policy = pytest.mark.parametrize("policy", ["parrot"])


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


def test_a_decision_runs_as_many_lines_for_a_thousand_engines_as_for_ten() -> None:
    def lines(num: int) -> int:
        engines = Engines("parrot", num)
        for row in engines.rows:
            engines.pool.prefixes.stored(row, chain(1, 20))
        for row in engines.rows[:3]:
            engines.pool.prefixes.stored(row, chain(1, 30))
            engines.load(row, 2)
        state = engines.state(800, 100, chain(1, 40))
        ran = 0

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal ran
            ran += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            assert engines.choose(state) is not None
        finally:
            sys.settrace(before)
        return ran

    assert lines(1000) <= lines(10) + 20
