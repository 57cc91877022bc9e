"""Messages to the linking process, and its answers, in time or not."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import serving, until
from msgspec.structs import replace

from parrot_gateway.exceptions import InvalidRequestError, LinkingBehindError
from parrot_gateway.http.exchange import Exchange, Message
from parrot_gateway.linking import service as linking_service
from parrot_gateway.linking.process.wire import (
    PREFIX_BYTES,
    AnswerSeen,
    LinksChanged,
    Query,
    Reply,
    RequestSeen,
    ToWorker,
    Watch,
    decode_to_worker,
    length_of,
)
from parrot_gateway.linking.service import LinkingService, ObservedCall
from parrot_gateway.settings.model import LinkingSettings

CHAT = "/v1/chat/completions"


def test_what_nobody_can_say_in_time_is_not_said_to_be_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linking_service, "_QUERY_TIMEOUT_S", 0.01)

    async def ask() -> None:
        async with (
            serving(ScriptedRemoteEngine()) as service,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{service.port}/v1") as client,
        ):
            # A process that takes questions and answers none.
            service.gateway.linking.is_running = True
            for path in ("/calls/call_1", "/sessions/sess_1", "/sessions/sess_1/graph"):
                late = await client.get(path)
                error = late.json()["error"]
                assert (late.status_code, error["code"]) == (503, "linking_behind"), path
                assert error["type"] == "server_error"
                assert int(late.headers["retry-after"]) > 0
            service.gateway.linking.is_running = False
            assert (await client.get("/calls/call_1")).status_code == 404

    asyncio.run(ask())


class Pipe:
    """The linking process's standard input, which somebody reads or not."""

    def __init__(self) -> None:
        self.unread = 0
        self.messages: list[ToWorker] = []
        self.transport = SimpleNamespace(get_write_buffer_size=lambda: self.unread)
        self.stdin = self
        self.pid = 7

    def write(self, data: bytes) -> None:
        assert length_of(data[:PREFIX_BYTES]) == len(data) - PREFIX_BYTES
        self.messages += decode_to_worker(data[PREFIX_BYTES:])

    def is_closing(self) -> bool:
        return False

    def take(self) -> list[ToWorker]:
        taken, self.messages = self.messages, []
        return taken


