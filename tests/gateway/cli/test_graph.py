"""`parrot-gateway graph SESSION` against a real gateway, and what it says when there is none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import CompletedProcess
from typing import Any

import openai
import pytest
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess, run_cli
from harness.scripted_upstream import ScriptedUpstream, document
from parrot_bench.apps.recipes import summary as map_reduce
from parrot_bench.apps.runner import GatewayClient, run_workload
from parrot_bench.apps.workload import SEMANTIC, Size

from parrot_gateway.cli.graph import (
    GraphUnavailableError,
    ListedSession,
    NumCalls,
    Profile,
    Quantiles,
    Sessions,
    Successor,
    fetch_graph,
    list_text,
    profiles_text,
    read_graph,
)
from parrot_gateway.semantic.drawing import to_json, to_mermaid, to_text
from parrot_gateway.semantic.graph.snapshot import GraphSnapshot, NodeView, VariableView

SESSION = "tea party, with a hatter"


@pytest.fixture
async def session(demo: GatewayProcess) -> str:
    """The name of a session that has run a small map-reduce."""
    async with GatewayClient(demo.base_url, DEMO_MODEL, API_KEY) as client:
        await client.forget("tea%20party,%20with%20a%20hatter")
        workload = map_reduce(Size(2, 0.04), "Copy 1.")
        await run_workload(client, workload, SEMANTIC, SESSION)
    return SESSION


def graph(demo: GatewayProcess, *arguments: str) -> CompletedProcess[str]:
    run = run_cli(
        *("graph", *arguments, "--base-url", demo.base_url, "--api-key", "env:DEMO_KEY"),
        environment={"DEMO_KEY": API_KEY, "PYTHONIOENCODING": "utf-8"},
    )
    assert "Traceback" not in run.stderr
    return run


def check_refused(run: CompletedProcess[str], *words: str) -> None:
    assert run.returncode == 1, run.stderr
    assert run.stdout == ""
    assert "Traceback" not in run.stderr
    for word in words:
        assert word in run.stderr, run.stderr


# -- pictures -----------------------------------------------------------------------------


async def test_text(demo: GatewayProcess, session: str) -> None:
    run = graph(demo, session)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert session in lines[0]
    assert "3 done" in lines[0]
    assert [line for line in lines if line.startswith("stage")] == ["stage 0", "stage 1"]
    assert len(re.findall(r"done [\d.]+ m?s", run.stdout)) == 3
    assert re.search(r"map_(0, map_1|1, map_0) → reduce · ", lines[-1])


async def test_pictures_for_files(demo: GatewayProcess, session: str) -> None:
    data = json.loads(graph(demo, session, "--format", "json").stdout)
    assert [call["state"] for call in data["calls"]] == ["done"] * 3
    assert all(call["engine"] and call["placement"] for call in data["calls"])
    assert graph(demo, session, "--format", "mermaid").stdout.startswith("flowchart")


async def test_watching_ends_with_the_last_call(demo: GatewayProcess, session: str) -> None:
    run = graph(demo, session, "--watch")
    assert run.returncode == 0, run.stderr
    assert "3 done" in run.stdout


async def test_where_the_gateway_is_and_its_key_from_the_environment(
    demo: GatewayProcess, session: str
) -> None:
    usual = {"OPENAI_BASE_URL": demo.base_url, "OPENAI_API_KEY": API_KEY}
    assert run_cli("graph", session, environment=usual).returncode == 0
    own = {"OPENAI_BASE_URL": demo.base_url, "PARROT_API_KEY": API_KEY}
    assert run_cli("graph", session, environment=own).returncode == 0
    # OpenAI's key goes nowhere but where OpenAI's variable points.
    elsewhere = {"OPENAI_API_KEY": API_KEY}
    run = run_cli("graph", session, "--base-url", demo.base_url, environment=elsewhere)
    check_refused(run, "--api-key env:NAME")


@contextmanager
def answering(*answers: Any) -> Iterator[ScriptedUpstream]:
    """A server that gives these documents, the last one ever after."""
    with ScriptedUpstream() as server:
        server.answer_all(*(document(each) for each in answers))
        yield server


def test_watching_goes_on_while_a_call_runs() -> None:
    def snapshot(second: str, finished: float | None) -> bytes:
        nodes = (
            NodeView("a", "first", "call", "done", started=0.0, finished=1.0),
            NodeView("b", "second", "call", second, started=0.0, finished=finished),
        )
        return json.dumps(to_json(GraphSnapshot("s", "tea", 2.0, nodes, ()))).encode()

    with answering(snapshot("running", None), snapshot("done", 2.0)) as server:
        run = run_cli("graph", "tea", "--watch", "--base-url", server.base_url)
    assert run.returncode == 0, run.stderr
    assert "2 done" in run.stdout
    assert len(server.received) == 2


async def test_without_a_name_the_session_used_last(demo: GatewayProcess, session: str) -> None:
    run = graph(demo)
    assert run.returncode == 0, run.stderr
    assert session in run.stdout.splitlines()[0]
    assert json.loads(graph(demo, "--format", "json").stdout)["session"]["name"] == session


async def test_the_sessions_are_listed(demo: GatewayProcess, session: str) -> None:
    run = graph(demo, "--list")
    assert run.returncode == 0, run.stderr
    assert re.match(re.escape(session) + r"  ·  3 calls  ·  \d+ s ago$", run.stdout.splitlines()[0])
    # The digits of a title stand for the session, and nothing else does.
    client = openai.OpenAI(base_url=demo.base_url, api_key=API_KEY)
    client.completions.create(model=DEMO_MODEL, prompt="Nobody names this", max_tokens=2)
    line = graph(demo, "--list").stdout.splitlines()[0]
    found = re.match(
        r"Completion · (?P<digits>\w{6})  ·  .*  ·  inferred, (?P<id>sess_\w+)  ·", line
    )
    assert found is not None, line
    assert found["id"] in graph(demo, found["digits"]).stdout
    check_refused(graph(demo, "abcdef"), "abcdef")
    assert graph(demo, "--list", "--watch").returncode == 2
    assert graph(demo, "--list", session).returncode == 2


@pytest.mark.parametrize(
    ("finished", "unfinished", "shown"),
    [
        (0, 0, "0 calls"),
        (1, 0, "1 call"),
        (0, 1, "1 call, 1 unfinished"),
        (2, 0, "2 calls"),
        (1, 2, "3 calls, 2 unfinished"),
    ],
)
def test_calls_of_a_listed_session_are_counted(finished: int, unfinished: int, shown: str) -> None:
    calls = NumCalls(unfinished=unfinished, finished=finished)
    session = ListedSession(id="s", name="report", last_used=60.0, calls=calls)
    listed = Sessions(data=[session], has_more=True)
    assert list_text(listed, 61.0) == f"report  ·  {shown}  ·  1 s ago\n… and older ones\n"


def test_a_line_for_each_template() -> None:
    key, reader = "0123456789abcdef", "fedcba9876543210"
    used = Profile(
        key, 119, 40.0, Quantiles(150, 300), Quantiles(0.84, 6.9), 0.0, 0.95, 5.7,
        [Successor(reader, 0.9, 1.0)],
    )  # fmt: skip
    last = Profile(reader, 80, 8.0, Quantiles(2, 2), Quantiles(), 0.0, 0.0, 0.0, [])
    head, first, second = profiles_text([used, last]).splitlines()
    assert head.split()[:3] == ["template", "bytes", "calls"]
    assert first.split() == [
        *(key, "119", "40", "150", "300", "0.8", "6.9", "0%", "95%", "of", "5.7"),
        *(reader, "90%", "x1.0"),
    ]
    assert second.split() == [reader, "80", "8", "2", "2", "-", "0%", "-", "-"]


def test_profiles_of_a_gateway_without_any() -> None:
    with answering({"object": "list", "data": []}, {}) as server:
        listed = run_cli("graph", "--profiles", "--base-url", server.base_url)
        assert (listed.returncode, listed.stdout) == (0, "no profiles\n")
        run = run_cli("graph", "--profiles", "--base-url", server.base_url)
        check_refused(run, "no list of profiles")


# -- refusals -----------------------------------------------------------------------------


def test_a_gateway_without_sessions() -> None:
    empty = {"object": "list", "data": [], "has_more": False}
    with answering(empty, empty, {}) as server:
        run = run_cli("graph", "--base-url", server.base_url)
        check_refused(run, "no sessions yet", "x-session-id")
        listed = run_cli("graph", "--list", "--base-url", server.base_url)
        assert (listed.returncode, listed.stdout) == (0, "no sessions\n")
        run = run_cli("graph", "--list", "--base-url", server.base_url)
        check_refused(run, "no list of sessions")


def test_an_unknown_session(demo: GatewayProcess) -> None:
    check_refused(graph(demo, "nobody/knows"), "nobody/knows")
    check_refused(graph(demo, "nobody"), "no session 'nobody'", "expired")


def test_a_wrong_key(demo: GatewayProcess) -> None:
    run = run_cli(
        *("graph", "x", "--base-url", demo.base_url, "--api-key", "env:DEMO_KEY"),
        environment={"DEMO_KEY": "sk-wrong"},
    )
    check_refused(run, "key", "--api-key env:NAME")
    assert "sk-wrong" not in run.stderr


def test_no_key(demo: GatewayProcess) -> None:
    run = run_cli("graph", "x", "--base-url", demo.base_url)
    check_refused(run, "wants a key", "PARROT_API_KEY", "--api-key env:NAME")


async def test_a_key_without_the_right_to_see_it() -> None:
    with ScriptedUpstream() as server:
        server.answer_all(document({}, 403))
        with pytest.raises(GraphUnavailableError, match="wants a key, or another one"):
            await fetch_graph(server.base_url, "tea", "sk-other")
    assert server.received[0].headers["authorization"] == "Bearer sk-other"


def test_keys_are_named_not_given(demo: GatewayProcess) -> None:
    run = run_cli("graph", "x", "--base-url", demo.base_url, "--api-key", "sk-secret")
    check_refused(run, "env:NAME")
    assert "sk-secret" not in run.stderr
    run = run_cli("graph", "x", "--base-url", demo.base_url, "--api-key", "env:NOT_SET_AT_ALL")
    check_refused(run, "NOT_SET_AT_ALL")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "http://no-such-host.invalid/v1"])
def test_no_gateway(url: str) -> None:
    check_refused(run_cli("graph", "x", "--base-url", url), url, "parrot-gateway serve")


@pytest.mark.parametrize("url", ["gateway", "127.0.0.1:8000/v1"])
def test_not_a_url(url: str) -> None:
    check_refused(run_cli("graph", "x", "--base-url", url), f"--base-url '{url}'", "http://")


def test_watching_a_file_makes_no_sense(demo: GatewayProcess) -> None:
    run = graph(demo, "x", "--watch", "--format", "mermaid")
    assert run.returncode == 2
    assert "--format text" in run.stderr


def test_a_format_that_is_not_drawn_is_refused() -> None:
    run = run_cli("graph", "x", "--format", "svg", environment={"COLUMNS": "200"})
    assert run.returncode == 2
    assert "'svg' is not one of 'text', 'mermaid', 'json'" in run.stderr


# -- reading ------------------------------------------------------------------------------


def test_what_is_read_draws_the_same() -> None:
    first = NodeView(
        id="c1", name="first", kind="call", state="done", output="v1", model="m",
        objective="latency", tokens=7, engine="e", submitted=10.0, started=10.5,
        first_token=10.6, finished=12.0,
    )  # fmt: skip
    second = NodeView(
        id="c2", name="second", kind="transform", state="running", stage=1, inputs=("v1",),
        output="v2", detail="strip | lower", priority=3, submitted=11.0, started=12.0,
    )  # fmt: skip
    third = NodeView(
        id="c3", name="third", kind="call", state="failed", inputs=("v1",), submitted=11.0,
        finished=11.5, failure="engine_error: gone", run="r", parent="p", group="g",
    )  # fmt: skip
    snapshot = GraphSnapshot(
        session_id="s1",
        session_name="demo",
        taken_at=13.0,
        nodes=(first, second, third),
        variables=(
            VariableView("v1", "text", "ready", "c1", ("c2", "c3"), 100),
            VariableView("v2", "small", "running", "c2"),
        ),
        pruned=2,
    )
    read = read_graph(json.dumps(to_json(snapshot)).encode())
    assert to_json(read) == to_json(snapshot)
    assert to_text(read) == to_text(snapshot)
    assert to_mermaid(read) == to_mermaid(snapshot)


@pytest.mark.parametrize("data", [b"", b"{}", b"<html>", b"\xff", b'{"session": 1}'])
def test_other_answers_are_no_graphs(data: bytes) -> None:
    with pytest.raises(GraphUnavailableError, match="not a graph"):
        read_graph(data)
