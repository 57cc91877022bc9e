"""Streams cut and resumed against real processes: the demo model, and an upstream's bytes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from harness.numbered_events import events_of, last_id, whole_events, without_numbers
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess, upstream_settings, wait_until
from harness.raw_http import RawConnection, Response, check_error
from harness.scripted_upstream import (
    ScriptedUpstream,
    chat_document,
    chat_events,
    document,
    error,
    event_stream,
)
from openai.types.chat import ChatCompletionChunk

RESUME = {"X-Parrot-Resume": "true"}
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
SEEDED: dict[str, Any] = {
    "model": DEMO_MODEL,
    "max_tokens": 8,
    "temperature": 1,
    "seed": 7,
    "ignore_eos": True,
    "stream": True,
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "stream_options": {"include_usage": True}},
    "/v1/completions": {"prompt": "Once upon a time", "logprobs": 1},
}


class Client:
    """One call whose connection is cut."""

    def __init__(self, gateway: GatewayProcess, path: str, body: dict[str, Any]) -> None:
        self._gateway = gateway
        self._connection = RawConnection(gateway.port, api_key=gateway.api_key)
        self._connection.send(self._connection.request("POST", path, body, RESUME))
        head = self._connection.read_until(b"\r\n\r\n").partition(b"\r\n\r\n")[0]
        self.name = re.search(rb"x-parrot-stream: (\w+)", head)[1].decode()  # type: ignore[index]
        self._head_bytes = len(head) + 4

    def read_until(self, text: bytes) -> None:
        self._connection.read_until(text)

    def cut(self, size: int | None = None) -> bytes:
        """Reset the connection; what came of the stream, its first `size` bytes on the wire."""
        linger = struct.pack("ii", 1, 0)
        self._connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._connection.close()
        return unchunked(self._connection.read_until(b"")[self._head_bytes :][:size])

    def read_all(self) -> bytes:
        return self._connection.read_response().body

    def ask(self, after: int | None = None, method: str = "GET") -> Response:
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        with RawConnection(self._gateway.port, api_key=self._gateway.api_key) as connection:
            return connection.ask(method, f"/v1/streams/{self.name}", headers=headers)


def unchunked(wire: bytes) -> bytes:
    """The content of a body in chunks that may break off anywhere."""
    content = b""
    while b"\r\n" in wire:
        size, _, wire = wire.partition(b"\r\n")
        content += wire[: int(size, 16)]
        wire = wire[int(size, 16) + 2 :]
    return content


def plain(raw: bytes) -> list[Any]:
    """The data of events, without what no two calls have in common."""
    found = []
    for event in events_of(raw):
        data = event.removeprefix(b"data: ").strip()
        fields = {} if data == b"[DONE]" else json.loads(data)
        found.append({**fields, "id": None, "created": None, "usage": None})
    return found


@pytest.mark.parametrize("path", BODIES)
def test_cut_after_every_event(demo: GatewayProcess, path: str) -> None:
    body = SEEDED | BODIES[path]
    with RawConnection(demo.port, api_key=demo.api_key) as connection:
        uncut = plain(connection.ask("POST", path, body).body)
    for number in range(1, len(uncut) + 1):
        client = Client(demo, path, body)
        client.read_until(b"\nid: %d\n\n" % number)
        had = whole_events(client.cut())
        resumed = client.ask(last_id(had))
        assert resumed.status == (204 if last_id(had) == len(uncut) else 200)
        whole = had + resumed.body
        assert plain(without_numbers(whole)) == uncut
        # Once more, in two parts.
        middle = last_id(had) // 2
        again = client.ask(middle).body
        assert b"".join(events_of(whole)[:middle]) + again == whole
    demo.wait_idle()


@pytest.mark.parametrize("path", BODIES)
def test_cut_inside_of_events(demo: GatewayProcess, path: str) -> None:
    body = SEEDED | BODIES[path]
    uncut = None
    for size in (1, 7, 100, 301, 555, 790, 1004, 1500):
        client = Client(demo, path, body)
        client.read_until(b"[DONE]")
        had = whole_events(client.cut(size))
        whole = had + client.ask(last_id(had)).body
        uncut = uncut or plain(without_numbers(whole))
        assert plain(without_numbers(whole)) == uncut
        assert uncut[-2]["choices"] == [] or uncut[-2]["choices"][0]["finish_reason"] == "length"


def test_the_openai_client(demo: GatewayProcess) -> None:
    client = openai.OpenAI(base_url=demo.base_url, api_key=API_KEY)
    body: dict[str, Any] = {"model": DEMO_MODEL, "messages": MESSAGES, "max_tokens": 12, "seed": 3}
    whole = client.chat.completions.create(**body, extra_body={"ignore_eos": True})
    stream = client.chat.completions.create(
        **body, stream=True, extra_body={"ignore_eos": True, "parrot": {"resume": True}}
    )
    chunks = [next(stream), next(stream), next(stream)]
    name = stream.response.headers["x-parrot-stream"]
    stream.close()
    chunks += client.get(
        f"/streams/{name}",
        cast_to=ChatCompletionChunk,
        options={"headers": {"Last-Event-ID": str(len(chunks))}},
        stream=True,
        stream_cls=openai.Stream[ChatCompletionChunk],
    )
    assert len({chunk.id for chunk in chunks}) == 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    with pytest.raises(openai.NotFoundError) as late:
        client.get("/streams/stream_of_yesterday", cast_to=object)
    assert late.value.code == "stream_not_found"
    client.close()


# -- upstreams ------------------------------------------------------------------------------

#: Line ends of every kind, an id of the upstream's own, comments, an event in two pieces.
ODD = (
    b': processing\n\nid: up-9\nevent: message\ndata: {"a"',
    b': 1}\r\n\r\ndata: {"b": 2}\r\r',
    b': note\ndata: {"c": 3}\n\ndata: {"choices": [{"finish_reason": "stop"}]}\n\n',
    b"data: [DONE]\n\n",
)
ODD_EVENTS = [
    b'id: up-9\nevent: message\ndata: {"a": 1}\r\nid: 1\n\r\n',
    b'data: {"b": 2}\rid: 2\n\r',
    b': note\ndata: {"c": 3}\nid: 3\n\n',
    b'data: {"choices": [{"finish_reason": "stop"}]}\nid: 4\n\n',
    b"data: [DONE]\nid: 5\n\n",
]


def upstream_body(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": MESSAGES, "stream": True, **more}


CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"


def test_an_upstreams_bytes_get_numbers(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    model = upstream.script(event_stream(*ODD))
    client = Client(relay, CHAT, upstream_body(model, parrot={"resume": True}))
    assert client.read_all() == b"".join(ODD_EVENTS)
    for after in range(5):
        assert client.ask(after).body == b"".join(ODD_EVENTS[after:])
    # Neither header nor field reached it.
    (call,) = upstream.calls(model)
    assert "parrot" not in call.json
    assert not any(name.startswith("x-parrot") for name in call.headers)


@pytest.mark.parametrize(
    ("path", "events"),
    [
        ("/v1/completions", [b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\n']),
        (
            "/v1/responses",
            [
                b'event: response.created\ndata: {"type": "response.created"}\n\n',
                b'event: response.completed\ndata: {"type": "response.completed"}\n\n',
            ],
        ),
        (
            "/v1/messages",
            [
                b'event: message_start\ndata: {"type": "message_start"}\n\n',
                b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
            ],
        ),
    ],
)
def test_other_apis_of_upstreams(
    relay: GatewayProcess, upstream: ScriptedUpstream, path: str, events: list[bytes]
) -> None:
    model = upstream.script(event_stream(*events, *([DONE] if "completions" in path else [])))
    prefix = "claude/" if path == "/v1/messages" else ""
    content = {"prompt": "a", "input": "a", "messages": MESSAGES, "max_tokens": 9}
    body = {"model": prefix + model, "stream": True, **content, "parrot": {"resume": True}}
    client = Client(relay, path, body)
    whole = client.read_all()
    assert without_numbers(whole).removesuffix(DONE) == b"".join(events)
    assert client.ask(1).body == b"".join(events_of(whole)[1:])
    (call,) = upstream.calls(model)
    assert "parrot" not in call.json


@pytest.mark.parametrize("sent", range(1, 5))
def test_an_upstreams_stream_cut_and_resumed(
    relay: GatewayProcess, upstream: ScriptedUpstream, sent: int
) -> None:
    events, gate = chat_events(["One", " two"]), upstream.gate()
    model = upstream.script(event_stream(*events[:sent], gate, *events[sent:]))
    client = Client(relay, CHAT, upstream_body(model))
    client.read_until(b"\nid: %d\n\n" % sent)
    had = whole_events(client.cut())
    wait_until(lambda: relay.health()["streams"]["unread"] == 1, "nobody reads it")
    (call,) = upstream.calls(model)
    with RawConnection(relay.port) as connection:
        path = f"/v1/streams/{client.name}?starting_after={last_id(had)}"
        connection.send(connection.request("GET", path))
        connection.read_until(b"\r\n\r\n")
        gate.open()
        rest = connection.read_response().body
    assert without_numbers(had + rest) == b"".join(events)
    assert call.completed.wait(10)
    assert not call.aborted.is_set()


def test_an_upstream_that_breaks_off(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    events = chat_events(["One", " two"])
    model = upstream.script(event_stream(*events[:2], cut=True))
    client = Client(relay, CHAT, upstream_body(model))
    whole = client.read_all()
    assert without_numbers(whole).startswith(b"".join(events[:2]))
    assert b'"upstream_error"' in whole
    assert client.ask(1).body == b"".join(events_of(whole)[1:])


def test_an_upstreams_refusal_passes_as_it_is(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    kept = relay.health()["streams"]["kept"]
    for answer, status in ((error(422), 422), (document(chat_document()), 200)):
        model = upstream.script(answer)
        with RawConnection(relay.port) as connection:
            response = connection.ask("POST", CHAT, upstream_body(model), RESUME)
        assert response.status == status
        assert "x-parrot-stream" not in response.headers
        assert response.headers["content-length"] == str(len(response.body))
    assert relay.health()["streams"]["kept"] == kept


def test_deleting_aborts_an_upstreams_call(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    events, gate = chat_events(["One", " two"]), upstream.gate()
    model = upstream.script(event_stream(*events[:2], gate))
    client = Client(relay, CHAT, upstream_body(model))
    client.cut()
    assert client.ask(method="DELETE").json["deleted"]
    (call,) = upstream.calls(model)
    assert call.aborted.wait(10)
    check_error(client.ask(), 404, "stream_not_found")


# -- two faults at once ---------------------------------------------------------------------


def test_the_engine_is_killed_while_the_client_is_gone() -> None:
    """Both go on: the call on an engine that is started again, the client with what it missed."""
    path = "/v1/completions"
    body = {**SEEDED, "prompt": "Once upon a time", "max_tokens": 300}
    with GatewayProcess(
        config={
            "models": [{"model": DEMO_MODEL, "num_blocks": 512}],
            "engines": {"heartbeat_s": 0.5},
        }
    ) as gateway:
        with RawConnection(gateway.port) as connection:
            uncut = plain(connection.ask("POST", path, body).body)
        client = Client(gateway, path, body)
        client.read_until(b"\nid: 3\n")
        pid = gateway.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        had = whole_events(client.cut())
        wait_until(lambda: gateway.health()["streams"]["unread"] == 1, "nobody reads it")
        os.kill(pid, signal.SIGKILL)
        whole = had + client.ask(last_id(had)).body
        assert last_id(had) < 300
        assert plain(without_numbers(whole)) == uncut
        gateway.wait_idle()


# -- a gateway that waits for nobody ----------------------------------------------------------


@pytest.fixture(scope="module")
def hasty(upstream: ScriptedUpstream) -> Iterator[GatewayProcess]:
    with GatewayProcess(
        config={
            "models": [{"model": DEMO_MODEL, "num_blocks": 512}],
            "upstreams": [upstream_settings("scripted", upstream.base_url)],
            "engines": {"heartbeat_s": 0.5},
            "streams": {"resume_s": 0.05},
        }
    ) as gateway:
        yield gateway


def test_nobody_comes_back(hasty: GatewayProcess, upstream: ScriptedUpstream) -> None:
    """Contexts of the engine are free, the upstream's request is aborted."""
    long = {**SEEDED, "prompt": "Once", "max_tokens": 2000, "n": 8}
    client = Client(hasty, "/v1/completions", long)
    client.cut()
    events, gate = chat_events(["One", " two"]), upstream.gate()
    model = upstream.script(event_stream(*events[:2], gate))
    other = Client(hasty, CHAT, upstream_body(model))
    other.cut()
    (call,) = upstream.calls(model)
    assert call.aborted.wait(10)
    assert hasty.wait_idle()["generated_tokens"] < 8 * 2000
    for each in (client, other):
        check_error(each.ask(), 404, "stream_not_found")
    assert hasty.health()["streams"] == {"kept": 0, "unread": 0, "size_bytes": 0}


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_signal(upstream: ScriptedUpstream, comes_back: bool) -> None:
    """A call that nobody reads is drained like others, and can be read meanwhile."""
    events, gate = chat_events(["One", " two"]), upstream.gate()
    model = upstream.script(event_stream(*events[:2], gate, *events[2:]))
    with GatewayProcess(
        config={
            "upstreams": [upstream_settings("scripted", upstream.base_url)],
            "server": {"drain_timeout_s": 30 if comes_back else 0.1},
        }
    ) as gateway:
        client = Client(gateway, CHAT, upstream_body(model))
        client.read_until(b"id: 2\n")
        client.cut()
        gateway.signal(signal.SIGTERM)
        if comes_back:
            wait_until(lambda: gateway.health()["status"] == "draining", "draining")
            with RawConnection(gateway.port) as connection:
                connection.send(connection.request("GET", f"/v1/streams/{client.name}"))
                connection.read_until(b"id: 2\n")
                gate.open()
                assert without_numbers(connection.read_response().body) == b"".join(events)
        assert gateway.wait(10) == 0
        assert "Traceback" not in gateway.stderr()
    gate.open()
