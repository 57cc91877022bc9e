"""Graphs grow in any order, never into a circle, and forget only what is over."""

from __future__ import annotations

import itertools
from graphlib import CycleError as SorterCycleError
from graphlib import TopologicalSorter
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from parrot_gateway.exceptions import (
    CycleError,
    DoubleProducerError,
    SessionFullError,
    VariableNotFoundError,
)
from parrot_gateway.semantic.execution.objective_tracker import runs_side_by_side
from parrot_gateway.semantic.graph.graph import Graph
from parrot_gateway.semantic.graph.node import CallNode, Node, TransformNode
from parrot_gateway.semantic.graph.snapshot import snapshot_of
from parrot_gateway.semantic.variable import Failure, Variable

MAX_FINISHED = 4


def variables(*names: str) -> dict[str, Variable]:
    return {name: Variable(name, name, "s", max_value_bytes=1_000) for name in names}


def graph_over(held: dict[str, Variable], *, unfinished: int = 1_000, kept: int = 1_000) -> Graph:
    return Graph("demo", held, max_unfinished=unfinished, max_finished=kept)


def call(id: str, reads: str = "", writes: str | None = None, at: float = 0.0) -> CallNode:
    return CallNode(
        id=id, session_id="s", inputs=tuple(reads.split()), output=writes, submitted=at, name=id
    )


class GraphMachine(RuleBasedStateMachine):
    """Random calls over a few variables, against plain dictionaries and the standard library."""

    def __init__(self) -> None:
        super().__init__()
        self.variables = variables(*"abcdefgh")
        self.graph = graph_over(self.variables, kept=MAX_FINISHED)
        self.numbers = itertools.count()
        self.edges: dict[str, tuple[list[str], str | None]] = {}
        self.states: dict[str, str] = {}
        self.kept_finished: list[str] = []

    def is_acyclic(self, extra: tuple[list[str], str | None]) -> bool:
        """Asks the standard library about all calls that ever were, and one more."""
        sorter: TopologicalSorter[str] = TopologicalSorter()
        for reads, writes in [*self.edges.values(), extra]:
            if writes is not None:
                sorter.add(writes, *reads)
        try:
            sorter.prepare()
        except SorterCycleError:
            return False
        return True

    @rule(
        reads=st.lists(st.sampled_from("abcdefgh"), max_size=3),
        writes=st.none() | st.sampled_from("abcdefgh"),
        group=st.sampled_from([None, "x", "y"]),
    )
    def add(self, reads: list[str], writes: str | None, group: str | None) -> None:
        node = call(f"n{next(self.numbers)}", " ".join(reads), writes)
        node.group = group
        taken = writes is not None and (
            self.variables[writes].state != "empty"
            or any(output == writes for _, output in self.edges.values())
        )
        if taken:
            with pytest.raises(DoubleProducerError):
                self.graph.add(node)
        elif not self.is_acyclic((reads, writes)):
            with pytest.raises(CycleError) as caught:
                self.graph.add(node)
            self.check_path(caught.value.path, node)
        else:
            self.graph.add(node)
            self.edges[node.id] = (reads, writes)
            self.states[node.id] = "waiting"

    def check_path(self, path: tuple[str, ...], node: Node) -> None:
        """The path begins with the new call, and each step is a real reading or writing."""
        edges = {**self.edges, node.id: (list(node.inputs), node.output)}
        assert path[0] == node.id
        assert len(set(path)) == len(path)
        for writer, variable, reader in zip(
            path[::2], path[1::2], [*path[2::2], path[0]], strict=True
        ):
            assert edges[writer][1] == variable
            assert variable in edges[reader][0]

    @rule(pick=st.integers(0, 7), text=st.text(max_size=3))
    def user_sets(self, pick: int, text: str) -> None:
        subject = self.variables["abcdefgh"[pick]]
        if subject.state == "empty" and subject.producer is None:
            subject.set(text)

    @rule(pick=st.integers(0, 100))
    def start(self, pick: int) -> None:
        ready = [
            n
            for n, (reads, _) in self.edges.items()
            if self.states[n] == "waiting"
            and all(self.variables[v].value is not None for v in reads)
        ]
        if ready:
            node_id = ready[pick % len(ready)]
            self.graph.start(node_id, 1.0)
            self.states[node_id] = "running"

    @rule(pick=st.integers(0, 100), ends=st.sampled_from(["done", "failed", "cancelled"]))
    def finish(self, pick: int, ends: Literal["done", "failed", "cancelled"]) -> None:
        running = [n for n in self.graph.unfinished if n.state == "running"]
        if not running:
            return
        node = running[pick % len(running)]
        if node.output is not None:
            with pytest.raises(ValueError):
                self.graph.finish(node.id, ends, 2.0)
            assert node.state == "running"
            if ends == "done":
                self.variables[node.output].set("text")
            else:
                self.variables[node.output].fail(Failure("x", "y"))
        self.graph.finish(node.id, ends, 2.0)
        self.states[node.id] = ends
        self.kept_finished = [*self.kept_finished, node.id][-MAX_FINISHED:]

    @rule(name=st.sampled_from("abcdefgh"))
    def forget(self, name: str) -> None:
        around = {n for n, (reads, writes) in self.edges.items() if name in [*reads, writes]}
        live = any(self.states[n] in ("waiting", "running") for n in around)
        assert self.graph.forget(name) is not live
        if not live:
            self.kept_finished = [n for n in self.kept_finished if n not in around]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.graph.check_integrity()
        unfinished = {n for n, state in self.states.items() if state in ("waiting", "running")}
        assert {n.id for n in self.graph} == unfinished | set(self.kept_finished)
        assert [n.id for n in self.graph.unfinished] == sorted(unfinished, key=lambda n: int(n[1:]))
        assert self.graph.num_pruned + len(self.graph) == len(self.states)
        for node in self.graph:
            assert node.state == self.states[node.id]

    @invariant()
    def groups_run_side_by_side_when_two_members_need_no_other(self) -> None:
        live = {n for n, state in self.states.items() if state in ("waiting", "running")}
        writers = {self.edges[n][1]: n for n in live if self.edges[n][1] is not None}
        for group in ("x", "y"):
            found = self.graph.members(group)
            nodes = {n: self.graph.get(n) for n in live}
            members = {n for n, node in nodes.items() if getattr(node, "group", None) == group}
            assert set(found) == members
            free = [n for n in members if not {writers.get(v) for v in self.edges[n][0]} & members]
            assert runs_side_by_side(self.graph, group) == (len(free) > 1)

    @invariant()
    def live_variables_keep_their_producer_and_readers(self) -> None:
        for name, subject in self.variables.items():
            readers = {n.id for n in self.graph.consumers_of(name)}
            for n, (reads, writes) in self.edges.items():
                if self.states[n] in ("waiting", "running") and name in reads:
                    assert n in readers
                if writes == name and not subject.is_final:
                    producer = self.graph.producer_of(name)
                    assert producer is not None
                    assert producer.id == n

    @invariant()
    def stage_is_the_longest_path(self) -> None:
        kept = {n.id for n in self.graph}
        writers = {self.edges[n][1]: n for n in kept if self.edges[n][1] is not None}

        def longest(n: str) -> int:
            before = [writers[v] for v in self.edges[n][0] if v in writers]
            return max((longest(b) + 1 for b in before), default=0)

        assert dict(self.graph.stages()) == {n: longest(n) for n in kept}


