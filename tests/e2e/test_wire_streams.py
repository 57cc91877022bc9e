"""Event streams on the wire: every byte of the framing, and what arrives together."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.processes import DEMO_MODEL, GatewayProcess
from harness.raw_http import RawConnection, Response
from harness.scripted_upstream import ScriptedUpstream, chat_events, event_stream

CHAT = {
    "model": DEMO_MODEL,
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_completion_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}
COMPLETION = {
    "model": DEMO_MODEL,
    "prompt": "Once upon a time",
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]


def answered(gateway: GatewayProcess, path: str, body: dict[str, Any]) -> Response:
    response = gateway.ask("POST", path, body)
    assert response.status == 200, response.body
    return response


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_headers_of_a_stream(demo: GatewayProcess, path: str, body: dict[str, Any]) -> None:
    headers = answered(demo, path, body).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["transfer-encoding"] == "chunked"
    assert "content-length" not in headers
    assert "server" not in headers
    assert headers["x-request-id"].startswith("req_")
    assert headers["openai-version"] == "2020-10-01"
    assert headers["openai-processing-ms"].isdigit()


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_headers_and_first_event_arrive_together(
    demo: GatewayProcess, path: str, body: dict[str, Any]
) -> None:
    # A client that delays its ACKs would see a second packet 40 ms later.
    for _ in range(5):
        first = answered(demo, path, body).segments[0]
        head, separator, rest = first.partition(b"\r\n\r\n")
        assert separator, head
        assert b"data: " in rest


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_done_and_the_terminating_chunk_arrive_together(
    demo: GatewayProcess, path: str, body: dict[str, Any]
) -> None:
    for _ in range(5):
        last = answered(demo, path, body).segments[-1]
        assert last.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_passed_on_events_arrive_together_too(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(event_stream(*chat_events(["One", " two"])))
    for _ in range(5):
        response = answered(relay, "/v1/chat/completions", CHAT | {"model": model})
        assert b"\r\n\r\n" in response.segments[0]
        assert b"data: " in response.segments[0].partition(b"\r\n\r\n")[2]
        assert response.segments[-1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_the_connection_serves_on_after_streams(demo: GatewayProcess) -> None:
    with RawConnection(demo.port, api_key=demo.api_key) as connection:
        for _ in range(3):
            for path, body in ROUTES:
                response = connection.ask("POST", path, body)
                assert response.events[-1] == "[DONE]"
                assert "close" not in response.headers.get("connection", "")
                plain = connection.ask("POST", path, body | {"stream": False})
                assert plain.json["usage"]["completion_tokens"] == 12


def test_pipelined_requests_are_answered_in_order(demo: GatewayProcess) -> None:
    with RawConnection(demo.port, api_key=demo.api_key) as connection:
        connection.send(
            connection.request("POST", "/v1/completions", COMPLETION)
            + connection.request("GET", "/version")
            + connection.request("POST", "/v1/completions", COMPLETION | {"stream": False})
        )
        assert connection.read_response().events[-1] == "[DONE]"
        assert "version" in connection.read_response().json
        assert connection.read_response().json["object"] == "text_completion"


def test_a_body_that_arrives_byte_by_byte(demo: GatewayProcess) -> None:
    with RawConnection(demo.port, api_key=demo.api_key) as connection:
        for byte in connection.request("POST", "/v1/completions", COMPLETION):
            connection.send(bytes([byte]))
        assert connection.read_response().events[-1] == "[DONE]"


def test_a_chunked_request_body(demo: GatewayProcess) -> None:
    encoded = json.dumps(COMPLETION).encode()
    parts = [encoded[i : i + 7] for i in range(0, len(encoded), 7)]
    framed = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    with RawConnection(demo.port, api_key=demo.api_key) as connection:
        connection.send(
            connection.request(
                "POST", "/v1/completions", None,
                {"transfer-encoding": "chunked", "content-type": "application/json"},
            )
            + framed
        )  # fmt: skip
        assert connection.read_response().events[-1] == "[DONE]"