class Linking(LinkingService):
    """A service whose process is a pipe."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(LinkingSettings(**settings))
        self.pipe = Pipe()
        self.process = cast(Any, self.pipe)
        self.is_running = True

    def begin(self, path: str = CHAT, body: bytes = b"{}", **names: str) -> ObservedCall | None:
        self.exchange = exchange(path)
        return self.observe(self.exchange, body, **names)

    def said(self) -> list[ToWorker]:
        """Messages gathered so far, which leave now."""
        self._flush()
        return self.pipe.take()


def exchange(path: str = CHAT, *headers: tuple[bytes, bytes]) -> Exchange:
    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        """It goes nowhere."""

    scope = {"method": "POST", "path": path, "headers": list(headers), "client": ("1.2.3.4", 56)}
    return Exchange(scope, receive, send)


async def test_a_call_and_its_answer_are_handed_over() -> None:
    linking = Linking()
    observed = linking.begin(body=b'{"n": 1}', session="mine")
    assert observed is not None
    before = time.time()
    with observed:
        await linking.exchange.respond(201, b"all of it")
    request, answer = linking.said()
    assert isinstance(request, RequestSeen)
    assert isinstance(answer, AnswerSeen)
    exchange_ = linking.exchange
    call = exchange_.record.call_id
    assert observed.id == call
    assert before - 1 <= request.now <= answer.now <= time.time()
    assert replace(request, now=0) == RequestSeen(
        "default", call, exchange_.request_id, CHAT, "mine", 0, b'{"n": 1}', "1.2.3.4:56"
    )
    assert replace(answer, now=0) == AnswerSeen("default", call, 201, 0, b"all of it")
    named = linking.begin(call="own")
    assert named is not None
    assert named.id == "own"
    # A process that was started again knows nothing of the call.
    linking.process = cast(Any, Pipe())
    with named:
        await linking.exchange.respond(200, b"")
    linking.process = cast(Any, linking.pipe)
    (begun,) = linking.said()
    assert isinstance(begun, RequestSeen)
    assert begun.call == "own"


@pytest.mark.parametrize(
    ("path", "pieces", "copied"),
    [
        (CHAT, [b"data: {}\n\n", b"data: [DONE]\n\n", b": late"], 2),
        (CHAT, [b"data: {}\r\n\r\ndata:[DONE]\r\n\r\n", b"late"], 1),
        (CHAT, [b"data: [DONE]", b"\n\n"], 3),
        (CHAT, [b'"message_stop"', b"more"], 3),
        ("/v1/messages", [b"data: [DONE]\n\n", b'{"type":"message_stop"}\n', b"late"], 2),
        ("/v1/responses", [b'"response.created"', b'"response.incomplete"', b"late"], 2),
    ],
)
async def test_a_stream_ends_with_its_last_event(
    path: str, pieces: list[bytes], copied: int
) -> None:
    linking = Linking()
    observed = linking.begin(path)
    assert observed is not None
    with observed:
        linking.exchange.record.status = 200
        for piece in (*pieces, b""):
            linking.exchange._copy(piece, piece == b"")
    answers = [each for each in linking.said() if isinstance(each, AnswerSeen)]
    assert [each.body for each in answers] == [b"".join(pieces[:copied])]
    assert answers[0].status == 200


@pytest.mark.parametrize(
    ("error", "responded", "statuses"),
    [
        (None, False, [0]),
        (ValueError(), True, [0]),
        (LinkingBehindError(), True, [503]),
        # The answer that tells of it is still to be copied.
        (LinkingBehindError(), False, [418]),
    ],
)
async def test_how_a_call_ends_that_was_not_answered(
    error: Exception | None, responded: bool, statuses: list[int]
) -> None:
    linking = Linking()
    observed = linking.begin()
    assert observed is not None
    linking.exchange.responded = responded
    with suppress(ValueError, LinkingBehindError), observed:
        linking.exchange._copy(b"some", False)
        if error is not None:
            raise error
    await linking.exchange.respond(418, b"more")
    answers = [each for each in linking.said() if isinstance(each, AnswerSeen)]
    assert [each.status for each in answers] == statuses
    assert answers[0].body == b"some" + b"more" * (statuses == [418])


async def test_long_texts_are_left_out() -> None:
    linking = Linking(max_body_bytes=5000)
    for size in (5000, 5001):
        observed = linking.begin(body=b"x" * size)
        assert observed is not None
        with observed:
            await linking.exchange.respond(200, b"y" * size)
    bodies = [
        len(each.body) for each in linking.said() if isinstance(each, RequestSeen | AnswerSeen)
    ]
    # Of an answer the beginning is kept: it holds its id.
    assert bodies == [5000, 5000, 0, 4096]
    assert (await linking_statistics(linking))["skipped"] == 1


async def linking_statistics(linking: Linking) -> dict[str, Any]:
    """Counters of the gateway's side alone."""
    linking.is_running = False
    found = await linking.describe()
    linking.is_running = True
    return found


async def test_what_nobody_reads_is_bounded() -> None:
    most = linking_service._MAX_WAITING_BYTES
    linking = Linking()
    for unread, request_bytes, answer_bytes in (
        (0, 5000, 5000),
        (most + 1, 0, 4096),
        (2 * most + 1, None, 4096),
    ):
        linking.pipe.unread = 0
        observed = linking.begin()
        assert observed is not None
        linking.pipe.unread = unread
        linking.said()
        begun = linking.begin(body=b"x" * 5000)
        sizes = [len(each.body) for each in linking.said() if isinstance(each, RequestSeen)]
        assert sizes == ([] if request_bytes is None else [request_bytes])
        assert (begun is None) == (request_bytes is None)
        observed._exchange._copy(b"y" * 5000, True)
        sizes = [len(each.body) for each in linking.said() if isinstance(each, AnswerSeen)]
        assert sizes == [answer_bytes]
    assert (await linking_statistics(linking))["skipped"] == 4


