"""Clients for the tests in this folder."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from harness.openai_client import Driver, Kind
from harness.processes import GatewayProcess

if TYPE_CHECKING:
    from harness.raw_client import Either


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
        varied = call and {"kind", "connect"} & call.params.keys()
        if not varied or Path(__file__).parent not in item.path.parents:
            continue
        (name,) = varied
        kind = call.params["kind"] if name == "kind" else call.params["connect"][1]
        number = tests.setdefault(getattr(item, "originalname", item.name), len(tests))
        others = sum(index for other, index in call.indices.items() if other != name)
        if kind != kinds[(number + others) % 2]:
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


#: Engines and clients; the sync client would block the loop in which the scripted engine runs,
#: and the environment with openai 3.x has neither a gateway nor httpx.
WAYS = [("demo", "sync"), ("demo", "async")]
if importlib.util.find_spec("parrot_engine"):
    WAYS += [("demo", "raw"), ("scripted", "async"), ("scripted", "raw")]


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


@pytest_asyncio.fixture(params=WAYS, ids="-".join)
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Either]]:
    """Connect a client, or plain HTTP, to the gateway with the demo model or a scripted engine."""
    engine, kind = request.param
    async with AsyncExitStack() as stack:
        if engine == "demo":
            demo = request.getfixturevalue("demo")
            address = demo.base_url, demo.api_key
        else:
            from harness.gateway.scripted_remote import storyteller
            from harness.gateway.serving import serving

            service = await stack.enter_async_context(serving(storyteller()))
            address = f"{service.root}/v1", None

        def make(**options: Any) -> Either:
            driver: Either
            if kind == "raw":
                from harness.raw_client import RawDriver

                driver = RawDriver(*address)
            else:
                driver = Driver(kind, *address, **options)
            stack.push_async_callback(driver.close)
            return driver

        yield make


@pytest.fixture
def either(connect: Callable[..., Either]) -> Either:
    """Either engine by either way, validated as `api` is."""
    return connect()


@pytest.fixture
def loosely(connect: Callable[..., Either]) -> Either:
    """Either engine by either way, with types as `loose` has them."""
    return connect(_strict_response_validation=False)


@pytest_asyncio.fixture
async def through(kind: Kind, relay: GatewayProcess) -> AsyncIterator[Driver]:
    """A client of the gateway in front of the scripted upstream."""
    driver = Driver(kind, relay.base_url, "the caller's own key")
    yield driver
    await driver.close()
