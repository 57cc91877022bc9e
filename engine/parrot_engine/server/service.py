"""One engine behind several HTTP requests: events by request, failures by HTTP status.

Works on contexts and primitives. The routes are in
`parrot_engine.server.app`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from parrot_engine.engine.driver import DriverStoppedError, EngineDriver
from parrot_engine.protocol import (
    Engine,
    Event,
    Failed,
    FailureCode,
    Fill,
    Filled,
    FreeContext,
    Generate,
    Pooled,
    Primitive,
)
from parrot_engine.text import TextAssets, Tokenizer

_log = logging.getLogger(__name__)

#: A primitive that takes longer is given up, and its context freed.
TIMEOUT_S = 600.0

#: How many tokens of a context a detokenizer needs to go on from.
_TAIL = 8

#: Contexts whose last tokens are remembered.
MAX_TAILS = 65536

_STATUSES: dict[FailureCode, int] = {
    "context_too_long": 400,
    "unknown_context": 404,
    "invalid_request": 400,
    "numerical_error": 500,
    "overloaded": 503,
    "engine_error": 500,
    "engine_lost": 500,
}


class Tails:
    """The last tokens of each context, from which a detokenizer can go on.

    Of the contexts beyond `limit` those unused for longest are forgotten: their next text may
    begin with half a character.

    Args:
        limit: contexts at most.
    """

    def __init__(self, limit: int = MAX_TAILS) -> None:
        self._limit = limit
        self._tails: OrderedDict[int, list[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tails)

    def get(self, context_id: int) -> Sequence[int]:
        """The last tokens of a context; empty for an unknown one."""
        return self._tails.get(context_id, ())

    def append(self, context_id: int, parent_id: int | None, token_ids: Sequence[int]) -> None:
        """A context got tokens, behind those of its parent if it is a fork."""
        before = self.get(context_id if parent_id is None else parent_id)
        self._tails[context_id] = [*before, *token_ids[-_TAIL:]][-_TAIL:]
        self._tails.move_to_end(context_id)
        if len(self._tails) > self._limit:
            self._tails.popitem(last=False)

    def forget(self, context_id: int) -> None:
        self._tails.pop(context_id, None)


class ApiError(Exception):
    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error = {
            "message": message,
            "type": "invalid_request_error" if status < 500 else "server_error",
            "param": param,
            "code": code,
        }


class EngineService:
    """One engine for several HTTP requests, with the events of each.

    One request at a time may work on a context; a second one is refused.
    """

    def __init__(self, engine: Engine, text: TextAssets) -> None:
        self.driver = EngineDriver(engine, on_crash=self._on_crash)
        self.tokenizer = Tokenizer(text)
        self.tails = Tails()
        self._waiting: dict[int, _Inbox] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the engine's thread; call it in the event loop."""
        self._loop = asyncio.get_running_loop()
        self.driver.attach(self._on_step)
        self.driver.start()

    async def close(self) -> None:
        await asyncio.to_thread(self.driver.close)

    @asynccontextmanager
    async def running(self, primitive: Fill | Generate) -> AsyncIterator[AsyncIterator[Event]]:
        """Submit a primitive and receive its events.

        Leaving before the last one frees the context.
        """
        context_id = primitive.context_id
        if context_id in self._waiting:
            raise ApiError(
                409, f"Context {context_id} is at work for another request.", "context_busy",
                "context_id",
            )  # fmt: skip
        inbox = self._waiting[context_id] = _Inbox()
        try:
            self.submit(primitive)
            yield self._events(inbox)
        finally:
            del self._waiting[context_id]
            if not inbox.complete and not self.driver.crashed:
                self.free(context_id)

    def submit(self, *primitives: Primitive) -> None:
        try:
            self.driver.submit(primitives)
        except DriverStoppedError:
            raise ApiError(503, "The engine has stopped.", "engine_stopped") from None

    def free(self, context_id: int) -> None:
        self.tails.forget(context_id)
        self.submit(FreeContext(context_id))

    async def _events(self, inbox: _Inbox) -> AsyncIterator[Event]:
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        while not inbox.complete:
            while not inbox.events:
                inbox.filled.clear()
                # NOTE: only round the wait: a stream is continued by another task than began it.
                async with asyncio.timeout_at(deadline):
                    await inbox.filled.wait()
            event = inbox.events.popleft()
            if isinstance(event, Failed):
                raise ApiError(_STATUSES[event.code], event.message, event.code)
            inbox.complete = isinstance(event, Filled | Pooled) or event.finish_reason is not None
            yield event

    def _on_step(self, events: list[Event]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver, events)
        except RuntimeError:
            # The server has ended while the engine's last step was running.
            _log.debug("events after the end of the event loop")

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            inbox = self._waiting.get(event.context_id)
            if inbox is not None:
                inbox.events.append(event)
                inbox.filled.set()

    def _on_crash(self, error: Exception) -> None:
        _log.error("the engine broke down: %s", error)


class _Inbox:
    __slots__ = ("complete", "events", "filled")

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.filled = asyncio.Event()
        self.complete = False
