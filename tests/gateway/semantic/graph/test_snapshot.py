"""Views of graphs: every field, inferred edges, times."""

from __future__ import annotations

from typing import Any

import pytest

from parrot_gateway.semantic.drawing.labels import cut, link_labels, state_line, summary, title_of
from parrot_gateway.semantic.graph.deduction import LATENCY
from parrot_gateway.semantic.graph.graph import Graph
from parrot_gateway.semantic.graph.node import CallNode, ForeignInput, TransformNode
from parrot_gateway.semantic.graph.snapshot import (
    GraphSnapshot,
    LinkView,
    NodeView,
    snapshot_of,
    to_json,
    with_explanations,
    with_links,
)
from parrot_gateway.semantic.variable import Failure, Variable


def graph() -> Graph:
    """`one` writes a, a transform makes b of it, `two` reads both and another session's x."""
    held = {
        name: Variable(name, f"name-{name}", "s", max_value_bytes=100) for name in ("a", "b", "c")
    }
    made = Graph("demo", held, max_unfinished=10, max_finished=10)
    made.add(
        CallNode(
            id="one", session_id="s", output="a", model="m", objective=LATENCY, priority=3,
            run="r", parent="p", group="g", tokens=7, engine="e", placement="load",
            submitted=10.0, first_token=12.5,
        )
    )  # fmt: skip
    made.add(
        TransformNode(
            id="t", session_id="s", name="cut", inputs=("a",), output="b", pipeline="strip",
            submitted=10.5,
        )
    )  # fmt: skip
    made.add(
        CallNode(
            id="two", session_id="s", name="second", inputs=("b", "a", "b"), submitted=10.25,
            foreign=(ForeignInput("x", "theirs", "other"), ForeignInput("y", "gone", "other")),
        )
    )  # fmt: skip
    made.start("one", 12.0)
    held["a"].set("four")
    made.finish("one", "done", 13.0)
    made.start("t", 13.0)
    held["b"].fail(Failure("broke", "It broke."))
    made.finish("t", "failed", 13.5, Failure("broke", "It broke."))
    return made


def find(id: str) -> Variable | None:
    foreign = Variable("x", "theirs", "other", max_value_bytes=100)
    foreign.set("ten chars.")
    return foreign if id == "x" else None


NOTHING: dict[str, Any] = {
    "kind": "call", "inputs": [], "output": None, "transform": None, "tools": [], "model": None,
    "objective": "throughput", "priority": 0, "tokens": 0, "engine": None, "placement": None,
    "run": None, "parent": None, "group": None, "started_s": None, "first_token_s": None,
    "finished_s": None, "ran_s": None, "failure": None,
}  # fmt: skip


def test_every_field_of_a_graph_is_in_its_json() -> None:
    told = to_json(snapshot_of(graph(), 15.0, "sess", find))
    one, two, cut_ = told.pop("calls")
    assert one == NOTHING | {
        "id": "one", "name": "one", "state": "done", "stage": 0, "output": "a", "model": "m",
        "objective": "latency", "priority": 3, "tokens": 7, "engine": "e", "placement": "load",
        "run": "r", "parent": "p", "group": "g", "submitted_s": 0.0, "started_s": 2.0,
        "first_token_s": 2.5, "finished_s": 3.0, "waited_s": 2.0, "ran_s": 1.0,
    }  # fmt: skip
    assert two == NOTHING | {
        "id": "two", "name": "second", "state": "waiting", "stage": 2,
        "inputs": ["b", "a", "x", "y"], "submitted_s": 0.25, "waited_s": 4.75,
    }  # fmt: skip
    assert cut_ == NOTHING | {
        "id": "t", "name": "cut", "kind": "transform", "state": "failed", "stage": 1,
        "inputs": ["a"], "output": "b", "transform": "strip", "objective": None,
        "submitted_s": 0.5, "started_s": 3.0, "finished_s": 3.5, "waited_s": 2.5, "ran_s": 0.5,
        "failure": "It broke.",
    }  # fmt: skip
    names = ("id", "name", "state", "producer", "consumers", "size_bytes", "session")
    variables = [tuple(each[name] for name in names) for each in told.pop("variables")]
    assert variables == [
        ("a", "name-a", "ready", "one", ["t", "two"], 4, None),
        ("b", "name-b", "failed", "t", ["two"], 0, None),
        ("x", "theirs", "ready", None, ["two"], 10, "other"),
        ("y", "gone", "cancelled", None, ["two"], 0, "other"),
    ]
    assert told == {
        "object": "graph", "session": {"id": "sess", "name": "demo"}, "duration_s": 5.0,
        "links": [], "inferred": False, "calls_not_kept": 0,
    }  # fmt: skip


