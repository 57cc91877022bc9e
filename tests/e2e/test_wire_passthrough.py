"""Pass-through on the wire: what an upstream says arrives byte for byte."""

from __future__ import annotations

import gzip
import json

import pytest
from harness.processes import GatewayProcess
from harness.raw_http import RawConnection, chat_body, check_error
from harness.scripted_upstream import (
    LISTED_MODEL,
    Answer,
    Received,
    ScriptedUpstream,
    chat_document,
    chat_events,
    document,
    error,
    event_stream,
)

STREAMS: dict[str, bytes] = {
    "plain": b"".join(chat_events(["Hello", " there"])),
    "crlf": b"".join(chat_events(["Hello"])).replace(b"\n", b"\r\n"),
    "cr": b"".join(chat_events(["Hello"])).replace(b"\n", b"\r"),
    "no space, and beyond ASCII": b"".join(chat_events(["Gr\u00fc\u00dfe"]))
    .replace(b"data: ", b"data:")
    .replace(rb"\u00fc", "\u00fc".encode()),
    "comments, ids and names": b": hi\n\nevent: x\nid: 7\n" + b"".join(chat_events(["Hello"])),
    "odd json": b'data:  {"choices" : [{"delta":{"content":"\\u0041 \xc3\xa4","x":1.0e0},'
    b'"index":0,"finish_reason":null,"logprobs":null}]}\n\n'
    b'data: {"choices":[{"delta":{},"index":0,"finish_reason":"stop"}],"usage":null}\n\n'
    b"data: [DONE]\n\n",
    "an error": b'data: {"error": {"message": "m", "type": "t", "param": null, "code": 1}}\n\n'
    b"data: [DONE]\n\n",
    "no done": b"".join(chat_events(["Hello"])[:-1]),
    "after done": b"".join(chat_events(["Hello"])) + b": bye\n\n",
}


