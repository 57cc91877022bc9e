"""A client that leaves, in every phase of its call: nothing goes on behind its back."""

from __future__ import annotations

import socket
import struct
from typing import Any

import pytest
from harness.processes import DEMO_MODEL, GatewayProcess, wait_until
from harness.raw_http import RawConnection
from harness.scripted_upstream import (
    Answer,
    ScriptedUpstream,
    chat_document,
    chat_events,
    document,
    error,
    event_stream,
)

MESSAGES = [{"role": "user", "content": "Hello."}]
#: Long enough that a call which is not cancelled shows in the engine's counters.
LONG: dict[str, Any] = {
    "model": DEMO_MODEL,
    "prompt": "Once upon a time",
    "n": 4,
    "max_tokens": 1000,
    "ignore_eos": True,
}
WAYS = ["close", "reset"]


def leave(connection: RawConnection, way: str) -> None:
    """Close politely, or as a killed process does."""
    if way == "reset":
        linger = struct.pack("ii", 1, 0)
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()


def open_call(gateway: GatewayProcess, body: dict[str, Any], path: str) -> RawConnection:
    connection = RawConnection(gateway.port, api_key=gateway.api_key)
    connection.send(connection.request("POST", path, body))
    return connection


def chat(gateway: GatewayProcess, model: str, **extra: Any) -> RawConnection:
    return open_call(
        gateway, {"model": model, "messages": MESSAGES, **extra}, "/v1/chat/completions"
    )


def upstream_state(relay: GatewayProcess, name: str) -> dict[str, Any]:
    [state] = [item for item in relay.health()["upstreams"] if item["name"] == name]
    return dict(state)


# -- upstreams ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_fills_a_variable(
    relay: GatewayProcess, upstream: ScriptedUpstream, stream: bool
) -> None:
    words = event_stream(chat_events(["a"])[0], upstream.gate())
    model = upstream.script(words if stream else document({}, before=upstream.gate()))
    parrot = {"session": model, "output": "o"}
    connection = chat(relay, model, stream=stream, parrot=parrot)
    (call,) = upstream.wait_for_calls(model)
    assert relay.health()["semantic"]["calls"]["running"] == 1
    leave(connection, "close")
    wait_until(call.aborted.is_set, "the upstream's call is aborted")
    wait_until(
        lambda: relay.health()["semantic"]["calls"]["running"] == 0, "the call has ended too"
    )


@pytest.mark.parametrize("way", WAYS)
def test_queued_for_an_upstream(
    relay: GatewayProcess, upstream: ScriptedUpstream, way: str
) -> None:
    gate = upstream.gate()
    first = upstream.script(document(chat_document("first"), before=gate))
    second = upstream.script(document(chat_document("second")))
    running = chat(relay, f"narrow/{first}")
    upstream.wait_for_calls(first)
    queued = chat(relay, f"narrow/{second}")
    wait_until(lambda: upstream_state(relay, "narrow")["waiting"] == 1, "one call in line")
    leave(queued, way)
    wait_until(lambda: upstream_state(relay, "narrow")["waiting"] == 0, "nobody in line")
    relay.wait_running(1)
    gate.open()
    assert running.read_response().json["choices"][0]["message"]["content"] == "first"
    running.close()
    relay.wait_running(0)
    assert upstream_state(relay, "narrow")["running"] == 0
    assert upstream.calls(second) == []


