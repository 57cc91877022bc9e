"""The `openai` clients of one model, made when they are first needed.

`openai` is imported then, too: importing this package loads none of it. No object of the HTTP
library is made here, since openai 2.x and 3.x have different ones.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import openai

#: The client insists on a key; an open gateway does not.
NO_KEY = "none"


@dataclass(frozen=True)
class Endpoint:
    """Where calls go, and how.

    Attributes:
        timeout: seconds, or what else the client takes; None is the client's own default.
        http_client, http_async_client: the user's own objects for the client, passed on
            as they are.
    """

    base_url: str
    api_key: str | None = field(repr=False)
    timeout: Any
    max_retries: int | None
    headers: Mapping[str, str]
    query: Mapping[str, Any]
    http_client: Any = None
    http_async_client: Any = None

    def options(self) -> dict[str, Any]:
        """Arguments of a client, of either kind."""
        options: dict[str, Any] = {
            "base_url": self.base_url,
            "api_key": self.api_key or NO_KEY,
            "default_headers": self.headers,
            "default_query": self.query,
        }
        if self.timeout is not None:
            options["timeout"] = self.timeout
        if self.max_retries is not None:
            options["max_retries"] = self.max_retries
        return options


class Clients:
    """One client for synchronous code, and one for each event loop.

    An asynchronous client keeps connections that belong to the loop they were opened in, so that a
    program with several `asyncio.run` needs several. They go with their loops.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._lock = threading.Lock()
        self._sync: openai.OpenAI | None = None
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, openai.AsyncOpenAI] = (
            WeakKeyDictionary()
        )

    def __reduce__(self) -> tuple[type[Clients], tuple[Endpoint]]:
        # Connections stay where they are: a copy opens its own.
        return Clients, (self.endpoint,)

    def sync(self) -> openai.OpenAI:
        """The client for threads."""
        with self._lock:
            if self._sync is None:
                import openai

                self._sync = openai.OpenAI(
                    http_client=self.endpoint.http_client, **self.endpoint.options()
                )
            return self._sync

    def of_running_loop(self) -> openai.AsyncOpenAI:
        """The client for the event loop that runs here.

        Raises:
            RuntimeError: none runs.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            client = self._of_loop.get(loop)
            if client is None:
                import openai

                client = openai.AsyncOpenAI(
                    http_client=self.endpoint.http_async_client, **self.endpoint.options()
                )
                self._of_loop[loop] = client
            return client