async def test_messages_leave_together_and_questions_at_once() -> None:
    linking = Linking()
    for _ in range(3):
        linking.begin(body=b"x" * 1000)
    assert linking.pipe.take() == []
    assert (await linking_statistics(linking))["sent"] == 3
    asked = asyncio.ensure_future(linking.ask("t", "call", "c1"))
    await asyncio.sleep(0)
    *requests, question = linking.pipe.take()
    assert [type(each) for each in requests] == [RequestSeen] * 3
    assert question == Query(1, "t", "call", "c1")
    linking._receive(Reply(99, b"1"))
    linking._receive(Reply(1, b'{"a": 1}'))
    linking._receive(Reply(1, b"2"))
    assert await asked == {"a": 1}
    # So many bytes do not wait.
    linking.begin(body=b"x" * linking_service._GATHER_BYTES)
    assert len(linking.pipe.take()) == 1
    # Nor do few for long.
    linking.begin()
    await until(lambda: linking.pipe.messages)
    told = list[LinksChanged]()
    linking.watch(told.append)
    linking._receive(LinksChanged([], [], True, True))
    linking.watch(None)
    linking._receive(LinksChanged([], [], False, True))
    assert told == [LinksChanged([], [], True, True)]
    assert [each for each in linking.pipe.take() if isinstance(each, Watch)] == [
        Watch(True), Watch(False)
    ]  # fmt: skip
    assert await linking_statistics(linking) == {
        "enabled": True, "sent": 8, "skipped": 0, "restarts": 0, "late": 0, "running": False,
        "pid": 7,
    }  # fmt: skip
    linking.is_running = False
    assert linking.begin() is await linking.ask("t", "call") is None


@pytest.mark.parametrize(
    ("value", "links"),
    [(b"", True), (b" ON ", True), (b"true", True), (b"1", True), (b"yes", True), (b"Off", False),
     (b"false", False), (b"0", False), (b"no", False), (b"maybe", None)],
)  # fmt: skip
async def test_a_client_says_whether_its_call_is_linked(value: bytes, links: bool | None) -> None:
    for tenants in ([], ["default"]):
        linking = Linking(exclude_tenants=tenants)
        asked = exchange(CHAT, (b"x-parrot-link", value))
        if links is None:
            with pytest.raises(InvalidRequestError, match="'maybe' is neither on nor off"):
                linking.observe(asked, b"{}")
        else:
            assert (linking.observe(asked, b"{}") is not None) == (links and not tenants)
        linking.observe_response(exchange(), "resp_1")


@pytest.mark.parametrize(
    ("settings", "session", "headers", "sent_on"),
    [
        ({}, "", {}, None),
        ({"headers": True}, "", {b"x-parrot-call": b"call", b"x-parrot-session": b"sess_1"}, None),
        ({"headers": True}, "mine", {}, None),
        ({"session_header": "X-Mine"}, "", {}, b"sess_2"),
        ({"session_header": "X-Mine"}, "mine", {}, b"mine"),
        ({"session_header": "X-Mine", "session_wait_s": 0}, "", {}, b"own"),
    ],
)
async def test_sessions_are_named_in_answers_and_requests(
    settings: dict[str, Any], session: str, headers: dict[bytes, bytes], sent_on: bytes | None
) -> None:
    linking = Linking(**settings)
    asked, sent = exchange(), list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    asked._send = send

    async def answer() -> str:
        await asked.respond(200, b"{}")
        return "answered"

    following = asyncio.ensure_future(linking.follow(asked, b"{}", answer, session))
    while not following.done():
        await asyncio.sleep(0)
        for each in linking.pipe.take():
            if isinstance(each, Query):
                found = {"session": "sess_1"} if each.what == "call" else "sess_2"
                linking._receive(Reply(each.number, msgspec.json.encode(found)))
    assert await following == "answered"
    call = asked.record.call_id.encode()
    told = {name: value.replace(call, b"call") for name, value in sent[0]["headers"]
            if name.startswith(b"x-parrot")}  # fmt: skip
    assert told == headers
    own = b"sess_" + asked.record.call_id.rpartition("_")[2].encode()
    named = dict(asked.scope["headers"]).get(b"x-mine")
    assert named == (own if sent_on == b"own" else sent_on)
