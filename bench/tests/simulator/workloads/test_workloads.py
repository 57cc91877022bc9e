"""What holds for every generator of workloads, and for those that are not from the paper."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parrot_bench.applications.figures import gap_s
from parrot_bench.simulator.plan import ApplicationPlan, CallPlan, Segment, Workload
from parrot_bench.simulator.workloads import WORKLOADS, WorkloadError, build
from parrot_bench.simulator.workloads.graph import deduced
from parrot_scheduler.task import LATENCY

from parrot_gateway.semantic.graph.deduction import deduce
from parrot_gateway.semantic.graph.graph import Graph
from parrot_gateway.semantic.graph.node import CallNode
from parrot_gateway.semantic.variable import Variable


def some(name: str, **parameters: float) -> list[ApplicationPlan]:
    workload: Workload = build(name, parameters)
    plans = list(islice(workload.arrivals(), 40))
    for plan in plans[:5]:
        following = workload.successor(plan, plan.arrival_s + 1)
        plans += [following] if following else []
    return plans


@pytest.mark.parametrize("name", WORKLOADS)
def test_plans_are_well_formed(name: str) -> None:
    plans = some(name)
    arrivals = [plan.arrival_s for plan in islice(build(name).arrivals(), 40)]
    assert arrivals == sorted(arrivals)
    assert len({plan.id for plan in plans}) == len(plans)
    for plan in plans:
        assert [call.index for call in plan.calls] == list(range(len(plan.calls)))
        for call in plan.calls:
            assert all(producer < call.index for producer in call.after)
            assert all(segment.tokens >= 1 for segment in call.prompt)
            assert 1 <= call.output_tokens <= call.max_tokens
            assert call.pause_s >= 0
        members = Counter(group for call in plan.calls for group in call.groups)
        assert all(group.size == count for group, count in members.items())


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_seeds_give_equal_plans(name: str) -> None:
    assert some(name, seed=3) == some(name, seed=3)


@pytest.mark.parametrize("name", ["gpts", "calibration", "mixed", "agents", "tenants"])
def test_seeds_matter(name: str) -> None:
    assert some(name, seed=1) != some(name, seed=2)


@pytest.mark.parametrize("name", WORKLOADS)
def test_scale_shortens_prompts(name: str) -> None:
    def tokens(scale: float) -> int:
        plans = islice(build(name, {"scale": scale}).arrivals(), 20)
        return sum(s.tokens for plan in plans for call in plan.calls for s in call.prompt)

    assert tokens(0.25) < 0.6 * tokens(1.0)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf")])
def test_impossible_parameters_are_refused_by_name(name: str, bad: float) -> None:
    with pytest.raises(WorkloadError, match=rf"workload {name}: scale must be a positive number"):
        build(name, {"scale": bad})


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(WorkloadError, match="no workload 'nope'; there are calibration, chain"):
        build("nope")
    with pytest.raises(WorkloadError, match="no parameter 'nope'; it has seed, scale, rate, count"):
        build("gpts", {"nope": 1})
    with pytest.raises(WorkloadError, match=r"gpts: count cannot be '1\.5'; it is of type int"):
        build("gpts", {"count": "1.5"})
    with pytest.raises(WorkloadError, match="splitter must be"):
        list(build("map-reduce", {"splitter": "words"}).arrivals())
    with pytest.raises(WorkloadError, match="document must be below 10"):
        list(build("chain-background", {"document": 10}).arrivals())


def test_parameters_are_read_from_text() -> None:
    workload = build("mixed", {"count": "7", "rate": "0.5", "same_paper": "false"})
    values = dataclasses.asdict(workload)
    assert (values["count"], values["rate"], values["same_paper"]) == (7, 0.5, False)
    assert sum(plan.kind == "chat" for plan in workload.arrivals()) == 7


def test_a_fleet_of_a_million_calls_streams() -> None:
    plans = islice(build("mapreduce-fleet").arrivals(), 1000)
    assert sum(len(plan.calls) for plan in plans) == 17_000
    small = build("mapreduce-fleet", {"count": 100})
    assert sum(len(plan.calls) for plan in small.arrivals()) == 102


def test_agents_are_as_long_as_the_recorded_ones() -> None:
    plans = list(build("agents", {"clients": 500, "count": 500}).arrivals())
    calls = [call for plan in plans for call in plan.calls]
    prompts = [sum(s.tokens for s in call.prompt) for call in calls]
    outputs = [call.output_tokens for call in calls]
    gaps = [call.pause_s for call in calls if call.after]
    assert mean(len(plan.calls) for plan in plans) == pytest.approx(69.5, rel=0.1)
    assert median(len(plan.calls) for plan in plans) == pytest.approx(45.5, rel=0.15)
    assert mean(prompts) == pytest.approx(122_000, rel=0.15)
    assert median(prompts) == pytest.approx(104_000, rel=0.15)
    assert mean(outputs) == pytest.approx(440, rel=0.1)
    assert median(outputs) == pytest.approx(216, rel=0.1)
    assert median(gaps) == pytest.approx(10, rel=0.1)
    for within, share in ((10, 0.51), (30, 0.74), (60, 0.81), (120, 0.87), (171, 0.90)):
        assert sum(gap <= within for gap in gaps) / len(gaps) == pytest.approx(share, abs=0.02)


def test_an_agents_turn_goes_on_from_the_turn_before() -> None:
    plan = next(iter(build("agents", {"seed": 1}).arrivals()))
    turns = [call.prompt for call in plan.calls]
    extending = sum(later[: len(earlier)] == earlier for earlier, later in pairwise(turns))
    assert extending / (len(turns) - 1) > 0.9
    assert plan.calls[1].prompt[3] == Segment(("output", plan.id, 0), plan.calls[0].output_tokens)
    assert {call.successors for call in plan.calls} == {0}


def test_gaps_stay_between_a_second_and_an_hour() -> None:
    from random import Random

    random = Random(1)
    gaps = [gap_s(random) for _ in range(20_000)]
    assert 1.0 <= min(gaps) < 1.5
    assert 1800 < max(gaps) <= 3600.0


def test_a_client_runs_one_agent_after_the_other() -> None:
    workload = build("agents", {"clients": 2, "count": 5, "turns_scale": 0.05})
    first, second = workload.arrivals()
    third = workload.successor(first, 100.0)
    assert third is not None
    assert (third.id, third.arrival_s) == ("agent-0-1", 100.0)
    assert workload.successor(second, 1.0) is not None
    last = workload.successor(third, 200.0)
    assert last is not None
    assert last.id == "agent-0-2"
    assert workload.successor(last, 300.0) is None


def test_tenants_are_skewed_and_the_flood_has_its_time() -> None:
    plans = list(build("tenants").arrivals())
    floods = [plan.arrival_s for plan in plans if plan.kind == "flood"]
    assert 30 <= min(floods) < max(floods) < 90
    assert len(floods) / 60 == pytest.approx(60, rel=0.1)
    regular = Counter(plan.tenant for plan in plans if plan.kind == "tenant")
    assert regular["tenant-0"] > 5 * regular["tenant-10"] > 0
    assert regular.total() / 120 == pytest.approx(20, rel=0.1)


def test_half_of_the_calls_share_the_hot_prefix() -> None:
    plans = list(build("hot-prefix").arrivals())
    assert sum(plan.kind == "hot" for plan in plans) / 2000 == pytest.approx(0.5, abs=0.05)


# What is deduced for a graph is what the gateway's own code deduces.


def by_the_gateway(
    calls: Sequence[CallPlan], waited: Sequence[int]
) -> tuple[list[str], set[frozenset[int]]]:
    names = [f"v{call.index}" for call in calls]
    variables = {name: Variable(name, name, "s", max_value_bytes=100) for name in names}
    graph = Graph("demo", variables, max_unfinished=1000, max_finished=1000)
    for call in calls:
        inputs = tuple(f"v{producer}" for producer in call.after)
        graph.add(
            CallNode(id=f"c{call.index}", session_id="s", inputs=inputs, output=f"v{call.index}")
        )
    found = deduce(graph, {f"v{index}": LATENCY for index in waited})
    objectives = [found.objective_of(f"c{call.index}").kind for call in calls]
    return objectives, {frozenset(int(name[1:]) for name in group) for group in found.groups}


@st.composite
def graphs(draw: st.DrawFn) -> list[CallPlan]:
    calls = []
    for index in range(draw(st.integers(1, 12))):
        after = draw(st.sets(st.integers(0, index - 1), max_size=4)) if index else set()
        calls.append(
            CallPlan(
                index=index,
                prompt=(Segment("p", 1),),
                output_tokens=1,
                max_tokens=1,
                after=tuple(sorted(after)),
            )
        )
    return calls


@given(graphs(), st.data())
def test_waits_are_deduced_as_the_gateway_does(calls: list[CallPlan], data: st.DataObject) -> None:
    indices = st.integers(0, len(calls) - 1)
    waited = sorted(data.draw(st.sets(indices, min_size=1, max_size=3)))
    plan = deduced(calls, *waited)
    objectives, groups = by_the_gateway(calls, waited)
    assert [call.objective.kind for call in plan] == objectives
    members: dict[str, set[int]] = {}
    for call in plan:
        for ref in call.groups:
            members.setdefault(ref.id, set()).add(call.index)
            assert ref.objective == LATENCY
    assert {frozenset(m) for m in members.values()} == groups


def test_every_round_of_agents_is_a_group_but_the_last_which_is_waited_for_one_by_one() -> None:
    plan = next(iter(build("multi-agent", {"branches": 4}).arrivals()))
    assert [len(call.groups) for call in plan.calls] == [1] * 36 + [0] * 4
    assert {call.groups[0].size for call in plan.calls[:36]} == {4}
    assert {call.objective for call in plan.calls[36:]} == {LATENCY}
    assert [call.successors for call in plan.calls[::4]] == list(range(9, -1, -1))
