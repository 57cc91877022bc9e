"""Objectives: parsed, ordered, and carried back through the graph to whom they concern."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_scheduler.task import LATENCY, OBJECTIVE_KINDS, THROUGHPUT, Objective, stronger

from parrot_gateway.exceptions import InvalidRequestError
from parrot_gateway.semantic.call_spec import parse_objective
from parrot_gateway.semantic.graph import deduction as module
from parrot_gateway.semantic.graph.deduction import Deduction, deduce
from parrot_gateway.semantic.graph.graph import Graph
from parrot_gateway.semantic.graph.node import CallNode, TransformNode
from parrot_gateway.semantic.variable import Variable

TTFT = Objective("ttft", 0.2)
TPOT = Objective("tpot", 0.05)
DEADLINE = Objective("deadline", 2.0)


def graph_of(edges: dict[str, str], *, transforms: str = "") -> Graph:
    """Node name -> names of the nodes whose output it reads; a node's output bears its name."""
    names = {*edges, *(name for reads in edges.values() for name in reads.split())}
    held = {n: Variable(n, n, "s", max_value_bytes=100) for n in names}
    graph = Graph("demo", held, max_unfinished=10_000, max_finished=10_000)
    for name, reads in edges.items():
        kind = TransformNode if name in transforms.split() else CallNode
        graph.add(kind(id=name, session_id="s", inputs=tuple(reads.split()), output=name))
    return graph


def groups(found: Deduction) -> set[str]:
    return {" ".join(sorted(group)) for group in found.groups}


MAP_REDUCE = {"split": "", "m1": "split", "m2": "split", "m3": "split", "reduce": "m1 m2 m3"}


@pytest.mark.parametrize(
    ("text", "kind", "seconds"),
    [
        ("latency", "latency", None),
        (" Throughput ", "throughput", None),
        ("ttft=200ms", "ttft", 0.2),
        ("tpot = 50 ms", "tpot", 0.05),
        ("deadline=2s", "deadline", 2.0),
        ("deadline=1.5min", "deadline", 90.0),
        ("deadline=24h", "deadline", 86400.0),
        ("TPOT=800us", "tpot", 0.0008),
    ],
)
def test_objectives_are_read(text: str, kind: str, seconds: float | None) -> None:
    objective = parse_objective(text)
    assert objective.kind == kind
    assert objective.seconds == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    "text",
    ["", "fast", "ttft", "ttft=", "ttft=200", "ttft=0ms", "ttft=-1s", "ttft=1e3s", "deadline=25h",
     "latency=2s", "ttft=1s2", "ttft=nans", "deadline=١s", "x" * 10_000, "tpot=9999999999s"],
)  # fmt: skip
def test_other_objectives_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_objective(text, "X-Parrot-Objective")
    assert caught.value.param == "X-Parrot-Objective"
    assert len(caught.value.message) < 250


OBJECTIVES = st.one_of(
    st.sampled_from([LATENCY, THROUGHPUT]),
    st.builds(
        lambda kind, us: parse_objective(f"{kind}={us}us"),
        st.sampled_from(["ttft", "tpot", "deadline"]),
        st.integers(1, 10**8),
    ),
)


@given(OBJECTIVES)
def test_an_objective_is_written_as_it_is_read(objective: Objective) -> None:
    again = parse_objective(str(objective))
    assert again.kind == objective.kind
    if objective.seconds is not None:
        assert again.seconds == pytest.approx(objective.seconds)


@pytest.mark.parametrize(
    ("objective", "text"),
    [
        (Objective("ttft", 0.0), "ttft=0s"),
        (Objective("tpot", 2.5e-4), "tpot=250us"),
        (Objective("ttft", 0.2), "ttft=200ms"),
        (Objective("deadline", 90.0), "deadline=1.5min"),
        (Objective("deadline", 7200.0), "deadline=2h"),
    ],
)
def test_an_objective_is_written_in_the_largest_unit_that_is_short(
    objective: Objective, text: str
) -> None:
    assert str(objective) == text


@given(OBJECTIVES, OBJECTIVES, OBJECTIVES)
def test_strength_is_an_order(a: Objective, b: Objective, c: Objective) -> None:
    assert stronger(a, b) in (a, b)
    assert stronger(a, b).strength == stronger(b, a).strength
    assert stronger(stronger(a, b), c).strength == stronger(a, stronger(b, c)).strength
    if OBJECTIVE_KINDS.index(a.kind) > OBJECTIVE_KINDS.index(b.kind):
        assert stronger(a, b) == a
    if a.kind == b.kind and (a.seconds or 0) < (b.seconds or 0):
        assert stronger(a, b) == a


def test_impossible_objectives() -> None:
    for kind, seconds in (("latency", 1.0), ("ttft", None), ("ttft", 0.0)):
        with pytest.raises(ValueError):
            Objective.of(kind, seconds)  # type: ignore[arg-type]