def linked(id: str, *links: tuple[str, str], **fields: Any) -> dict[str, Any]:
    return {
        "id": id, "name": "chat", "state": "done", "tools": ["look"], "model": "m",
        "submitted": 11.0, "finished": 14.0, "error": None, **fields,
        "links": [{"from": source, "kind": kind, "confidence": 0.5} for source, kind in links],
    }  # fmt: skip


def test_inferred_edges_move_calls_to_later_stages() -> None:
    declared = snapshot_of(graph(), 15.0, "sess", find)
    calls = [linked("one", ("gone", "output")), linked("new", ("one", "output")),
             linked("two", ("one", "tool"), ("new", "output"))]  # fmt: skip
    shown = with_links(declared, calls)
    # A call that a declared graph lacks stays out, with its edges.
    assert [(node.id, node.stage, node.tools) for node in shown.nodes] == [
        ("one", 0, ("look",)), ("two", 2, ("look",)), ("t", 1, ())
    ]  # fmt: skip
    assert shown.links == (LinkView("one", "two", "tool", 0.5),)
    inferred = GraphSnapshot("s", "", 15.0, (), (), inferred=True)
    calls[2] |= {"error": 503, "submitted": 12.0, "finished": None, "links": calls[2]["links"]}
    shown = with_links(inferred, [linked("one", submitted=9.0), *calls[1:]])
    assert [(node.id, node.name, node.stage) for node in shown.nodes] == [
        ("one", "chat 1", 0), ("new", "chat 2", 1), ("two", "chat 3", 2)
    ]  # fmt: skip
    last = shown.nodes[-1]
    assert (last.submitted, last.started, last.finished, last.failure) == (
        *(12.0, 12.0, None), "status 503"
    )  # fmt: skip
    assert (last.kind, last.state, last.model, last.tools) == ("call", "done", "m", ("look",))
    assert shown.nodes[0].failure is None
    assert shown.span == (9.0, 15.0)
    labels = link_labels(shown)
    assert labels["one", "two"] == ("tool", 0.5)
    twice = GraphSnapshot("s", "", 0.0, (), (), links=(
        LinkView("a", "b", "tool", 0.5), LinkView("a", "b", "output", 0.25)
    ))  # fmt: skip
    assert link_labels(twice) == {("a", "b"): ("tool, output", 0.5)}


def test_explanations_are_of_their_calls() -> None:
    snapshot = snapshot_of(graph(), 15.0)
    shown = with_explanations(snapshot, {"two": "It waits."})
    assert [node.explanation for node in shown.nodes] == ["", "It waits.", ""]
    assert to_json(shown)["calls"][1]["explanation"] == "It waits."
    assert with_explanations(snapshot, {}) is snapshot


@pytest.mark.parametrize(
    ("started", "finished", "waited_s", "ran_s", "line"),
    [
        (None, None, 10.0, None, "state 10.0 s"),
        (None, 4.0, 3.0, None, "state 3.0 s"),
        (3.0, None, 2.0, 8.0, "state 8.0 s"),
        (3.0, 4.5, 2.0, 1.5, "state 1.5 s"),
        # A clock that went back.
        (0.0, -1.0, 0.0, 0.0, "state 0 ms"),
    ],
)
def test_how_long_a_call_waited_and_ran(
    started: float | None, finished: float | None, waited_s: float, ran_s: float | None, line: str
) -> None:
    node = NodeView(
        "n", "n", "call", "state", submitted=1.0, started=started, finished=finished
    )  # fmt: skip
    assert (node.waited_s(11.0), node.ran_s(11.0)) == (waited_s, ran_s)
    assert state_line(node, 11.0) == line


def test_a_session_is_summed_up_in_a_line() -> None:
    assert summary(snapshot_of(graph(), 15.0)) == "3 calls: 1 done, 1 waiting, 1 failed · 5.0 s"
    one = GraphSnapshot("s", "tale", 9.0, (NodeView("n", "n", "call", "running"),), (), pruned=2)
    assert title_of(one) == "session tale · 1 call: 1 running · 9.0 s · 2 earlier not kept"
    none = GraphSnapshot("s", "", 9.0, (), ())
    assert (title_of(none), none.span) == ("0 calls", (9.0, 9.0))


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [("abc", 3, "abc"), ("abcd", 3, "ab…"), ("変数名", 5, "変数…"), ("変数名", 4, "変…"),
     ("ab", 1, "…"), ("ab", 0, "")],
)  # fmt: skip
def test_a_text_is_cut_by_cells(text: str, width: int, shown: str) -> None:
    assert cut(text, width) == shown
