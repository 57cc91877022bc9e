"""A client's path, form or fields leave the upstream's walls standing, and an upstream's answers
those of the gateway."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from harness.processes import GatewayProcess, upstream_settings
from harness.raw_http import check_error
from harness.scripted_upstream import Answer, ScriptedUpstream, document, event_stream

DEEP = b"[" * 30_000 + b"]" * 30_000


@pytest.fixture(scope="module")
def bare(upstream: ScriptedUpstream) -> Iterator[GatewayProcess]:
    """A gateway whose upstream's URL is a host without a path."""
    root = upstream.base_url.removesuffix("/v1")
    with GatewayProcess(config={"upstreams": [upstream_settings("scripted", root)]}) as gateway:
        yield gateway


def test_a_path_names_no_other_host(bare: GatewayProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        answer = bare.ask("POST", f"/v1%2F@127.0.0.1:{port}/x", {"model": "m"})
        check_error(answer, 400, "invalid_path")
        other.settimeout(0.1)
        with pytest.raises(TimeoutError):
            other.accept()


@pytest.mark.parametrize(
    "path",
    ["/v1/../admin", "/v1/%2e%2e/admin", "/v1/a/..%2F..%2Fadmin", "/v1/a/..%5cb", "/v1/./a",
     "/%76%31/a"],
)  # fmt: skip
def test_a_path_does_not_leave_the_routes_of_the_upstream(
    bare: GatewayProcess, upstream: ScriptedUpstream, path: str
) -> None:
    before = len(upstream.received)
    check_error(bare.ask("POST", path, {}), 400, "invalid_path")
    assert len(upstream.received) == before


def test_dots_within_a_name_pass(bare: GatewayProcess, upstream: ScriptedUpstream) -> None:
    model = upstream.script(document({"id": "x"}))
    assert bare.ask("POST", "/v1/files/..a/b..%2Fc", {"model": model}).json == {"id": "x"}
    assert upstream.calls(model)[0].target == "/files/..a/b..%2Fc"


@pytest.mark.parametrize("status", [101, 600, 999])
def test_a_status_that_no_http_knows(
    relay: GatewayProcess, upstream: ScriptedUpstream, status: int
) -> None:
    model = upstream.script(Answer(status, (), (b"{}",)))
    answer = relay.ask("POST", "/v1/chat/completions", {"model": model, "messages": []})
    check_error(answer, 502, "upstream_error")


def test_a_header_that_no_server_may_send(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(document({}, headers={"x-name": "a\x01b"}))
    answer = relay.ask("POST", "/v1/chat/completions", {"model": model, "messages": []})
    check_error(answer, 502, "upstream_error")


def test_a_deeply_nested_answer_passes_as_it_is(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    body = b'{"usage":{"prompt_tokens":1},"x":' + DEEP + b"}"
    model = upstream.script(document(body))
    answer = relay.ask("POST", "/v1/chat/completions", {"model": model, "messages": []})
    assert (answer.status, answer.body) == (200, body)


def test_a_number_of_thousands_of_digits_ends_a_broken_stream_like_any_other(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    event = b'data: {"type":"response.created","sequence_number":' + b"9" * 5000 + b"}\n\n"
    model = upstream.script(event_stream(event, cut=True))
    answer = relay.ask("POST", "/v1/responses", {"model": model, "input": "x", "stream": True})
    assert answer.body.startswith(event)
    assert b"event: error\n" in answer.body


def test_a_wrong_type_in_a_deferred_call_is_told(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    body = {"model": upstream.script(document({})), "prompt": "x", "best_of": "many",
            "parrot": {"defer": True}}  # fmt: skip
    variable = relay.ask("POST", "/v1/completions", body).headers["x-parrot-variable"]
    failure = relay.get(f"/v1/variables/{variable}")["variable"]["failure"]
    assert "'best_of'" in failure["message"]
