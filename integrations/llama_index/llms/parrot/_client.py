"""Clients of the gateway: `openai`'s own, made when first needed, one for every event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

#: Where `parrot-gateway serve` listens unless it is told otherwise.
DEFAULT_BASE_URL = "http://127.0.0.1:8000/v1"
#: The gateway takes any key where it has none, and the client insists on one.
NO_KEY = "none"


class Connection(NamedTuple):
    """What a client is made of.

    Attributes:
        base_url: ends in `/v1`.
        headers: sent with every request, as pairs.
    """

    base_url: str
    api_key: str
    timeout: float
    max_retries: int
    headers: tuple[tuple[str, str], ...]

    @property
    def root(self) -> str:
        """The address without `/v1`, where `/tokenize` is."""
        return self.base_url.rstrip("/").removesuffix("/v1")


def connection(
    base_url: str | None,
    api_key: str | None,
    timeout: float,
    max_retries: int,
    headers: Mapping[str, str] | None,
) -> Connection:
    """What was given, then what the environment says, then the defaults."""
    found = base_url or _environment("PARROT_BASE_URL", "OPENAI_API_BASE", "OPENAI_BASE_URL")
    key = api_key or _environment("PARROT_API_KEY", "OPENAI_API_KEY")
    return Connection(
        base_url=found or DEFAULT_BASE_URL,
        api_key=key or NO_KEY,
        timeout=timeout,
        max_retries=max_retries,
        headers=tuple((headers or {}).items()),
    )


def _environment(*names: str) -> str | None:
    return next((text for name in names if (text := os.environ.get(name))), None)


class Clients:
    """Makes and keeps clients; thread-safe.

    An asynchronous client belongs to the event loop that it first ran in, and synchronous methods
    of LlamaIndex start loops of their own: hence one for each loop, forgotten when that has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sync: tuple[Connection, Any] | None = None
        self._async: dict[asyncio.AbstractEventLoop, tuple[Connection, Any]] = {}

    def __del__(self) -> None:
        self._forget(list(self._async))

    def sync_client(self, wanted: Connection) -> Any:
        """An `openai.OpenAI`; the one before, unless the connection has changed."""
        with self._lock:
            if self._sync is None or self._sync[0] != wanted:
                # NOTE: importing `openai` takes most of a second; no program waits for it that
                # only names a model.
                from openai import OpenAI

                self._sync = wanted, OpenAI(**_arguments(wanted))
            return self._sync[1]

    def async_client(self, wanted: Connection) -> Any:
        """An `openai.AsyncOpenAI` of the running loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._forget([each for each in self._async if each.is_closed()])
            kept = self._async.get(loop)
            if kept is None or kept[0] != wanted:
                from openai import AsyncOpenAI

                kept = self._async[loop] = wanted, AsyncOpenAI(**_arguments(wanted))
            return kept[1]

    def _forget(self, loops: list[asyncio.AbstractEventLoop]) -> None:
        for loop in loops:
            _, client = self._async.pop(loop)
            # NOTE: a client that is collected while some loop runs closes itself there, which
            # fails loudly if its own loop has ended. So it is told first that it is closed: the
            # coroutine notes that before it comes to its connections, whose sockets go with it.
            closing = client.close()
            with suppress(Exception):
                closing.send(None)
            with suppress(Exception):
                closing.close()


def _arguments(wanted: Connection) -> dict[str, Any]:
    return {
        "base_url": wanted.base_url,
        "api_key": wanted.api_key,
        "timeout": wanted.timeout,
        "max_retries": wanted.max_retries,
        "default_headers": dict(wanted.headers),
    }
