"""HTTP as clients really send it, and as nobody should."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
from harness.processes import DEMO_MODEL, GatewayProcess
from harness.raw_http import RawConnection, check_error

OK = {"model": DEMO_MODEL, "prompt": "x", "max_tokens": 1}
LIMIT = 1024 * 1024  # server.max_body_bytes of the `demo` fixture


def connect(gateway: GatewayProcess) -> RawConnection:
    return RawConnection(gateway.port, api_key=gateway.api_key)


def check_alive(gateway: GatewayProcess) -> None:
    with connect(gateway) as connection:
        assert connection.ask("POST", "/v1/completions", OK).status == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/nothing"),
        ("POST", "/v1/nothing"),
        ("DELETE", "/v1/nothing"),
        ("POST", "/v1/moderations"),
        ("POST", "/v1/chat/completions/"),
        ("POST", "/v1//chat/completions"),
        ("POST", "/chat/completions"),
        ("GET", "/"),
        ("GET", "/v1"),
        ("GET", "/v1/../etc/passwd"),
        ("GET", "/%00"),
        ("GET", "/v1/%ff%fe"),
    ],
)
def test_unknown_routes(demo: GatewayProcess, method: str, path: str) -> None:
    with connect(demo) as connection:
        check_error(connection.ask(method, path), 404)
        assert connection.ask("GET", "/version").status == 200


def test_a_forgotten_v1_is_explained(demo: GatewayProcess) -> None:
    with connect(demo) as connection:
        error = check_error(connection.ask("POST", "/chat/completions", OK), 404, "unknown_route")
    assert "/v1" in error["message"]


def test_a_route_for_upstreams_without_any_is_explained(demo: GatewayProcess) -> None:
    with connect(demo) as connection:
        error = check_error(connection.ask("POST", "/v1/moderations", OK), 404, "unknown_route")
    assert "upstreams, of which it has none" in error["message"]
    assert "/docs" in error["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/chat/completions"),
        ("GET", "/v1/completions"),
        ("PUT", "/v1/completions"),
        ("DELETE", "/v1/completions"),
        ("OPTIONS", "/v1/completions"),
        ("POST", "/v1/models"),
        ("DELETE", f"/v1/models/{DEMO_MODEL}"),
        ("POST", "/health"),
        ("OPTIONS", "/health"),
    ],
)
def test_wrong_methods(demo: GatewayProcess, method: str, path: str) -> None:
    with connect(demo) as connection:
        check_error(connection.ask(method, path), 405, "method_not_allowed")
        assert connection.ask("GET", "/version").status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/health", "/nothing"])
def test_head_has_no_body(demo: GatewayProcess, path: str) -> None:
    with connect(demo) as connection:
        response = connection.ask("HEAD", path)
        assert response.status in (200, 404, 405)
        assert connection.ask("GET", "/version").json["version"]


def test_every_get_route_takes_head(demo: GatewayProcess) -> None:
    # Streams of events that have no end are not among them.
    paths = [path for path, operations in demo.get("/openapi.json")["paths"].items()
             if "get" in operations and not path.endswith("/events")]  # fmt: skip
    assert len(paths) > 10
    with connect(demo) as connection:
        for path in (*paths, "/openapi.json", "/docs", "/v1/models/", f"/v1/models/{DEMO_MODEL}"):
            got, head = (connection.ask(method, path) for method in ("GET", "HEAD"))
            assert (head.status, head.body) == (got.status, b""), path
            assert head.headers["content-type"] == got.headers["content-type"]
            assert set(head.headers) == set(got.headers)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/v1/nothing", "/nothing"])
def test_without_a_key_nothing_is_told(demo: GatewayProcess, path: str) -> None:
    with RawConnection(demo.port) as connection:
        for method in ("GET", "POST", "DELETE"):
            check_error(connection.ask(method, path), 401, "invalid_api_key")
    for key in ("", "x" * 10_000, "é", f"{demo.api_key} "):
        with RawConnection(demo.port) as connection:
            encoded = f"Bearer {key}".encode().decode("latin-1")
            response = connection.ask("GET", path, headers={"authorization": encoded})
            if key.strip() != demo.api_key:
                check_error(response, 401, "invalid_api_key")


def test_probes_need_no_key_and_tell_no_details(demo: GatewayProcess) -> None:
    with RawConnection(demo.port) as connection:
        assert connection.ask("GET", "/health/liveness").json == {"status": "ok"}
        assert connection.ask("GET", "/health/readiness").json == {"status": "ok"}
        assert set(connection.ask("GET", "/health").json) == {"status", "version"}
        assert set(connection.ask("GET", "/version").json) == {"version"}
        document = connection.ask("GET", "/openapi.json").json
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models"} <= set(document["paths"])


BAD_BODIES: dict[str, bytes] = {
    "empty": b"",
    "half": b'{"model": "x"',
    "words": b"hello",
    "trailing": json.dumps(OK).encode() + b"}",
    "array": b"[]",
    "null": b"null",
    "number": b"1",
    "string": b'"x"',
    "not utf-8": b'{"model": "\xff\xfe", "prompt": "x"}',
    "lone surrogate": b'{"model": "parrot-demo", "prompt": "\\ud800"}',
    "nul": b'{"model": "parrot-demo\\u0000"}',
    "nan": b'{"model": "parrot-demo", "prompt": "x", "temperature": NaN}',
    "infinity": b'{"model": "parrot-demo", "prompt": "x", "temperature": 1e999}',
    "deep": b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep elsewhere": b'{"model": "parrot-demo", "prompt": ' + b"[" * 50_000,
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "byte order mark": b"\xef\xbb\xbf" + json.dumps(OK).encode(),
    "form": b"model=parrot-demo&prompt=x",
    "comment": b"/* hi */" + json.dumps(OK).encode(),
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("name", BAD_BODIES)
def test_bad_json(demo: GatewayProcess, path: str, name: str) -> None:
    with connect(demo) as connection:
        response = connection.ask("POST", path, BAD_BODIES[name])
        check_error(response, 404 if name == "nul" else 400)
        assert connection.ask("GET", "/version").status == 200


def test_the_last_of_two_equal_keys_or_an_error(demo: GatewayProcess) -> None:
    body = b'{"model": "nothing", "model": "parrot-demo", "prompt": "x", "max_tokens": 1}'
    with connect(demo) as connection:
        assert connection.ask("POST", "/v1/completions", body).status in (200, 400)


def test_a_body_announced_too_large(demo: GatewayProcess) -> None:
    with connect(demo) as connection:
        connection.send(
            connection.request("POST", "/v1/completions", None, {"content-length": str(LIMIT + 1)})
        )
        check_error(connection.read_response(), 413, "request_too_large")
    check_alive(demo)


def test_a_body_that_is_too_large(demo: GatewayProcess) -> None:
    with connect(demo) as connection:
        response = connection.ask("POST", "/v1/completions", OK | {"prompt": "x" * LIMIT})
        check_error(response, 413, "request_too_large")
    check_alive(demo)


def test_a_chunked_body_that_is_too_large(demo: GatewayProcess) -> None:
    with connect(demo) as connection:
        connection.send(
            connection.request("POST", "/v1/completions", None, {"transfer-encoding": "chunked"})
        )
        part = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        for _ in range(LIMIT // 65536 + 1):
            connection.send(part)
        check_error(connection.read_response(), 413, "request_too_large")
    check_alive(demo)


def test_the_largest_body_is_accepted(demo: GatewayProcess) -> None:
    body = json.dumps(OK | {"unknown_field": "x"}).encode()
    body = body.replace(b'"x"}', b'"' + b"x" * (LIMIT - len(body) + 1) + b'"}')
    assert len(body) == LIMIT
    with connect(demo) as connection:
        assert connection.ask("POST", "/v1/completions", body).status == 200


def test_expect_100_continue(demo: GatewayProcess) -> None:
    # curl sends it with every body above 1 MB.
    body = json.dumps(OK).encode()
    with connect(demo) as connection:
        whole = connection.request("POST", "/v1/completions", body, {"expect": "100-continue"})
        connection.send(whole[: -len(body)])
        assert connection.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 100")
        connection._buffer = b""
        connection.send(body)
        assert connection.read_response().status == 200


def test_http_1_0_and_connection_close(demo: GatewayProcess) -> None:
    body = json.dumps(OK | {"stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.0\r\nauthorization: Bearer {demo.api_key}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    with RawConnection(demo.port) as connection:
        connection.send(head.encode() + body)
        received = b""
        while data := connection.receive():
            received += data
    assert received.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200"))
    assert b"data: [DONE]\n\n" in received
    with connect(demo) as connection:
        response = connection.ask("POST", "/v1/completions", OK, {"connection": "close"})
        assert response.status == 200
        assert connection.receive() == b""


MALFORMED: dict[str, bytes] = {
    "garbage": b"\x00\x01\x02\x03\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "bad version": b"GET /version HTTP/9.9\r\n\r\n",
    "unknown method": b"FROBNICATE /version HTTP/1.1\r\nhost: x\r\n\r\n",
    "no colon": b"GET /version HTTP/1.1\r\nhost x\r\n\r\n",
    "space in name": b"GET /version HTTP/1.1\r\nho st: x\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n"
    b"content-length: 2\r\n\r\nx",
    "bad length": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n",
    "negative length": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    "length and chunks": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunk": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    b"transfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
    "nul in header": b"GET /version HTTP/1.1\r\nhost: x\r\nx: a\x00b\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_http(demo: GatewayProcess, name: str) -> None:
    with RawConnection(demo.port) as connection:
        connection.send(MALFORMED[name])
        connection.socket.settimeout(5)
        check_error(connection.read_response(), 400, "malformed_http")
        assert connection.receive() == b""
    check_alive(demo)


HUGE_HEADS: dict[str, bytes] = {
    "one header": b"GET /version HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 600_000,
    "many headers": b"GET /version HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 100_000,
    "path": b"GET /" + b"a" * 600_000,
    "trailers": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    b"0\r\n" + b"x: y\r\n" * 100_000,
    "chunk extension": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 600_000,
}


@pytest.mark.parametrize("name", HUGE_HEADS)
def test_a_head_without_end_is_refused(demo: GatewayProcess, name: str) -> None:
    whole = HUGE_HEADS[name]
    with RawConnection(demo.port) as connection:
        received = b""
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(whole), 50_000):
                connection.send(whole[start : start + 50_000])
            while data := connection.receive():
                received += data
        # What is in flight when the server hangs up can take its last words along.
        assert not received or received.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 401 ")), received
    check_alive(demo)


def test_a_half_sent_request_blocks_nobody(demo: GatewayProcess) -> None:
    halves = [connect(demo) for _ in range(20)]
    try:
        for number, connection in enumerate(halves):
            whole = connection.request("POST", "/v1/completions", OK)
            connection.send(whole[: 1 + number * (len(whole) - 2) // 20])
        check_alive(demo)
    finally:
        for connection in halves:
            connection.close()
    check_alive(demo)


def test_random_headers_and_methods(demo: GatewayProcess) -> None:
    choose = random.Random(20241104)
    methods = ["GET", "POST", "PUT", "PATCH", "TRACE", "CONNECT", "PROPFIND", "get", "P\x01ST", ""]
    paths = ["/v1/completions", "/v1/models", "/", "*", "//", "/%zz", "/\x7f", "http://x/v1/models",
             "/v1/models/" + "a" * 5000, "/v1/engines/join"]  # fmt: skip
    names = ["x-parrot-x", "content-type", "authorization", "x-stainless-read-timeout", "accept",
             "connection", "upgrade", "content-length", "expect", "\xe9", "a b", ""]  # fmt: skip
    texts = ["", "x" * 9000, "\xff\xfe", "1e400", "-1", "nan", "websocket", "upgrade", "a\tb",
             "\x01", "Bearer", "Bearer \xff", ": :"]  # fmt: skip
    for _ in range(300):
        lines = [
            f"{choose.choice(names)}: {choose.choice(texts)}\r\n"
            for _ in range(choose.randrange(5))
        ]
        method, path = choose.choice(methods), choose.choice(paths)
        request = (
            f"{method} {path} HTTP/1.1\r\nhost: x\r\n{''.join(lines)}connection: close\r\n\r\n"
        )
        with RawConnection(demo.port) as connection:
            connection.send(request.encode("latin-1"))
            connection.socket.settimeout(5)
            try:
                received = b""
                while data := connection.receive():
                    received += data
            except TimeoutError:
                # A body was announced and never sent: waiting for it is right.
                assert "content-length: 1e400" not in request, request
                continue
            except ConnectionError:
                continue
        if received:
            status = int(received.split(b" ")[1])
            assert status < 500, (request, received)
    check_alive(demo)