def hurried(found: Deduction) -> set[str]:
    """The calls with latency: the critical chain of a wait for latency."""
    return {call for call, objective in found.objectives.items() if objective == LATENCY}


def test_latency_travels_along_a_chain() -> None:
    found = deduce(graph_of({"a": "", "b": "a", "c": "b", "other": ""}), {"c": LATENCY})
    assert dict(found.objectives) == {"a": LATENCY, "b": LATENCY, "c": LATENCY}
    assert hurried(found) == {"a", "b", "c"}
    assert not found.groups
    assert found.objective_of("other") == THROUGHPUT


def test_parallel_producers_become_a_task_group() -> None:
    found = deduce(graph_of(MAP_REDUCE), {"reduce": LATENCY})
    assert hurried(found) == {"reduce", "split"}
    assert groups(found) == {"m1 m2 m3"}
    assert found.groups[frozenset({"m1", "m2", "m3"})] == LATENCY
    assert {found.objective_of(m) for m in ("m1", "m2", "m3")} == {THROUGHPUT}
    assert found.objective_of("split") == found.objective_of("reduce") == LATENCY


def test_throughput_makes_all_of_it_throughput() -> None:
    found = deduce(graph_of(MAP_REDUCE), {"reduce": THROUGHPUT})
    assert set(found.objectives.values()) == {THROUGHPUT}
    assert set(found.objectives) == set(MAP_REDUCE)
    assert not found.groups


def test_a_later_stronger_wait_deduces_anew() -> None:
    graph = graph_of(MAP_REDUCE)
    weak = deduce(graph, {"reduce": THROUGHPUT})
    strong = deduce(graph, {"reduce": LATENCY}, start=weak)
    assert strong == deduce(graph, {"reduce": LATENCY})
    assert weak.objective_of("split") == THROUGHPUT
    assert deduce(graph, {"reduce": THROUGHPUT}, start=strong) == strong


def test_a_member_that_is_waited_for_itself_gets_latency() -> None:
    found = deduce(graph_of(MAP_REDUCE), {"reduce": LATENCY, "m2": LATENCY})
    assert found.objective_of("m2") == LATENCY
    assert found.objective_of("m1") == THROUGHPUT
    assert groups(found) == {"m1 m2 m3"}


def test_a_call_shared_by_two_consumers_is_in_both_groups() -> None:
    edges = {"a": "", "b": "", "c": "", "r1": "a b", "r2": "b c", "end": "r1 r2"}
    for waited in ({"end": LATENCY}, {"r1": LATENCY, "r2": LATENCY}):
        found = deduce(graph_of(edges), waited)
        assert {"a b", "b c"} <= groups(found)
        assert found.groups_of("b") == [frozenset("ab"), frozenset("bc")]


def test_parallel_branches_of_single_producers_stay_together() -> None:
    edges = {"a1": "", "a2": "", "m1": "a1", "m2": "a2", "end": "m1 m2"}
    found = deduce(graph_of(edges), {"end": LATENCY})
    assert groups(found) == {"m1 m2", "a1 a2"}
    assert hurried(found) == {"end"}


def test_a_call_that_feeds_a_member_is_no_member() -> None:
    edges = {"p": "", "m": "p", "n": "p", "end": "m n p"}
    found = deduce(graph_of(edges), {"end": LATENCY})
    assert groups(found) == {"m n"}
    assert hurried(found) == {"end", "p"}


@pytest.mark.parametrize("objective", [TTFT, TPOT])
def test_bounds_on_tokens_concern_the_last_call_and_hurry_the_rest(objective: Objective) -> None:
    found = deduce(graph_of(MAP_REDUCE), {"reduce": objective})
    assert found.objective_of("reduce") == objective
    assert found.objective_of("split") == LATENCY
    assert found.objective_of("m1") == THROUGHPUT
    assert list(found.groups.values()) == [LATENCY]


def test_a_deadline_concerns_all_of_it() -> None:
    found = deduce(graph_of(MAP_REDUCE), {"reduce": DEADLINE})
    assert set(found.objectives.values()) == {DEADLINE}
    assert list(found.groups.values()) == [DEADLINE]


def test_transforms_are_looked_through() -> None:
    edges = {"a": "", "t1": "a", "b": "", "t2": "t1 b", "end": "t2", "last": "end"}
    graph = graph_of(edges, transforms="t1 t2 last")
    found = deduce(graph, {"last": TTFT})
    assert set(found.objectives) == {"a", "b", "end"}
    assert groups(found) == {"a b"}
    assert found.objective_of("end") == LATENCY  # all its text is needed, not its first token
    several = deduce(graph, {"t2": LATENCY})
    assert groups(several) == {"a b"}
    assert hurried(several) == set()


