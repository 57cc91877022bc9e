"""The gateway's address and key, and the `openai` clients that reach it.

Importing this does not load `openai`. No object of an HTTP library is made here, because openai 2.x
and 3.x use different ones.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openai

#: Default address of `parrot-gateway serve`.
DEFAULT_BASE_URL = "http://127.0.0.1:8000/v1"
#: Environment variables of the address and the key; the first one that is set wins.
BASE_URL_VARIABLES = ("PARROT_BASE_URL", "OPENAI_API_BASE", "OPENAI_BASE_URL")
API_KEY_VARIABLES = ("PARROT_API_KEY", "OPENAI_API_KEY")
#: The `openai` client requires a key; a gateway without keys takes any.
NO_KEY = "none"


def environment(names: Iterable[str]) -> str | None:
    """Return the first of these environment variables that is set and not blank."""
    return next((text for name in names if (text := os.environ.get(name, "").strip())), None)


def default_base_url() -> str:
    """Return the address in the environment, or this machine's port 8000."""
    return environment(BASE_URL_VARIABLES) or DEFAULT_BASE_URL


def default_api_key() -> str | None:
    """Return the key in the environment."""
    return environment(API_KEY_VARIABLES)


@dataclass(frozen=True)
class Connection:
    """Arguments of an `openai` client.

    Attributes:
        base_url: ends in `/v1`.
        timeout: seconds, or any other form that the client accepts; None is the client's default.
        max_retries: None is the client's default.
        http_client, http_async_client: the user's own HTTP clients, passed on unchanged.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    timeout: Any = None
    max_retries: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    query: Mapping[str, Any] = field(default_factory=dict)
    http_client: Any = None
    http_async_client: Any = None

    @property
    def root(self) -> str:
        """Return the address without `/v1`, the base of `/tokenize`."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    def options(self) -> dict[str, Any]:
        """Return the arguments common to both kinds of clients."""
        options: dict[str, Any] = {
            "base_url": self.base_url,
            "api_key": self.api_key or NO_KEY,
            "default_headers": dict(self.headers),
            "default_query": self.query,
        }
        if self.timeout is not None:
            options["timeout"] = self.timeout
        if self.max_retries is not None:
            options["max_retries"] = self.max_retries
        return options


class OpenAIClients:
    """The `openai` clients of one connection, made on first use; thread-safe.

    An asynchronous client's connections belong to the event loop in which they were opened, and a
    program may have several loops. So each loop has a client, which is dropped after the loop's
    end.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.Lock()
        self._sync: openai.OpenAI | None = None
        self._of_loop: dict[asyncio.AbstractEventLoop, openai.AsyncOpenAI] = {}

    def __reduce__(self) -> tuple[type[OpenAIClients], tuple[Connection]]:
        # Connections are not copied: a copy opens its own.
        return OpenAIClients, (self.connection,)

    def __del__(self) -> None:
        self._drop(list(self._of_loop))

    @property
    def num_loops(self) -> int:
        """Return the number of event loops with a client."""
        return len(self._of_loop)

    def sync(self) -> openai.OpenAI:
        """Return the client for threads."""
        with self._lock:
            if self._sync is None:
                # NOTE: importing `openai` takes most of a second, so a program that only names a
                # model must not wait for it.
                import openai

                self._sync = openai.OpenAI(
                    http_client=self.connection.http_client, **self.connection.options()
                )
            return self._sync

    def of_running_loop(self) -> openai.AsyncOpenAI:
        """Return the client of the running event loop.

        Raises:
            RuntimeError: no loop runs here.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            self._drop([each for each in self._of_loop if each.is_closed()])
            client = self._of_loop.get(loop)
            if client is None:
                import openai

                client = self._of_loop[loop] = openai.AsyncOpenAI(
                    http_client=self.connection.http_async_client, **self.connection.options()
                )
            return client

    def _drop(self, loops: list[asyncio.AbstractEventLoop]) -> None:
        for loop in loops:
            client = self._of_loop.pop(loop)
            if self.connection.http_async_client is not None:
                continue
            # NOTE: a client collected while some loop runs closes itself there, which fails loudly
            # if its own loop has ended. So mark it closed first: the coroutine does so before it
            # reaches its connections, and their sockets are dropped with it.
            closing: Any = client.close()
            with suppress(Exception):
                closing.send(None)
            with suppress(Exception):
                closing.close()
