"""A real link for tests: a server with the join endpoint, and engines that dial it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from parrot_engine.engine.driver import EngineDriver
from parrot_engine.link.client import EngineLink
from parrot_engine.text import TextAssets
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute

from harness.gateway.scripted_worker import EMPTY_TOKENIZER, scripted_info
from harness.gateway.serving import listening
from harness.scripted_engine import ScriptedEngine
from harness.waiting import until
from parrot_gateway.api.engine_join import JOIN_PATH, EngineLinkEndpoint
from parrot_gateway.backends.own.registry import EngineRegistry
from parrot_gateway.backends.own.remote import RemoteEngine

WAIT_S = 10.0
KEY = "the-join-key"
OWN_KEY = "another-key"


@asynccontextmanager
async def join_server(
    registry: EngineRegistry,
    heartbeat_s: float = 0.2,
    is_own_name: Callable[[str], bool] = lambda name: False,
    stall_s: float = 60.0,
) -> AsyncIterator[str]:
    """Serve the join endpoint; the URL to dial. `OWN_KEY` is that of the gateway's own engines."""
    endpoint = EngineLinkEndpoint(
        registry, [OWN_KEY, KEY], heartbeat_s, stall_s, own_key=OWN_KEY, is_own_name=is_own_name
    )
    app = Starlette(routes=[WebSocketRoute(JOIN_PATH, endpoint.__call__)])
    async with listening(app, http="auto", ws="websockets-sansio") as port:
        yield f"ws://127.0.0.1:{port}{JOIN_PATH}"


@asynccontextmanager
async def scripted_engine(
    url: str,
    *,
    model: str = "scripted",
    key: str = KEY,
    text: TextAssets | None = None,
    name: str | None = None,
    before_step: Callable[[], None] | None = None,
) -> AsyncIterator[asyncio.Task[None]]:
    """An engine that joins; the task of its link."""
    engine = ScriptedEngine(info=scripted_info(model), before_step=before_step)
    driver = EngineDriver(engine)
    driver.start()
    text = text or TextAssets(EMPTY_TOKENIZER)
    link = EngineLink(driver, text, url=url, join_key=key, name=name)
    running = asyncio.create_task(link.run())
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.to_thread(driver.close, WAIT_S)


async def joined(registry: EngineRegistry, model: str = "scripted") -> RemoteEngine:
    """Wait for an engine of a model."""
    await until(lambda: model in registry.serving)
    return registry.serving[model][-1]
