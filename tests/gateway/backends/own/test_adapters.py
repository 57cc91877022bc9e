"""Adapters on all engines of a model, those that join later too; no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from harness.gateway.scripted_worker import EMPTY_TOKENIZER, scripted_info
from parrot_engine.link.wire import (
    Adapters,
    LoadAdapter,
    Register,
    UnloadAdapter,
    decode_from_gateway,
)
from parrot_engine.protocol import AdapterInfo
from parrot_engine.text import TextAssets

from parrot_gateway.backends.own.adapters import AdapterService
from parrot_gateway.backends.own.registry import EngineRegistry
from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.exceptions import InvalidRequestError, ModelNotFoundError

SQL = AdapterInfo("sql", "ff", "/adapters/sql", 8)


def join(registry: EngineRegistry, *adapters: AdapterInfo, model: str = "m") -> RemoteEngine:
    info = replace(scripted_info(model), max_loras=2)
    return registry.add(
        Register("engine", info, TextAssets(EMPTY_TOKENIZER), adapters=list(adapters))
    )


@pytest.fixture
def registry() -> EngineRegistry:
    return EngineRegistry(max_engines=4)


@pytest.fixture
async def service(registry: EngineRegistry) -> AsyncIterator[AdapterService]:
    service = AdapterService(registry, {"own": "m"}, lambda name: name == "m", 5.0)
    yield service
    await service.close()


async def command(engine: RemoteEngine) -> LoadAdapter | UnloadAdapter:
    await engine.has_outgoing.wait()
    data = engine.take_outgoing()
    assert data is not None
    assert engine.take_outgoing() is None
    message = decode_from_gateway(data)
    assert isinstance(message, LoadAdapter | UnloadAdapter)
    return message


async def answer(
    registry: EngineRegistry, engine: RemoteEngine, *have: AdapterInfo, problem: str | None = None
) -> LoadAdapter | UnloadAdapter:
    """Carry out what the engine is asked for."""
    asked = await command(engine)
    registry.note_adapters(engine, Adapters(list(have), asked.number, problem))
    return asked


async def test_all_engines_get_an_adapter_or_none_keeps_it(
    registry: EngineRegistry, service: AdapterService
) -> None:
    first, second = join(registry), join(registry)
    loading = asyncio.create_task(service.load("sql", "/adapters/sql"))
    asked = await answer(registry, first, SQL)
    assert (asked.name, getattr(asked, "path", "")) == ("sql", "/adapters/sql")
    await answer(registry, second, problem="it has another rank")
    assert isinstance(await answer(registry, first), UnloadAdapter)
    with pytest.raises(InvalidRequestError, match="it has another rank"):
        await loading
    assert service.base_of("sql") is None


async def test_engines_that_join_later_get_it(
    registry: EngineRegistry, service: AdapterService
) -> None:
    first = join(registry)
    loading = asyncio.create_task(service.load("sql", "/adapters/sql"))
    await answer(registry, first, SQL)
    await loading
    second = join(registry)
    assert await answer(registry, second, SQL) == LoadAdapter(1, "sql", "/adapters/sql")
    assert registry.adapted["sql"] == [first, second]
    for engine in (first, second):
        registry.remove(engine.id, "its process ended")
    assert service.base_of("sql") == "m"
    # Where it cannot be read any more, nobody waits for it.
    third = join(registry)
    await answer(registry, third, problem="is no folder")
    await asyncio.sleep(0)
    assert service.base_of("sql") is None


async def test_one_of_the_settings_stays_unloaded(
    registry: EngineRegistry, service: AdapterService
) -> None:
    own = replace(SQL, name="own")
    assert service.base_of("own") == "m"
    engine = join(registry, own)
    unloading = asyncio.create_task(service.unload("own"))
    await answer(registry, engine)
    await unloading
    assert service.base_of("own") is None
    again = join(registry, own)
    assert (await answer(registry, again)).name == "own"
    with pytest.raises(ModelNotFoundError, match="cannot be found"):
        await service.unload("sql")


async def test_what_it_is_an_adapter_of(registry: EngineRegistry, service: AdapterService) -> None:
    with pytest.raises(InvalidRequestError, match="No model here takes adapters"):
        await service.load("sql", "p")
    with pytest.raises(InvalidRequestError, match="takes no adapter"):
        await service.load("sql", "p", base="m")
    engine, _ = join(registry), join(registry, model="n")
    with pytest.raises(InvalidRequestError, match="'base_model', one of m, n"):
        await service.load("sql", "p")
    with pytest.raises(InvalidRequestError, match="is the name of a model"):
        await service.load("m", "p")
    loading = asyncio.create_task(service.load("sql", "p", base="m"))
    await answer(registry, engine, SQL)
    await loading
    with pytest.raises(InvalidRequestError, match="has already been loaded"):
        await service.load("sql", "p", base="m")


async def test_an_engine_that_is_lost_meanwhile(
    registry: EngineRegistry, service: AdapterService
) -> None:
    engine = join(registry)
    loading = asyncio.create_task(service.load("sql", "p"))
    await command(engine)
    registry.remove(engine.id, "its link broke")
    with pytest.raises(InvalidRequestError, match="was lost"):
        await loading
