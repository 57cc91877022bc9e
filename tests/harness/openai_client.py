"""The sync and the async client of the openai package, driven alike.

Tests are written once, as coroutines: what the sync client returns is a value already, what the
async one returns is awaited.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import openai

Kind = Literal["sync", "async"]


class Driver:
    """One client.

    Args:
        kind: which of the two.
        base_url: where the gateway is.
        api_key: what it is told.
        options: of the client.
    """

    def __init__(self, kind: Kind, base_url: str, api_key: str | None, **options: Any) -> None:
        make = openai.OpenAI if kind == "sync" else openai.AsyncOpenAI
        options = {"timeout": 30.0, "_strict_response_validation": True, **options}
        self.kind = kind
        self.client: Any = make(base_url=base_url, api_key=api_key or "no key", **options)

    async def close(self) -> None:
        """Close its connections."""
        await result(self.client.close())

    async def complete(self, **body: Any) -> Any:
        """`POST /v1/completions`."""
        return await result(self.client.completions.create(**body))

    async def chat(self, **body: Any) -> Any:
        """`POST /v1/chat/completions`."""
        return await result(self.client.chat.completions.create(**body))

    async def stream_completion(self, **body: Any) -> list[Any]:
        """The chunks of a streamed completion."""
        return await collect(await self.complete(stream=True, **body))

    async def stream_chat(self, **body: Any) -> list[Any]:
        """The chunks of a streamed chat."""
        return await collect(await self.chat(stream=True, **body))


class Fields(dict[str, Any]):
    """A decoded JSON object, read as the client's types are; an absent field is an error."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def fields_of(value: Any) -> set[str]:
    """Names of the fields that an object had on the wire."""
    return set(value) if isinstance(value, Fields) else value.model_fields_set


async def result(value: Any) -> Any:
    """The value, or what it is a promise of."""
    return await value if inspect.isawaitable(value) else value


async def collect(stream: Any) -> list[Any]:
    """All items of a stream of either client."""
    if hasattr(stream, "__aiter__"):
        return [item async for item in stream]
    return list(stream)


async def first_of(stream: Any) -> Any:
    """The next item of a stream of either client."""
    if hasattr(stream, "__anext__"):
        return await stream.__anext__()
    return next(stream)


@asynccontextmanager
async def entered(manager: Any) -> AsyncIterator[Any]:
    """Enter a context manager of either kind."""
    if hasattr(manager, "__aenter__"):
        async with manager as value:
            yield value
    else:
        with manager as value:
            yield value