TestGraphMachine = GraphMachine.TestCase
TestGraphMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60), st.randoms())
@settings(max_examples=50, deadline=None)
def test_any_acyclic_graph_is_taken_in_any_order(
    pairs: list[tuple[int, int]], shuffle: object
) -> None:
    reads: dict[int, set[int]] = {i: set() for i in range(31)}
    for one, other in pairs:
        if one != other:
            reads[max(one, other)].add(min(one, other))
    order = list(reads)
    shuffle.shuffle(order)  # type: ignore[attr-defined]
    graph = graph_over(variables(*map(str, range(31))))
    for n in order:
        graph.add(call(f"n{n}", " ".join(map(str, reads[n])), str(n)))
    stages = graph.stages()
    for n, before in reads.items():
        assert stages[f"n{n}"] == max((stages[f"n{b}"] + 1 for b in before), default=0)
        assert {p.id for p in graph.producers(f"n{n}")} == {f"n{b}" for b in before}
        assert {c.id for c in graph.consumers(f"n{n}")} == {
            f"n{m}" for m, its in reads.items() if n in its
        }


def test_a_call_that_reads_its_own_output() -> None:
    graph = graph_over(variables("a"))
    with pytest.raises(CycleError) as caught:
        graph.add(call("loop", "a", "a"))
    assert caught.value.status == 409
    assert "'loop' -> 'a' -> 'loop'" in caught.value.message
    assert len(graph) == 0
    assert graph_over(variables("a")).producer_of("a") is None


def test_a_circle_over_several_calls_is_told_in_order() -> None:
    graph = graph_over(variables("a", "b", "c"))
    graph.add(call("one", "a", "b"))
    graph.add(call("two", "b", "c"))
    with pytest.raises(CycleError) as caught:
        graph.add(call("three", "c", "a"))
    assert caught.value.path == ("three", "a", "one", "b", "two", "c")
    graph.check_integrity()


def test_a_long_circle_is_told_in_short() -> None:
    names = [f"v{i}" for i in range(5_001)]
    graph = graph_over(variables(*names), unfinished=10_000)
    for i in range(5_000):
        graph.add(call(f"c{i}", f"v{i}", f"v{i + 1}"))
    with pytest.raises(CycleError) as caught:
        graph.add(call("last", "v5000", "v0"))
    assert len(caught.value.message) < 400
    assert "more" in caught.value.message