def test_finished_calls_do_not_count() -> None:
    graph = graph_of({"a": "", "b": "", "end": "a b"})
    assert groups(deduce(graph, {"end": LATENCY})) == {"a b"}
    producer = graph.get("a")
    assert producer is not None
    graph.variables["a"].set("text")
    graph.finish("a", "done", 1.0)
    found = deduce(graph, {"end": LATENCY, "a": LATENCY, "unknown": LATENCY})
    assert hurried(found) == {"b", "end"}
    assert found.objective_of("b") == LATENCY
    assert "a" not in found.objectives


def test_an_objective_of_a_call_counts_as_a_wait_for_its_output() -> None:
    graph = graph_of({"a": "", "b": "a"})
    assert deduce(graph, {}).objectives == {}
    assert deduce(graph, {}, calls={"b": LATENCY}) == deduce(graph, {"b": LATENCY})
    assert deduce(graph, {"b": THROUGHPUT}, calls={"b": LATENCY}).objective_of("a") == LATENCY


def test_work_is_bounded_and_weaker_waits_are_not_walked_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = graph_of({"a": "", "b": "a", "c": "b", "d": "", "e": "d"})
    waited = {"c": LATENCY, "e": DEADLINE}
    assert deduce(graph, waited).objective_of("d") == DEADLINE
    monkeypatch.setattr(module, "MAX_STEPS", 2)
    found = deduce(graph, waited)
    assert found.objective_of("a") == LATENCY
    assert (found.objective_of("d"), found.objective_of("e")) == (THROUGHPUT, DEADLINE)


def test_a_thousand_calls_and_waits() -> None:
    edges = {f"c{i}": f"c{i - 1}" if i else "" for i in range(1_000)}
    graph = graph_of(edges)
    found = deduce(graph, dict.fromkeys(edges, THROUGHPUT))
    assert set(found.objectives.values()) == {THROUGHPUT}
    found = deduce(graph, {"c999": LATENCY})
    assert len(hurried(found)) == 1_000


# An oracle that knows only paths: all of them, listed.


@st.composite
def dags(draw: st.DrawFn) -> dict[str, str]:
    size = draw(st.integers(1, 8))
    edges: dict[str, str] = {}
    for i in range(size):
        reads = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        edges[f"n{i}"] = " ".join(f"n{r}" for r in sorted(reads))
    return edges


def paths_from(edges: dict[str, str], root: str) -> list[list[str]]:
    """Every way back from a call, as the list of calls passed."""
    found = [[root]]
    for before in edges[root].split():
        found += [[root, *path] for path in paths_from(edges, before)]
    return found


@given(dags(), st.data())
@settings(max_examples=150, deadline=None)
def test_against_all_paths(edges: dict[str, str], data: st.DataObject) -> None:
    root = data.draw(st.sampled_from(sorted(edges)))
    found = deduce(graph_of(edges), {root: LATENCY})
    height: dict[str, int] = {}
    for path in paths_from(edges, root):
        height[path[-1]] = max(height.get(path[-1], 0), len(path) - 1)
    assert set(found.objectives) == set(height)
    reaches = {(path[-1], call) for call in height for path in paths_from(edges, call)}
    for call in height:
        company = {other for other in height if other != call and height[other] == height[call]}
        assert found.objective_of(call) == (THROUGHPUT if company else LATENCY)
        assert bool(found.groups_of(call)) == bool(company)
    for group in found.groups:
        for one, other in product(group, group):
            assert one == other or (one, other) not in reaches, (
                "members must be able to run at once"
            )
    for consumer in height:
        tight = {p for p in edges[consumer].split() if height[p] == height[consumer] + 1}
        if len(tight) > 1:
            assert frozenset(tight) in found.groups


@given(dags(), st.lists(st.tuples(st.integers(0, 7), OBJECTIVES), max_size=4), st.randoms())
@settings(max_examples=100, deadline=None)
def test_waits_may_come_one_by_one_in_any_order(
    edges: dict[str, str], waits: list[tuple[int, Objective]], shuffle: object
) -> None:
    graph = graph_of(edges)
    waited = {f"n{i}": objective for i, objective in waits if f"n{i}" in edges}
    at_once = deduce(graph, waited)
    one_by_one, order = Deduction(), list(waited.items())
    shuffle.shuffle(order)  # type: ignore[attr-defined]
    for variable, objective in order:
        before = one_by_one
        one_by_one = deduce(graph, {variable: objective}, start=before)
        for call in before.objectives:  # nothing gets weaker
            assert (
                stronger(before.objective_of(call), one_by_one.objective_of(call)).strength
                == one_by_one.objective_of(call).strength
            )
    assert one_by_one == at_once


def test_a_result_restricted_to_live_calls_keeps_their_groups() -> None:
    groups = {frozenset("a"): LATENCY, frozenset("ab"): LATENCY}
    found = Deduction({"a": LATENCY, "b": LATENCY}, groups)
    assert found.restricted_to({"b"}) == Deduction({"b": LATENCY}, {frozenset("ab"): LATENCY})
