"""Calls from their bodies on: others are answered while a large one is decoded."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving
from harness.waiting import until

LARGE = "x" * (1 << 20)
COMPLETIONS = "/v1/completions"


@asynccontextmanager
async def held_threads() -> AsyncIterator[ThreadPoolExecutor]:
    """All threads that the event loop hands work to are busy, until the block ends."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        release.wait()

    pool = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(pool)
    holding = asyncio.get_running_loop().run_in_executor(None, hold)
    await until(held.is_set)
    try:
        yield pool
    finally:
        release.set()
        await holding


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "Hi", "max_tokens": 2, **fields}).encode()


@pytest.mark.parametrize(
    "fields",
    [{}, {"parrot": {"session": "s"}}, {"parrot": {"session": "s", "defer": True}}],
    ids=["ordinary", "attended", "deferred"],
)
async def test_others_are_answered_while_a_large_body_is_decoded(fields: dict[str, Any]) -> None:
    engine = ScriptedRemoteEngine(lambda prompt, sampling: [65])
    async with serving(engine) as service:
        async with held_threads() as pool:
            large = asyncio.create_task(
                service.post(COMPLETIONS, completion(user_data=LARGE, **fields))
            )
            await until(pool._work_queue.qsize)
            assert (await service.post(COMPLETIONS, completion()))[0] == 200
            assert (await health(service)) == 200
            assert not large.done()
        assert (await large)[0] == 200


async def health(service: Service) -> int:
    reader, writer = await service.connect()
    writer.write(b"GET /health/liveness HTTP/1.1\r\nHost: x\r\n\r\n")
    line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def test_a_large_body_that_is_wrong_names_its_field() -> None:
    engine = ScriptedRemoteEngine()
    async with serving(engine) as service:
        for fields, param in (({"n": "x"}, "n"), ({"model": 5}, "model"), ({"model": ""}, "model")):
            status, _, answer = await service.post(
                COMPLETIONS, completion(user_data=LARGE, **fields)
            )
            assert (status, json.loads(answer)["error"]["param"]) == (400, param)
        assert (await service.post(COMPLETIONS, completion(user_data=LARGE)[:-1]))[0] == 400
