"""Clients for the tests in this folder."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from harness.openai_client import Driver, Kind
from harness.processes import GatewayProcess


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `PARROT_CLIENT_KINDS=alternating`, each test with one kind of client, in turn.

    The second run, with another version of the client, is half as long for it.
    """
    if os.environ.get("PARROT_CLIENT_KINDS") != "alternating":
        return
    kinds = ("sync", "async")
    tests: dict[str, int] = {}
    left_out = []
    for item in items:
        call = getattr(item, "callspec", None)
        if (
            call is None
            or "kind" not in call.params
            or Path(__file__).parent not in item.path.parents
        ):
            continue
        number = tests.setdefault(getattr(item, "originalname", item.name), len(tests))
        others = sum(call.indices[name] for name in call.indices if name != "kind")
        if call.params["kind"] != kinds[(number + others) % 2]:
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """Name the kind of client."""
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
