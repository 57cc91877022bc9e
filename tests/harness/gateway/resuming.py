"""A client that loses its connection: it keeps whole events, and asks for those behind them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from harness.gateway.serving import Service, read_chunk, read_head


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
