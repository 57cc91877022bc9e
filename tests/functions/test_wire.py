"""Requests on the wire, and results made of the answers; no server."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from harness.recorded import Recorded, Sent, error
from parrot_functions import (
    ArgumentError,
    Call,
    DeadlineError,
    DependencyFailedError,
    Input,
    NotReadyError,
    Output,
    OverloadedError,
    ProtocolError,
    ServerError,
    Session,
    SessionError,
    UnreachableError,
    _client,
    semantic_function,
)


@pytest.fixture
def server() -> Recorded:
    return Recorded()


@semantic_function
def write(
    topic: Input,
    words: int = 3,
    story: Output = Output(max_tokens=9, temperature=0, stop=["."], extra={"top_k": 2}),
    title: Output = Output(transform="strip"),
) -> None:
    """In {{words}} words, of {{topic}} and {{others}}:
    {{story}}
    Title of "{{story}}": {{title}}
    That is all.
    """


@semantic_function(model="big")
def review(story: Input, verdict: Output) -> None:
    """{{story}} Verdict: {{verdict}}"""


def test_one_deferred_call_for_each_output(server: Recorded) -> None:
    with server.session() as session:
        write("ships")
        first, second = sorted(
            server.wait_for(2, "POST", "/completions"), key=lambda s: len(s.body["prompt"])
        )
    assert first.body == {
        "model": "m",
        "prompt": "In 3 words, of {{topic}} and {{opening_braces}}others}}:\n",
        "max_tokens": 9,
        "temperature": 0,
        "stop": ["."],
        "top_k": 2,
        "parrot": {
            "name": "write.story",
            "session": session.name,
            "output": "story-1",
            "inputs": {"topic": {"value": "ships"}, "opening_braces": {"value": "{{"}},
            "defer": True,
        },
    }
    assert second.body["prompt"] == (
        "In 3 words, of {{topic}} and {{opening_braces}}others}}:\n"
        '{{story}}\nTitle of "{{story}}": '
    )
    assert "max_tokens" not in second.body
    assert second.body["parrot"]["transform"] == "strip"
    assert second.body["parrot"]["inputs"]["story"] == {"variable": "story-1"}


def test_a_chain_is_sent_without_waiting_for_anything(server: Recorded) -> None:
    server.hold.set()
    with server.session():
        call = write("ships", 5)
        verdict = review(call.story)
        again = review(verdict)
        sent = server.wait_for(4, "POST", "/completions")
        by_name = {s.body["parrot"]["output"]: s.body for s in sent}
        assert by_name[again.only.name]["parrot"]["inputs"] == {
            "story": {"variable": verdict.only.name}
        }
        assert by_name[again.only.name]["model"] == "big"
        assert not again.only.is_ready
        assert not server.of("GET", "")
        server.hold.clear()
        assert again.get() == f"text of {again.only.name}"
    [read] = server.of("GET", "")
    assert read.path == f"/variables/v.{again.only.name}"


def test_objectives_and_deadlines_go_with_the_read(server: Recorded) -> None:
    with server.session():
        assert review("x").get(timeout=5, objective="throughput") == "text of verdict-1"
    [read] = server.of("GET", "")
    assert read.params["objective"] == "throughput"
    assert 0 < float(read.params["timeout"]) <= 5


def test_a_text_is_read_once(server: Recorded) -> None:
    with server.session():
        text = review("x").verdict
        with pytest.raises(NotReadyError, match="verdict-1"):
            str(text)
        assert "not read yet" in repr(text)
        assert text.get() == str(text) == f"{text}" == "text of verdict-1"
        assert text.is_ready
        assert text.get() == "text of verdict-1"
    assert text.get() == "text of verdict-1"
    assert len(server.of("GET", "")) == 1


def test_a_text_that_is_not_read_yet_is_no_other_value(server: Recorded) -> None:
    with server.session():
        call = review("x")
        text: Any = call.verdict
        unready: list[Callable[[], object]] = [
            lambda: f"{text}",
            lambda: "%s" % text,  # noqa: UP031
            lambda: text == "text of verdict-1",
            lambda: call == "text of verdict-1",
            lambda: bool(text),
        ]
        for look in unready:
            with pytest.raises(NotReadyError):
                look()
        refusing: list[Callable[[], object]] = [
            lambda: "".join([text]),
            lambda: json.dumps(text),
            lambda: re.findall("v", text),
            lambda: "a" + text,
            lambda: len(text),
            lambda: text.upper(),
            lambda: bytes(text, "utf-8"),
            lambda: list(map(str.strip, [text])),
        ]
        for look in refusing:
            with pytest.raises((TypeError, AttributeError)):
                look()
        assert text.get() == text
        assert text == "text of verdict-1"
        assert call == "text of verdict-1"
        assert text != "another"
        assert bool(text)


def test_outputs_by_order_name_and_key(server: Recorded) -> None:
    with server.session():
        call = write("ships")
        story, title = call
        assert call.story is call["story"] is story
        assert call.title is title
        assert len(call) == 2
        for wrong in (call.get, call.__await__, lambda: str(call)):
            with pytest.raises(ArgumentError, match="'story', 'title'"):
                wrong()
        with pytest.raises(AttributeError, match="no output 'tale'"):
            _ = call.tale
        only = review("x")
        assert only.get() == str(only) == "text of verdict-3"
        assert isinstance(only, Call)


def test_variables_are_written_and_bound_by_name(server: Recorded) -> None:
    with server.session() as session:
        plan = session.variable(" plan ", "to sail")
        assert plan.get() == "to sail"
        review(plan)
        [call] = server.wait_for(1, "POST", "/completions")
        [written] = server.wait_for(1, "POST", "/variables")
        assert call.body["parrot"]["inputs"] == {"story": {"variable": "plan"}}
        assert written.body == {"session": session.name, "name": "plan", "value": "to sail"}
        assert session.variable("other").get() == "text of other"
        with pytest.raises(ArgumentError):
            session.variable(" ")


def test_variables_that_have_a_producer_are_found(server: Recorded) -> None:
    def taken(sent: Sent) -> httpx.Response | None:
        if sent.method == "POST":
            return error(409, "output_taken")
        if sent.path == "/variables":
            listed = [{"name": "a", "id": "v.1"}, {"name": "b", "id": "v.2"}]
            return httpx.Response(200, json={"data": listed})
        return None

    server.special = taken
    with server.session(name="app") as session:
        assert session.variable("b").get() == "text of 2"
    assert server.of("GET", "/variables")[0].params == {"session": "app"}


def test_texts_of_another_session_are_bound_by_id(server: Recorded) -> None:
    client = server.client()
    with Session(client=client) as one, Session(client=client) as other:
        text = one.call(review, "x").verdict
        other.call(review, text)
        sent = server.wait_for(2, "POST", "/completions")
        assert sent[1].body["parrot"]["inputs"] == {"story": {"variable": f"v.{text.name}"}}
    client.close()


def test_a_session_without_a_name_is_forgotten(server: Recorded) -> None:
    with server.session() as session:
        review("x").get()
    assert server.sent[-1][:2] == ("DELETE", f"/sessions/{session.name}")
    with server.session():
        pass
    assert len(server.of("DELETE", "")) == 1


def test_a_session_with_a_name_is_flushed_and_kept(server: Recorded) -> None:
    with server.session(name="app"):
        for _ in range(20):
            review("x")
    sent = server.of("POST", "/completions")
    assert len({s.body["parrot"]["output"] for s in sent}) == 20
    assert not server.of("DELETE", "")
    assert len({s.body["parrot"]["session"] for s in sent}) == 1


def test_an_error_in_the_block_ends_a_session_with_a_name_at_once(server: Recorded) -> None:
    def program() -> None:
        with Session(client=server.client(timeout=100), name="app"):
            review("x")
            server.wait_for(1, "POST", "/completions")
            raise ZeroDivisionError

    server.hold.set()
    with pytest.raises(ZeroDivisionError):
        program()
    assert server.answered == []
    assert not server.of("DELETE", "")


def test_two_programs_in_one_session_choose_different_names(server: Recorded) -> None:
    for _ in range(2):
        with server.session(name="app"):
            review("x")
    first, second = server.of("POST", "/completions")
    assert first.body["parrot"]["output"] != second.body["parrot"]["output"]


def test_what_could_not_be_submitted_is_told_at_the_end(server: Recorded) -> None:
    server.special = lambda sent: error(400, "invalid_value")
    with pytest.raises(ServerError, match="invalid_value"), server.session(name="app"):
        review("x")
    with server.session(name="app"), pytest.raises(ServerError):
        review("x").get()


# -- failures -------------------------------------------------------------------------------


def test_errors_carry_what_the_server_said(server: Recorded) -> None:
    server.special = lambda sent: error(400, "invalid_value", headers={"x-request-id": "req_1"})
    with server.session(), pytest.raises(ServerError) as failed:
        review("x").get()
    found = failed.value
    assert (found.status, found.code, found.request_id) == (400, "invalid_value", "req_1")
    assert found.error == {"message": "no", "type": "t", "param": None, "code": "invalid_value"}
    assert len(server.of("POST", "")) == 1


def test_no_room_is_waited_for(server: Recorded) -> None:
    def busy(sent: Sent) -> httpx.Response | None:
        if sent.method == "POST" and len(server.of("POST", "")) < 3:
            return error(503, "engine_overloaded", headers={"retry-after": "0.01"})
        return None

    server.special = busy
    with server.session():
        assert review("x").get() == "text of verdict-1"
    posts = server.of("POST", "")
    assert len(posts) == 3
    assert posts[0].body == posts[2].body


@pytest.mark.parametrize(
    ("headers", "tries"),
    [
        ({"retry-after": "0"}, 3),
        ({"retry-after": "0", "x-should-retry": "false"}, 1),
        ({"retry-after": "1000"}, 1),
        ({"retry-after": "inf"}, 3),
        ({"retry-after": "-1"}, 3),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 3),
    ],
)
def test_retries_end(
    server: Recorded, headers: dict[str, str], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_client, "FIRST_BACKOFF_S", 0.001)
    server.special = lambda sent: error(503, "shutting_down", headers=headers)
    with Session(client=server.client(max_retries=2)), pytest.raises(OverloadedError) as failed:
        review("x").get()
    assert failed.value.code == "shutting_down"
    assert len(server.of("POST", "")) == tries


def test_pauses_between_tries_grow_to_a_bound(
    server: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    wait = asyncio.sleep

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        await wait(0)

    monkeypatch.setattr(_client.random, "uniform", lambda low, high: high)
    # The client's alone: servers of other tests may sleep in this process as well.
    own = SimpleNamespace(**vars(asyncio) | {"sleep": sleep})
    monkeypatch.setattr(_client, "asyncio", own)
    server.special = lambda sent: error(503, "shutting_down")
    with Session(client=server.client(max_retries=7)), pytest.raises(OverloadedError):
        review("x").get()
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_a_server_that_is_not_there(server: Recorded) -> None:
    server.special = lambda sent: httpx.ConnectError("refused")
    with Session(client=server.client(max_retries=1)), pytest.raises(UnreachableError) as failed:
        review("x").get()
    assert isinstance(failed.value, ConnectionError)
    assert isinstance(failed.value.__cause__, httpx.ConnectError)
    assert "parrot-gateway serve" in str(failed.value)
    assert "OPENAI_BASE_URL" in str(failed.value)
    assert len(server.of("POST", "")) == 2


def test_an_answer_that_was_lost_is_found_again(server: Recorded) -> None:
    """The first try reached the server; the second is told that the output is taken."""

    def lose(sent: Sent) -> httpx.Response | Exception | None:
        if sent.path == "/completions":
            first = len(server.of("POST", "/completions")) == 1
            return httpx.ReadError("reset") if first else error(409, "output_taken")
        if sent.method == "POST":
            return error(409, "output_taken")
        if sent.path == "/variables":
            return httpx.Response(200, json={"data": [{"name": "verdict-1", "id": "v.77"}]})
        return None

    server.special = lose
    with server.session():
        assert review("x").get() == "text of 77"


def test_a_taken_output_is_an_error_the_first_time(server: Recorded) -> None:
    def taken(sent: Sent) -> httpx.Response | None:
        return error(409, "output_taken") if sent.path == "/completions" else None

    server.special = taken
    with server.session(), pytest.raises(ServerError) as failed:
        review("x").get()
    assert failed.value.code == "output_taken"


def test_a_call_that_is_refused_fails_all_that_depends_on_it(server: Recorded) -> None:
    """Calls behind it have been accepted, and somebody waits for the last one."""

    def refuse_first(sent: Sent) -> httpx.Response | None:
        if sent.path == "/completions" and sent.body["parrot"]["output"] == "verdict-1":
            return error(404, "model_not_found")
        return None

    server.hold.set()
    server.hold_reads.set()
    server.special = refuse_first
    failures: list[BaseException] = []
    with server.session() as session:
        last = review(review(review("x")))

        def read() -> None:
            try:
                last.get()
            except DependencyFailedError as failure:
                failures.append(failure)

        reader = threading.Thread(target=read)
        reader.start()
        server.wait_for(3, "POST", "/completions")
        server.hold.clear()
        reader.join(10)
        later = session.call(review, last)
        with pytest.raises(DependencyFailedError):
            later.get()
        server.hold_reads.clear()
    [failure] = failures
    assert "'verdict-3' reads 'verdict-2'" in str(failure)
    assert isinstance(failure.__cause__, DependencyFailedError)
    root = failure.__cause__.__cause__
    assert isinstance(root, ServerError)
    assert root.code == "model_not_found"
    assert len(server.of("POST", "/completions")) == 3


def test_a_call_that_is_refused_late_fails_calls_that_were_accepted(server: Recorded) -> None:
    """The accepted calls wait on the server for a text that no call will write."""

    def is_first(sent: Sent) -> bool:
        return sent.path == "/completions" and sent.body["parrot"]["output"] == "verdict-1"

    server.special = lambda sent: error(404, "model_not_found") if is_first(sent) else None
    server.is_held = is_first
    server.hold.set()
    server.hold_reads.set()
    with server.session(), ThreadPoolExecutor(2) as threads:
        second = review(review("x"))
        third = review(second)
        reading = [threads.submit(call.get) for call in (second, third)]
        for number in (2, 3):
            server.wait_for(1, "GET", f"/variables/v.verdict-{number}")
        server.hold.clear()
        for read in reading:
            with pytest.raises(DependencyFailedError):
                read.result(10)
        server.hold_reads.clear()


def test_failures_on_the_server_carry_their_story(server: Recorded) -> None:
    story = {"code": "transform_failed", "message": "no JSON", "call": "call_1", "cause": None}

    def fail(sent: Sent) -> httpx.Response | None:
        if sent.method == "GET":
            return error(424, "dependency_failed", variable={"failure": story})
        return None

    server.special = fail
    with server.session(), pytest.raises(DependencyFailedError) as failed:
        review("x").get()
    assert failed.value.failure == story


def test_waits_end(server: Recorded) -> None:
    running = httpx.Response(200, json={"state": "running", "value": None})
    server.special = lambda sent: running if sent.method == "GET" else None
    with server.session():
        text = review("x").verdict
        with pytest.raises(DeadlineError, match="still being written") as late:
            text.get(timeout=0.1)
        assert isinstance(late.value, TimeoutError)
        assert len(server.of("GET", "")) > 1
        server.special = lambda sent: None
        assert text.get(timeout=5) == "text of verdict-1"


def test_waits_end_when_nothing_is_answered(server: Recorded) -> None:
    server.hold.set()
    with server.session():
        text = review("x").verdict
        with pytest.raises(DeadlineError):
            text.get(timeout=0.05)
        server.hold.clear()


@pytest.mark.parametrize(
    "answer", [httpx.Response(200, json={"choices": []}), httpx.Response(200, text="<html>")]
)
def test_other_servers_are_noticed(server: Recorded, answer: httpx.Response) -> None:
    server.special = lambda sent: answer
    with server.session(), pytest.raises(ProtocolError):
        review("x").get()


def test_the_end_of_a_session_ends_waits(server: Recorded) -> None:
    server.hold_reads.set()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            text.get()
        except SessionError as failure:
            failures.append(failure)

    with server.session():
        text = review("x").verdict
        reader = threading.Thread(target=read)
        reader.start()
        server.wait_for(1, "GET", "/variables")
    reader.join(10)
    assert "closed meanwhile" in str(failures[0])
    with pytest.raises(SessionError, match="is closed"):
        text.get()


# -- asynchronous ---------------------------------------------------------------------------


async def test_asynchronous_programs(server: Recorded) -> None:
    async with server.session():
        call = write("ships")
        assert await asyncio.gather(*call) == ["text of story-1", "text of title-2"]
        assert await review(call.story) == "text of verdict-3"
        assert await call.title.aget(timeout=1, objective="latency") == "text of title-2"


async def test_a_cancelled_wait_drops_the_read_and_nothing_else(server: Recorded) -> None:
    server.hold_reads.set()
    async with server.session():
        text = review("x").verdict
        waiting = asyncio.ensure_future(text)
        await asyncio.to_thread(server.wait_for, 1, "GET", "/variables")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        server.hold_reads.clear()
        assert await text == "text of verdict-1"


async def test_concurrent_tasks_have_their_own_sessions(server: Recorded) -> None:
    async def run(name: str) -> None:
        async with server.session(name=name):
            await asyncio.sleep(0)
            await review(name)

    await asyncio.gather(run("a"), run("b"))
    sessions = {
        s.body["parrot"]["inputs"]["story"]["value"]: s.body["parrot"]["session"]
        for s in server.of("POST", "/completions")
    }
    assert sessions == {"a": "a", "b": "b"}


# -- settings -------------------------------------------------------------------------------


def test_addresses_and_keys_come_from_the_environment(
    server: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PARROT_BASE_URL", "OPENAI_API_BASE", "PARROT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENAI_BASE_URL", "https://example.test/v1/")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert Session().client.base_url == "https://example.test/v1"
    with server.session():
        review("x").get()
    assert all(sent.headers["authorization"] == "Bearer k" for sent in server.sent)
    monkeypatch.setenv("PARROT_BASE_URL", "http://first.test/v1")
    assert Session().client.base_url == "http://first.test/v1"
    for name in ("PARROT_BASE_URL", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name)
    assert Session().client.base_url == "http://127.0.0.1:8000/v1"
    with pytest.raises(ArgumentError):
        Session("http://x/v1", client=server.client())
