"""Clients that keep the gateway waiting: told so and cut off, with nothing left of them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.processes import GatewayProcess, upstream_settings, wait_until
from harness.raw_http import RawConnection, check_error
from harness.scripted_upstream import ScriptedUpstream, document, event_stream

LIMIT_S = 0.5
CONNECTIONS = Path("/proc/net/tcp")
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def hasty(upstream: ScriptedUpstream) -> Iterator[GatewayProcess]:
    """A gateway whose clients have half a second."""
    settings = upstream_settings("scripted", upstream.base_url)
    with GatewayProcess(
        config={"upstreams": [settings], "server": {"client_timeout_s": LIMIT_S}}
    ) as gateway:
        yield gateway


def accepted(gateway: GatewayProcess) -> int:
    """Count the connections that it holds with clients."""
    links = Path(f"/proc/{gateway.pid}/fd").iterdir()
    held = {os.readlink(link) for link in links if link.is_symlink()}
    rows = [line.split() for line in CONNECTIONS.read_text().splitlines()[1:]]
    port, listening = f"{gateway.port:04X}", "0A"
    return sum(
        row[1].endswith(f":{port}") and row[3] != listening and f"socket:[{row[9]}]" in held
        for row in rows
    )


def check_cut(connection: RawConnection) -> None:
    """The server has closed it."""
    try:
        assert connection.receive() == b""
    except ConnectionResetError:
        return


@pytest.mark.parametrize("begin", [b"P", HEAD[:40], HEAD], ids=["letter", "line", "headers"])
def test_a_head_that_does_not_end(hasty: GatewayProcess, begin: bytes) -> None:
    with RawConnection(hasty.port) as connection:
        connection.send(begin)
        check_error(connection.read_response(), 408, "request_timeout")
        check_cut(connection)


@pytest.mark.parametrize("begin", [b"", b"\r\n"], ids=["nothing", "an empty line"])
def test_a_connection_without_a_request(hasty: GatewayProcess, begin: bytes) -> None:
    with RawConnection(hasty.port) as connection:
        connection.send(begin)
        check_cut(connection)


@pytest.mark.parametrize("framing", [b"content-length: 100\r\n", b"transfer-encoding: chunked\r\n"])
def test_a_body_that_does_not_end(hasty: GatewayProcess, framing: bytes) -> None:
    with RawConnection(hasty.port) as connection:
        connection.send(HEAD + framing + b"\r\n5\r\n{    \r\n")
        check_error(connection.read_response(), 408, "request_timeout")
        check_cut(connection)
    hasty.wait_running(0)


def test_a_body_that_trickles_in(hasty: GatewayProcess) -> None:
    with RawConnection(hasty.port) as connection:
        connection.send(HEAD + b"content-length: 1000000\r\n\r\n")
        connection.socket.settimeout(LIMIT_S / 5)
        began = time.monotonic()
        answer = b""
        while not answer and time.monotonic() - began < 40 * LIMIT_S:
            connection.send(b" ")
            try:
                answer = connection.receive()
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")
    hasty.wait_running(0)


@pytest.mark.parametrize("behind", [HEAD, HEAD + b"content-length: 100\r\n\r\n{"])
def test_an_idle_connection_and_a_long_call_are_left_alone(
    hasty: GatewayProcess, upstream: ScriptedUpstream, behind: bytes
) -> None:
    gate = upstream.gate()
    model = upstream.script(document({"id": "x"}, before=gate))
    body = {"model": model, "messages": []}
    with RawConnection(hasty.port) as idle, RawConnection(hasty.port) as waiting:
        assert idle.ask("GET", "/version").status == 200
        waiting.send(waiting.request("POST", "/v1/chat/completions", body))
        # With a second request begun behind it.
        waiting.send(behind)
        for _ in range(2):
            # The clock: one that comes after them is cut off.
            test_a_head_that_does_not_end(hasty, b"P")
        assert idle.ask("GET", "/version").status == 200
        gate.open()
        assert waiting.read_response().json == {"id": "x"}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_reads_nothing(
    hasty: GatewayProcess, upstream: ScriptedUpstream, stream: bool
) -> None:
    big = b"data: " + b"x" * 100_000 + b"\n\n"
    script = event_stream(*[big] * 400) if stream else document(b'"' + b"x" * 40_000_000 + b'"')
    model = upstream.script(script)
    with RawConnection(hasty.port) as connection:
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {"model": model, "messages": [], "stream": stream}
        connection.send(connection.request("POST", "/v1/chat/completions", body))
        call = upstream.wait_for_calls(model)[0]
        assert call.aborted.wait(20)
        hasty.wait_running(0)


def test_the_end_of_an_answer_that_nobody_reads(
    hasty: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    """It is the connection's own: the call has ended."""
    if not CONNECTIONS.exists():
        pytest.skip("this system does not tell a process's connections")
    model = upstream.script(document(b'"' + b"x" * 3_900_000 + b'"'))
    connections = [RawConnection(hasty.port) for _ in range(3)]
    try:
        for connection in connections:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = {"model": model, "messages": []}
            connection.send(
                connection.request("POST", "/v1/chat/completions", body, {"connection": "close"})
            )
        upstream.wait_for_calls(model, len(connections))
        wait_until(lambda: not accepted(hasty), "closed connections are gone")
    finally:
        for connection in connections:
            connection.close()
