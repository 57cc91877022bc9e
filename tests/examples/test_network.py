"""The simulated network of the examples."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from examples.network import Network


async def test_a_request_in_pieces_is_one_round_trip() -> None:
    has_head = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            if data == b"head":
                has_head.set()
            else:
                writer.write(data.upper())

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        with Network(f"http://127.0.0.1:{port}/v1", 0.0) as network:
            url = urlsplit(network.client())
            first, first_out = await asyncio.open_connection(url.hostname, url.port)
            second, second_out = await asyncio.open_connection(url.hostname, url.port)
            first_out.write(b"head")
            await has_head.wait()
            second_out.write(b"other")
            assert await second.read(100) == b"OTHER"
            first_out.write(b"body")
            assert await first.read(100) == b"BODY"
            assert network.round_trips == 1, "the first piece went out beside the other request"
            first_out.write(b"again")
            assert await first.read(100) == b"AGAIN"
            assert network.round_trips == 2
            first_out.close()
            second_out.close()
