"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import Http, http_of
from harness.gateway.serving import Service, serving
from harness.gateway.tool_calling import tool_engine


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[ScriptedRemoteEngine]:
    """An engine that says "Hello world", and after the test has nothing left of it."""
    engine = ScriptedRemoteEngine()
    yield engine
    assert engine.contexts == {}, "contexts were left on the engine"


@pytest_asyncio.fixture
async def service(engine: ScriptedRemoteEngine) -> AsyncIterator[Service]:
    """Serve that engine."""
    async with serving(engine) as service:
        yield service
        await engine.wait_for(lambda: service.gate.running == 0 or not engine.contexts)


@pytest_asyncio.fixture
async def telling(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Service, Any]]:
    engine = tool_engine(*request.param)
    async with serving(engine) as service:
        yield service, engine


@pytest_asyncio.fixture
async def http(engine: ScriptedRemoteEngine) -> AsyncIterator[Http]:
    """A client of a served engine that echoes."""
    async with http_of(engine) as client:
        yield client
