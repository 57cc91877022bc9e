"""HTTP/1.1 on a bare socket: what went over the wire, segment by segment.

Every `recv` is kept, so that a test can tell what arrived together. No request is ever completed
or corrected: the bytes sent are the test's.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from typing import Any

#: Longest silence.
TIMEOUT_S = 100.0


@dataclass
class Response:
    """One answer off the wire."""

    status: int
    headers: dict[str, str]
    #: Without the chunked framing.
    body: bytes
    #: What single `recv` calls returned, framing included.
    segments: list[bytes] = field(default_factory=list)

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """The data of the stream's events, each of them closed by a blank line."""
        text = self.body.decode()
        assert text.endswith("\n\n"), f"the last event is not closed: {text[-200:]!r}"
        found = []
        for block in text.removesuffix("\n\n").split("\n\n"):
            lines = [line for line in block.split("\n") if not line.startswith(":")]
            for line in lines:
                assert line.startswith("data: "), f"not a data line: {line!r}"
            if lines:
                assert len(lines) == 1, f"several data lines in one event: {block!r}"
                found.append(lines[0].removeprefix("data: "))
        return found

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The JSON events before `[DONE]`, which must be the last one."""
        *events, last = self.events
        assert last == "[DONE]"
        return [json.loads(event) for event in events]


class RawConnection:
    """One TCP connection; a context manager."""

    def __init__(self, port: int, host: str = "127.0.0.1", api_key: str | None = None) -> None:
        self.socket = socket.create_connection((host, port), TIMEOUT_S)
        self.api_key = api_key
        self._buffer = b""

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it."""
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.socket.sendall(data)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> bytes:
        """A well-formed request, as bytes; `body` is encoded as JSON unless it is bytes."""
        encoded = b"" if body is None else body if isinstance(body, bytes) else _json(body)
        lines = {"host": "gateway", **(headers or {})}
        if self.api_key is not None:
            lines.setdefault("authorization", f"Bearer {self.api_key}")
        if body is not None:
            lines.setdefault("content-type", "application/json")
            lines.setdefault("content-length", str(len(encoded)))
        head = "".join(f"{name}: {text}\r\n" for name, text in lines.items())
        return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + encoded

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Response:
        """Send a request and read its answer."""
        self.send(self.request(method, path, body, headers))
        return self.read_response(to_head=method == "HEAD")

    def receive(self) -> bytes:
        """One `recv`; empty at the end of the stream."""
        return self.socket.recv(262144)

    def read_response(self, *, to_head: bool = False) -> Response:
        """Read one whole answer.

        Raises:
            ConnectionError: the connection ended before it was complete.
        """
        segments: list[bytes] = []

        def more() -> None:
            data = self.receive()
            if not data:
                raise ConnectionError(f"ended after {self._buffer!r}")
            segments.append(data)
            self._buffer += data

        while b"\r\n\r\n" not in self._buffer:
            more()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        status_line, *lines = head.decode("latin-1").split("\r\n")
        status = int(status_line.split(" ")[1])
        headers: dict[str, str] = {}
        for line in lines:
            name, _, text = line.partition(":")
            assert name.lower() not in headers, f"{name} came twice"
            headers[name.lower()] = text.strip()
        if to_head or status in (204, 304):
            return Response(status, headers, b"", segments)
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while True:
                while b"\r\n" not in self._buffer:
                    more()
                size_line, _, self._buffer = self._buffer.partition(b"\r\n")
                size = int(size_line, 16)
                while len(self._buffer) < size + 2:
                    more()
                body += self._buffer[:size]
                assert self._buffer[size : size + 2] == b"\r\n"
                self._buffer = self._buffer[size + 2 :]
                if size == 0:
                    break
        else:
            length = int(headers["content-length"])
            while len(self._buffer) < length:
                more()
            body, self._buffer = self._buffer[:length], self._buffer[length:]
        return Response(status, headers, body, segments)

    def read_until(self, text: bytes) -> bytes:
        """Read until `text` came; everything so far, left in place for `read_response`."""
        while text not in self._buffer:
            data = self.receive()
            if not data:
                raise ConnectionError(f"ended after {self._buffer!r}")
            self._buffer += data
        return self._buffer


def chat_body(model: str, text: str = "Hello.", **fields: Any) -> dict[str, Any]:
    """The body of a chat of one message."""
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()


def check_error(response: Response, status: int, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape: status, four keys, headers. Returns the error."""
    assert response.status == status, response.body
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert "Traceback" not in error["message"]
    if code is not None:
        assert error["code"] == code, error
    return error
