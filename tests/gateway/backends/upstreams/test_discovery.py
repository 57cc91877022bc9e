"""Asking an upstream for its models goes on, whatever it answers."""

from __future__ import annotations

import asyncio

import pytest
from harness.gateway.relaying import answered_by

GOOD = b'{"data":[{"id":"m"}]}'


@pytest.mark.parametrize(
    "garbage",
    [
        b'{"data":[{"id":"x","y":' + b"[" * 50_000 + b"]" * 50_000 + b"}]}",
        b'{"data":[{"id":"\\ud800"}]}',
        b'{"data":[{"id":' + b"9" * 5000 + b"}]}",
        b"\xff",
        b"",
    ],
    ids=["deep", "half a character", "long number", "no utf-8", "nothing"],
)
async def test_garbage_is_not_the_end_of_it(garbage: bytes) -> None:
    answers = [garbage]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = answers.pop() if answers else GOOD
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    async with answered_by(serve, models=None) as upstream:
        async with asyncio.timeout(60):
            await upstream.wait_ready()
        assert not answers
        assert upstream.models() == ("m",)
