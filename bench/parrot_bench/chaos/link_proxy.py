"""A TCP proxy in front of the gateway whose connections can be cut."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

_PIECE_BYTES = 65536


class LinkProxy:
    """Passes bytes on; an asynchronous context manager.

    Args:
        url: of the server behind it; any path.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "127.0.0.1", parts.port or 80
        self._server: asyncio.Server
        self._writers: set[asyncio.StreamWriter] = set()
        #: Connections so far.
        self.connections = 0

    async def __aenter__(self) -> LinkProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        """Break all connections at both ends; what was under way is lost."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        ends = [writer]
        try:
            inner_reader, inner_writer = await asyncio.open_connection(*self._address)
            ends.append(inner_writer)
            self._writers.update(ends)
            await asyncio.gather(_pass_on(reader, inner_writer), _pass_on(inner_reader, writer))
        except OSError:
            return
        finally:
            self._writers.difference_update(ends)
            for each in ends:
                each.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until one side ends; the other is closed in good order."""
    while data := await reader.read(_PIECE_BYTES):
        writer.write(data)
        await writer.drain()
    with suppress(OSError):
        writer.write_eof()
