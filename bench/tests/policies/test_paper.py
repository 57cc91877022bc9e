"""Parrot's algorithm as published, with what it does badly."""

from __future__ import annotations

from harness.engine_pools import Engines, chain
from parrot_bench.policies import LATENCY_TOKENS, PATHS
from parrot_scheduler.task import LATENCY, GroupRef


def test_a_group_stays_on_one_engine_and_waits_when_that_is_full() -> None:
    engines = Engines(PATHS["paper"], 2, max_batch=4)
    group = (GroupRef("map", 6),)
    members = [engines.state(100, 10, groups=group) for _ in range(6)]
    rows = [choice and choice.row for choice in map(engines.place, members)]
    assert rows == [0, 0, 0, 0, None, None]
    engines.end(members[0])
    assert (choice := engines.place(members[4])) is not None
    assert (choice.row, choice.decided_by) == (0, "group")


def test_a_group_waits_for_room_for_all_of_it_while_engines_are_busy() -> None:
    engines = Engines(PATHS["paper"], 1, max_batch=8)
    busy = engines.load(0, 4)
    member = engines.state(100, 10, groups=(GroupRef("map", 6),))
    assert engines.place(member) is None
    engines.end(busy[0])
    engines.end(busy[1])
    assert engines.place(member) is not None


def test_a_latency_task_cuts_an_engine_down_and_prefers_one_that_is_cut() -> None:
    engines = Engines(PATHS["paper"], 3)
    first = engines.place(engines.state(1000, 100, objective=LATENCY))
    assert first is not None
    second = engines.place(engines.state(1000, 100, objective=LATENCY))
    assert second is not None
    assert first.row == second.row
    large = engines.place(engines.state(LATENCY_TOKENS, 100))
    assert large is not None
    assert large.row != first.row
    rows = [engines.place(engines.state(1000, 100, objective=LATENCY)) for _ in range(5)]
    # Three more fit into what it has left; the rest goes to the one that is empty.
    assert [choice and choice.row for choice in rows].count(first.row) == 3


def test_a_holder_of_the_prefix_wins_whatever_it_has_to_do() -> None:
    engines = Engines(PATHS["paper"], 2)
    engines.pool.prefixes.stored(0, chain(1, 4))
    engines.load(0, 50, prompt=1000, output=500)
    choice = engines.place(engines.state(70, 1000, chain(1, 4)))
    assert choice is not None
    assert (choice.row, choice.decided_by) == (0, "prefix")


def test_a_group_whose_engine_drains_goes_on_elsewhere() -> None:
    engines = Engines(PATHS["paper"], 2)
    groups = (GroupRef("g", 4),)
    first = engines.place(engines.state(100, 10, groups=groups))
    assert first is not None
    engines.pool.drain(first.row)
    second = engines.place(engines.state(100, 10, groups=groups))
    assert second is not None
    assert second.row != first.row