def test_a_second_producer_is_refused_by_name() -> None:
    held = variables("a", "b")
    graph = graph_over(held)
    graph.add(call("first", "", "a"))
    held["b"].set("by hand")
    for name, taken_by in (("a", "'first'"), ("b", "user")):
        with pytest.raises(DoubleProducerError) as caught:
            graph.add(call("second", "", name))
        assert (caught.value.status, caught.value.param) == (409, "output")
        assert name in caught.value.message
        assert taken_by in caught.value.message


def test_unknown_variables_are_refused_and_nothing_is_left() -> None:
    held = variables("a", "b")
    graph = graph_over(held)
    with pytest.raises(VariableNotFoundError):
        graph.add(call("one", "a missing", "b"))
    assert (held["a"].consumers, held["b"].producer, len(graph)) == (set(), None, 0)


def test_a_full_graph_refuses_and_recovers() -> None:
    graph = graph_over(variables(), unfinished=2)
    graph.add(call("one"))
    graph.add(call("two"))
    with pytest.raises(SessionFullError) as caught:
        graph.add(call("three"))
    assert caught.value.status == 409
    assert "sessions.max_calls" in caught.value.message
    graph.finish("one", "done", 1.0)
    graph.add(call("three"))


def test_the_longest_finished_are_let_go_first() -> None:
    graph = graph_over(variables(), kept=2)
    for name in ("a", "b", "c", "d"):
        graph.add(call(name))
    for name in ("c", "a", "b"):
        graph.finish(name, "cancelled", 1.0)
    assert [n.id for n in graph] == ["a", "b", "d"]
    assert graph.get("c") is None
    assert graph.num_pruned == 1


def test_stages_begin_anew_behind_what_was_let_go() -> None:
    held = variables("a", "b", "c")
    graph = graph_over(held, kept=1)
    for name, reads, writes in (("x", "a", "b"), ("y", "b", "c")):
        graph.add(call(name, reads, writes))
    assert graph.stages() == {"x": 0, "y": 1}
    for name, output in (("x", "b"), ("y", "c")):
        held[output].set("text")
        graph.finish(name, "done", 1.0)
    assert graph.stages() == {"y": 0}
    graph.check_integrity()


def test_variables_forget_the_readers_that_were_let_go() -> None:
    held = variables("a", "b")
    held["a"].set("text")
    held["b"].set("text")
    graph = graph_over(held, kept=2)
    for number in range(5):
        graph.add(call(f"n{number}", "a b" if number % 2 else "a"))
        graph.finish(f"n{number}", "cancelled", 1.0)
    assert (held["a"].consumers, held["b"].consumers) == ({"n3", "n4"}, {"n3"})
    graph.check_integrity()


def test_illegal_steps_are_errors() -> None:
    graph = graph_over(variables())
    graph.add(call("a"))
    with pytest.raises(ValueError):
        graph.add(call("a"))
    graph.start("a", 1.0)
    with pytest.raises(ValueError):
        graph.start("a", 1.0)
    graph.finish("a", "done", 2.0)
    with pytest.raises(KeyError):
        graph.finish("a", "failed", 3.0)


def test_a_snapshot_tells_everything_but_values() -> None:
    held = variables("doc", "part", "short")
    held["doc"].set("SECRET TEXT")
    graph = graph_over(held)
    graph.add(call("map", "doc doc", "part", at=1.0))
    graph.add(
        TransformNode(
            id="t", session_id="s", inputs=("part",), output="short", pipeline="strip", submitted=2
        )
    )
    graph.start("map", 1.5)
    snapshot = snapshot_of(graph, 3.0, "s-1")
    assert [n.id for n in snapshot.nodes] == ["map", "t"]
    first, second = snapshot.nodes
    assert (first.stage, first.state, first.started, first.inputs) == (0, "running", 1.5, ("doc",))
    assert (second.stage, second.kind, second.detail) == (1, "transform", "strip")
    by_name = {v.name: v for v in snapshot.variables}
    assert by_name["part"].producer == "map"
    assert by_name["part"].consumers == ("t",)
    assert by_name["doc"].size_bytes == len("SECRET TEXT")
    assert "SECRET" not in repr(snapshot)


def test_a_group_ends_with_its_last_unfinished_member() -> None:
    graph = graph_over({})
    for id in ("a", "b"):
        graph.add(CallNode(id=id, session_id="s", group="g"))
    graph.finish("a", "done", 1.0)
    assert list(graph.members("g")) == ["b"]
    graph.check_integrity()
    graph.finish("b", "cancelled", 2.0)
    assert not graph.members("g")
    graph.check_integrity()