@pytest.mark.parametrize("pieces", [1, 2, 5, 10_000], ids="pieces={}".format)
@pytest.mark.parametrize("name", STREAMS)
def test_streams_are_byte_identical(
    relay: GatewayProcess, upstream: ScriptedUpstream, name: str, pieces: int
) -> None:
    raw = STREAMS[name]
    size = max(1, len(raw) // pieces)
    parts = [raw[i : i + size] for i in range(0, len(raw), size)]
    response = relay.chat(upstream.script(event_stream(*parts)), stream=True)
    assert response.status == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.body == raw


DOCUMENTS: dict[str, bytes] = {
    "odd spacing and numbers": b'{ "choices" : [ ],\n"x":1.0e0, "y": 1E2,"z":"\\u00e4\xc3\xa4"}\n',
    "nulls stay": json.dumps(chat_document()).encode(),
    "not JSON": b"plain words",
    "empty": b"",
    "large": json.dumps(chat_document("word " * 200_000)).encode(),
}


@pytest.mark.parametrize("status", [200, 201, 400, 404, 422])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_and_errors_are_byte_identical(
    relay: GatewayProcess, upstream: ScriptedUpstream, name: str, status: int
) -> None:
    raw = DOCUMENTS[name]
    response = relay.chat(
        upstream.script(document(raw, status, {"x-odd": "yes", "x-request-id": "theirs"}))
    )
    assert response.status == status
    assert response.body == raw
    assert response.headers["x-odd"] == "yes"
    assert response.headers["x-request-id"].startswith("req_")
    assert response.headers["x-upstream-request-id"] == "theirs"


def test_a_compressed_answer_stays_compressed(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    raw = gzip.compress(json.dumps(chat_document()).encode())
    response = relay.chat(upstream.script(document(raw, 200, {"content-encoding": "gzip"})))
    assert response.headers["content-encoding"] == "gzip"
    assert response.body == raw


def test_the_request_body_is_byte_identical(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(document(chat_document()))
    raw = b'{ "model" : "%s",\n "messages":[],"temperature":1.0e0,"x":"\\u00e4"}' % model.encode()
    relay.ask("POST", "/v1/chat/completions?a=1&b=%2F", raw)
    [call] = upstream.calls(model)
    assert call.body == raw
    assert call.target == "/v1/chat/completions?a=1&b=%2F"
    assert call.headers["host"] == f"127.0.0.1:{upstream.port}"


def test_a_prefixed_name_is_the_only_change(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(document(chat_document()))
    relay.ask(
        "POST", "/v1/chat/completions",
        b'{"model":"once/%s","a":1.0e0,"b":"\\u00e4"}' % model.encode(),
    )  # fmt: skip
    [call] = upstream.calls(model)
    assert call.body == b'{"model":"%s","a":1.0e0,"b":"\\u00e4"}' % model.encode()


def test_other_routes_pass_too(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    model = upstream.script(document({"object": "list", "data": []}))
    response = relay.ask("POST", "/v1/embeddings", {"model": model, "input": "x"})
    assert response.json == {"object": "list", "data": []}
    assert upstream.calls(model)[0].target == "/v1/embeddings"


def _break_off(upstream: ScriptedUpstream, cut: bool) -> str:
    return upstream.script(event_stream(*chat_events(["One", " two"])[:2], cut=cut))


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "ended"])
def test_a_broken_stream_ends_with_an_error_event(
    relay: GatewayProcess, upstream: ScriptedUpstream, cut: bool
) -> None:
    with RawConnection(relay.port) as connection:
        response = connection.ask(
            "POST", "/v1/chat/completions",
            chat_body(_break_off(upstream, cut), stream=True),
        )  # fmt: skip
        raw = b"".join(chat_events(["One", " two"])[:2])
        assert response.body.startswith(raw)
        *_, failure, done = response.events
        assert done == "[DONE]"
        assert json.loads(failure)["error"]["code"] == "upstream_error"
        assert set(json.loads(failure)["error"]) == {"message", "type", "param", "code"}
        assert connection.ask("GET", "/version").status == 200


def test_a_body_that_breaks_off_is_no_success(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(Answer(parts=(b'{"half":',), chunked=True, cut=True))
    response = relay.chat(model)
    check_error(response, 502, "upstream_error")
    assert response.headers["x-should-retry"] == "false"
    assert len(upstream.calls(model)) == 3


def test_a_stream_with_an_error_status(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    model = upstream.script(error(400))
    response = relay.chat(model, stream=True)
    assert check_error(response, 400)["code"] == "scripted_400"


def test_the_callers_address_and_hop_headers_do_not_leak(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(document(chat_document(), 200, {"connection": "x-hop", "x-hop": "1"}))
    response = relay.ask(
        "POST", "/v1/chat/completions", chat_body(model),
        {"connection": "keep-alive, x-secret", "x-secret": "1", "te": "trailers",
         "cookie": "a=b"},
    )  # fmt: skip
    call: Received = upstream.calls(model)[0]
    assert not {"x-secret", "te", "cookie"} & set(call.headers)
    assert "x-hop" not in response.headers


@pytest.mark.parametrize("stream", [True, False])
def test_a_fallback_answers_when_an_upstream_cannot(
    relay: GatewayProcess, upstream: ScriptedUpstream, stream: bool
) -> None:
    raw = STREAMS["plain"] if stream else DOCUMENTS["nulls stay"]
    upstream.script_listed(event_stream(raw) if stream else document(raw))
    known = len(upstream.calls(LISTED_MODEL))
    response = relay.chat("lame/some-model", stream=stream)
    assert response.status == 200
    assert response.body == raw
    [call] = upstream.calls(LISTED_MODEL)[known:]
    assert call.json["messages"] == chat_body("")["messages"]


def test_an_upstream_that_keeps_failing_is_left_alone(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(error(500))
    for _ in range(2):
        check_error(relay.chat(f"fragile/{model}"), 500, "scripted_500")
    response = relay.chat(f"fragile/{model}")
    check_error(response, 503, "upstream_unavailable")
    assert float(response.headers["retry-after"]) > 0
    assert len(upstream.calls(model)) == 2
    states = {item["name"]: item["breaker"] for item in relay.health()["upstreams"]}
    assert states["fragile"] == "open"
    assert states["scripted"] == "closed"