def test_while_the_gateway_waits_to_try_again(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(error(503, retry_after="7"), document(chat_document()))
    connection = chat(relay, model)
    upstream.wait_for_calls(model)
    relay.wait_running(1)
    connection.close()
    relay.wait_running(0)
    assert upstream_state(relay, "scripted")["running"] == 0
    assert len(upstream.calls(model)) == 1


PHASES: dict[str, Any] = {
    "before the headers": lambda gate: event_stream(*chat_events(["x"]), before=gate),
    "before the first byte": lambda gate: event_stream(gate, *chat_events(["x"])),
    "in the first event": lambda gate: event_stream(chat_events(["x"])[0][:20], gate),
    "in mid-stream": lambda gate: event_stream(*chat_events(["x"])[:2], gate),
    "not streaming": lambda gate: document(chat_document(), before=gate),
    "in the middle of a document": lambda gate: Answer(
        parts=(b'{"id":', gate, b"1}"), chunked=True
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", PHASES)
def test_at_an_upstream(
    relay: GatewayProcess, upstream: ScriptedUpstream, phase: str, way: str
) -> None:
    gate = upstream.gate()
    model = upstream.script(PHASES[phase](gate))
    connection = chat(relay, model, stream=phase.startswith(("before", "in mid", "in the first")))
    [call] = upstream.wait_for_calls(model)
    if phase == "in mid-stream":
        connection.read_until(b'"content": "x"')
    relay.wait_running(1)
    leave(connection, way)
    assert call.aborted.wait(10), "the upstream still works on it"
    relay.wait_running(0)
    assert upstream_state(relay, "scripted")["running"] == 0
    assert upstream_state(relay, "scripted")["breaker"] == "closed"
    assert len(upstream.calls(model)) == 1
    gate.open()


# -- engines --------------------------------------------------------------------------------


def generated(demo: GatewayProcess) -> int:
    return int(demo.wait_idle()["generated_tokens"])


@pytest.mark.parametrize("way", WAYS)
def test_queued_behind_a_full_batch(demo: GatewayProcess, way: str) -> None:
    before = generated(demo)
    hog = open_call(demo, LONG | {"max_tokens": 200, "stream": True}, "/v1/completions")
    hog.read_until(b"data: ")
    with demo.frozen_engines():
        queued = open_call(demo, LONG, "/v1/completions")
        demo.wait_running(2)
        leave(queued, way)
        demo.wait_running(1)
    assert hog.read_response().events[-1] == "[DONE]"
    hog.close()
    # All four of the one, next to nothing of the other.
    assert 800 <= generated(demo) - before < 800 + 400


@pytest.mark.parametrize("stream", [True, False])
def test_before_the_first_token(demo: GatewayProcess, stream: bool) -> None:
    before = generated(demo)
    with demo.frozen_engines():
        connection = open_call(demo, LONG | {"stream": stream}, "/v1/completions")
        demo.wait_running(1)
        connection.close()
        demo.wait_running(0)
    assert generated(demo) - before < 2000


@pytest.mark.parametrize("way", WAYS)
def test_in_mid_stream(demo: GatewayProcess, way: str) -> None:
    before = generated(demo)
    connection = open_call(demo, LONG | {"stream": True}, "/v1/completions")
    connection.read_until(b"data: ")
    with demo.frozen_engines():
        leave(connection, way)
        demo.wait_running(0)
    assert 0 < generated(demo) - before < 2000


def test_not_streaming(demo: GatewayProcess) -> None:
    before = generated(demo)
    connection = open_call(demo, LONG, "/v1/completions")
    demo.wait_running(1)
    with demo.frozen_engines():
        connection.close()
        demo.wait_running(0)
    assert generated(demo) - before < 3000


def test_a_client_that_reads_nothing_holds_no_engine(demo: GatewayProcess) -> None:
    connection = open_call(
        demo, LONG | {"stream": True, "logprobs": 5, "max_tokens": 500}, "/v1/completions"
    )
    wait_until(
        lambda: demo.engine_stats()["contexts"] == 0 or demo.health()["calls"]["running"] == 0,
        "the engine is done with a client that does not read",
        deadline_s=100.0,
    )
    connection.close()
    demo.wait_idle()


def test_many_that_leave_at_once(demo: GatewayProcess) -> None:
    before = generated(demo)
    connections = [
        open_call(demo, LONG | {"stream": number % 2 == 0}, "/v1/completions")
        for number in range(30)
    ]
    wait_until(lambda: demo.health()["calls"]["running"] == 30, "thirty calls in work")
    for number, connection in enumerate(connections):
        leave(connection, WAYS[number % 2])
    # 30 calls are 120,000 tokens.
    assert generated(demo) - before < 20_000
    stats = demo.engine_stats()
    assert stats["free_blocks"] == 512
