"""Fixtures of Parrot's own API on a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from harness.gateway.parrot_v3_client import V3Client
from harness.gateway.serving import Service, serving
from harness.gateway.v3_service import Model, left_over
from harness.waiting import until


@pytest.fixture
def model() -> Model:
    return Model()


@pytest_asyncio.fixture
async def service(model: Model) -> AsyncIterator[Service]:
    async with serving(model.engine) as service:
        yield service
        await until(lambda: not left_over(service))
        assert model.engine.contexts == {}


@pytest_asyncio.fixture
async def client(service: Service) -> AsyncIterator[V3Client]:
    """A registered client; afterwards its session is gone and nothing is left of it."""
    async with httpx.AsyncClient(verify=False) as http:
        client = V3Client(service.root, http)
        await client.register()
        yield client
        if client.session_id:
            await client.remove()
