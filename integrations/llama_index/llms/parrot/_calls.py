"""Calls over the wire: chat and completions, whole and as streams, and waiting for references."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.llms.parrot._client import Clients, Connection
from llama_index.llms.parrot._deferred import resolvable, resolved
from llama_index.llms.parrot._errors import explained
from llama_index.llms.parrot._messages import (
    ChatAssembly,
    CompletionAssembly,
    chat_response,
    completion_response,
    place_of,
    to_wire,
)

T = TypeVar("T")


class Calls:
    """Makes calls over one connection.

    Everywhere `request` is what the client's `create` takes beside messages or prompt, and
    `openai.APIError` is raised with a message that says what to do.
    """

    def __init__(self, clients: Clients, where: Connection) -> None:
        self._clients = clients
        self._where = where

    def chat(self, messages: Sequence[ChatMessage], request: dict[str, Any]) -> ChatResponse:
        """Answer messages."""
        with explained(self._where.base_url):
            resource = self._clients.sync_client(self._where).chat.completions
            raw = resource.with_raw_response.create(messages=to_wire(messages), **request)
            return chat_response(raw.parse(), place_of(raw.headers))

    async def achat(self, messages: Sequence[ChatMessage], request: dict[str, Any]) -> ChatResponse:
        """See `chat`."""
        with explained(self._where.base_url):
            resource = self._clients.async_client(self._where).chat.completions
            raw = await resource.with_raw_response.create(messages=to_wire(messages), **request)
            return chat_response(raw.parse(), place_of(raw.headers))

    def complete(self, prompt: str, request: dict[str, Any]) -> CompletionResponse:
        """Go on with a text."""
        with explained(self._where.base_url):
            resource = self._clients.sync_client(self._where).completions
            raw = resource.with_raw_response.create(prompt=prompt, **request)
            return completion_response(raw.parse(), place_of(raw.headers))

    async def acomplete(self, prompt: str, request: dict[str, Any]) -> CompletionResponse:
        """See `complete`."""
        with explained(self._where.base_url):
            resource = self._clients.async_client(self._where).completions
            raw = await resource.with_raw_response.create(prompt=prompt, **request)
            return completion_response(raw.parse(), place_of(raw.headers))

    # NOTE: the request of a stream is made when its first piece is asked for. What the spans say
    # of it has to be in `request` before: by then the program may be in another one.

    def stream_chat(
        self, messages: Sequence[ChatMessage], request: dict[str, Any]
    ) -> Generator[Any, None, None]:
        """See `chat`."""
        resource = self._clients.sync_client(self._where).chat.completions
        return self._pieces(resource, {"messages": to_wire(messages), **request}, ChatAssembly())

    def stream_complete(self, prompt: str, request: dict[str, Any]) -> Generator[Any, None, None]:
        """See `complete`."""
        resource = self._clients.sync_client(self._where).completions
        return self._pieces(resource, {"prompt": prompt, **request}, CompletionAssembly())

    def astream_chat(
        self, messages: Sequence[ChatMessage], request: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """See `chat`."""
        resource = self._clients.async_client(self._where).chat.completions
        return self._apieces(resource, {"messages": to_wire(messages), **request}, ChatAssembly())

    def astream_complete(self, prompt: str, request: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """See `complete`."""
        resource = self._clients.async_client(self._where).completions
        return self._apieces(resource, {"prompt": prompt, **request}, CompletionAssembly())

    def _pieces(
        self, resource: Any, request: dict[str, Any], assembly: ChatAssembly | CompletionAssembly
    ) -> Generator[Any, None, None]:
        with explained(self._where.base_url):
            raw = resource.with_raw_response.create(**request)
            place = place_of(raw.headers)
            with raw.parse() as stream:
                for chunk in stream:
                    yield assembly.add(chunk, place)

    async def _apieces(
        self, resource: Any, request: dict[str, Any], assembly: ChatAssembly | CompletionAssembly
    ) -> AsyncGenerator[Any, None]:
        with explained(self._where.base_url):
            raw = await resource.with_raw_response.create(**request)
            place = place_of(raw.headers)
            async with raw.parse() as stream:
                async for chunk in stream:
                    yield assembly.add(chunk, place)

    def resolve(self, value: T, timeout: float | None) -> T:
        """The same with texts in place of references, waited for.

        Raises:
            TypeError: a streaming response, which has to be read first.
        """
        body = resolvable(value)
        if body is None:
            return value
        with explained(self._where.base_url):
            answer = self._clients.sync_client(self._where).post(
                "/resolve", cast_to=object, **_resolve_arguments(body, timeout)
            )
        return resolved(value, answer)

    async def aresolve(self, value: T, timeout: float | None) -> T:
        """See `resolve`."""
        body = resolvable(value)
        if body is None:
            return value
        with explained(self._where.base_url):
            answer = await self._clients.async_client(self._where).post(
                "/resolve", cast_to=object, **_resolve_arguments(body, timeout)
            )
        return resolved(value, answer)


def _resolve_arguments(body: dict[str, Any], timeout: float | None) -> dict[str, Any]:
    # Not repeated: what failed stays failed, and the gateway has waited already.
    options: dict[str, Any] = {"max_retries": 0}
    if timeout is not None:
        body = {**body, "timeout": timeout}
        options["timeout"] = timeout + 5.0
    return {"body": body, "options": options}
