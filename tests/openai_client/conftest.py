"""Clients for the tests in this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from driver import Driver, Kind
from harness.processes import GatewayProcess


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """Which client."""
    return request.param


@pytest_asyncio.fixture
async def api(kind: Kind, demo: GatewayProcess) -> AsyncIterator[Driver]:
    """A client of the gateway with the demo model; validates every answer against its types."""
    driver = Driver(kind, demo.base_url, demo.api_key)
    yield driver
    await driver.close()


@pytest_asyncio.fixture
async def loose(kind: Kind, demo: GatewayProcess) -> AsyncIterator[Driver]:
    """The same without that check, for where OpenAI's own answers break the client's types.

    Those have no room for a `finish_reason` of null in the chunks of a completion, nor for the
    first token of an echoed prompt, which has no log-probability.
    """
    driver = Driver(kind, demo.base_url, demo.api_key, _strict_response_validation=False)
    yield driver
    await driver.close()


@pytest_asyncio.fixture
async def through(kind: Kind, relay: GatewayProcess) -> AsyncIterator[Driver]:
    """A client of the gateway in front of the scripted upstream."""
    driver = Driver(kind, relay.base_url, "the caller's own key")
    yield driver
    await driver.close()
