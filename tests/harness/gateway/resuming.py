"""A client that loses its connection: it keeps whole events, and asks for those behind them."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import pairwise
from typing import Any

from harness.gateway.serving import Service, read_chunk, read_head

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n")
_ID = re.compile(rb"(?:\A|[\r\n])id: ?(\d+)[\r\n]+\Z")


def whole_events(raw: bytes) -> bytes:
    """Everything up to the end of the last event that came whole."""
    ends = [found.end() for found in _END.finditer(raw)]
    return raw[: ends[-1]] if ends else b""


def events_of(raw: bytes) -> list[bytes]:
    """The events, as they are; all are whole."""
    assert whole_events(raw) == raw
    ends = [0, *(found.end() for found in _END.finditer(raw))]
    return [raw[start:end] for start, end in pairwise(ends)]


def last_id(raw: bytes) -> int:
    """The number of the last event that came whole; 0 without one."""
    events = events_of(whole_events(raw))
    if not events:
        return 0
    found = _ID.search(events[-1])
    assert found is not None, events[-1]
    return int(found[1])


def without_numbers(raw: bytes) -> bytes:
    """The stream as it is without `X-Parrot-Resume`; checks that numbers have no gap."""
    bare = []
    for number, event in enumerate(events_of(raw), 1):
        line = b"id: %d\n" % number
        assert event.endswith((line + b"\n", line + b"\r\n", line + b"\r")), (number, event)
        start = event.rindex(line)
        bare.append(event[:start] + event[start + len(line) :])
    return b"".join(bare)


class Cut:
    """A call whose connection can be cut; its answer has begun."""

    def __init__(
        self,
        service: Service,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        headers: dict[bytes, bytes],
    ) -> None:
        self.headers = headers
        self.stream_id = headers[b"x-parrot-stream"].decode()
        self.raw = b""
        self._service, self._reader, self._writer = service, reader, writer

    async def read_until(self, text: bytes) -> bytes:
        async with asyncio.timeout(10):
            while text not in self.raw:
                chunk = await read_chunk(self._reader)
                assert chunk, f"ended before {text!r}: {self.raw!r}"
                self.raw += chunk
        return self.raw

    async def read_all(self) -> bytes:
        async with asyncio.timeout(20):
            while chunk := await read_chunk(self._reader):
                self.raw += chunk
        return self.raw

    def cut(self) -> None:
        self._writer.transport.abort()

    async def resume(self, after: int) -> bytes:
        """Read the events behind one, to the end."""
        status, _, body = await ask(self._service, self.stream_id, after)
        # 204: there is nothing behind it.
        assert status == 200 or (status == 204 and not body), body
        return body


async def begin(
    service: Service, path: str, body: dict[str, Any], *, asks: bytes = b"X-Parrot-Resume: true\r\n"
) -> Cut:
    """Send a call for a stream that can be resumed, and read the head of its answer."""
    reader, writer = await open_call(service, path, body, asks=asks)
    async with asyncio.timeout(10):
        status, headers = await read_head(reader)
    assert status == 200
    return Cut(service, reader, writer, headers)


async def open_call(
    service: Service, path: str, body: dict[str, Any], *, asks: bytes = b"X-Parrot-Resume: true\r\n"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send it, and wait for nothing."""
    encoded = json.dumps({"model": "m", "stream": True, **body}).encode()
    reader, writer = await service.connect()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n"
    writer.write(head % (path.encode(), len(encoded), asks) + encoded)
    await writer.drain()
    return reader, writer


async def ask(
    service: Service,
    stream_id: str,
    after: int | str | None = None,
    *,
    query: str = "",
    method: str = "GET",
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Ask for a stream: status, headers and all that follows."""
    reader, writer = await open_reader(service, stream_id, after, query=query, method=method)
    try:
        async with asyncio.timeout(20):
            status, headers = await read_head(reader)
            if method == "HEAD" or status == 204:
                return status, headers, b""
            if b"content-length" in headers:
                length = int(headers[b"content-length"])
                return status, headers, await reader.readexactly(length)
            parts = []
            while chunk := await read_chunk(reader):
                parts.append(chunk)
            return status, headers, b"".join(parts)
    finally:
        writer.close()


async def open_reader(
    service: Service,
    stream_id: str,
    after: int | str | None = None,
    *,
    query: str = "",
    method: str = "GET",
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await service.connect()
    last = "" if after is None else f"Last-Event-ID: {after}\r\n"
    writer.write(
        f"{method} /v1/streams/{stream_id}{query} HTTP/1.1\r\nHost: x\r\n{last}\r\n".encode()
    )
    await writer.drain()
    return reader, writer


async def refused(
    service: Service, stream_id: str, after: int | str | None = None, **more: Any
) -> tuple[int, dict[str, Any]]:
    """Status and error."""
    status, _, body = await ask(service, stream_id, after, **more)
    return status, json.loads(body)["error"]
