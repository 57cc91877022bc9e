"""Asking an upstream for its models goes on, whatever it answers."""

from __future__ import annotations

import asyncio

import pytest
from harness.gateway.relaying import started
from harness.scripted_upstream import ScriptedUpstream, document

from parrot_gateway.backends.upstreams.client import Upstream
from parrot_gateway.settings.model import UpstreamSettings

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
    with ScriptedUpstream() as server:
        server.answer_all(document(garbage), document(GOOD))
        settings = UpstreamSettings(name="up", url=server.base_url)
        async with started(Upstream(settings)) as upstream, asyncio.timeout(60):
            await upstream.wait_ready()
            assert len(server.received) == 2
            assert upstream.models() == ("m",)
