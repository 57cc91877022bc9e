"""One call on one engine: from prompts to the text of its candidates. No HTTP.

What a call needs of an engine, and the thin shell that waits for it. Which primitives are sent and
what events mean is decided in `generation_state`.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Protocol

from parrot_engine.protocol import EngineInfo, Event, Primitive
from parrot_engine.text import Tokenizer

from parrot_gateway.core.generation_state import GenerationState
from parrot_gateway.core.request import GenerationRequest, Update
from parrot_gateway.exceptions import DeadlineError, EngineLostError, OverloadedError


class Channel(Protocol):
    """Contexts of one call on an engine. Leaving it frees them, and cancels what still runs."""

    @property
    def context_ids(self) -> list[int]:
        """All its ids: those that it was opened with, and those added since."""
        ...

    def extend(self, count: int) -> list[int]:
        """So many fresh contexts more.

        Raises:
            EngineLostError: the engine went away.
            OverloadedError: it has too much to do. When this passes, what is submitted in the same
                turn of the event loop is taken.
        """
        ...

    def __enter__(self) -> Channel: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def submit(self, *primitives: Primitive) -> None:
        """Send primitives, in order; never blocks."""
        ...

    async def next(self) -> Event:
        """The next event of these contexts. A cancelled wait loses none.

        Raises:
            EngineLostError: the engine went away.
        """
        ...


class GenerationEngine(Protocol):
    """What a call needs of an engine: `RemoteEngine`, or a double of it."""

    @property
    def info(self) -> EngineInfo:
        """What the engine is."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        ...

    def open(self, count: int, *, salt: str = "") -> Channel:
        """A channel with `count` fresh contexts.

        Raises:
            EngineLostError: the engine went away.
            OverloadedError: it has too much to do.
        """
        ...


class Generation:
    """Runs one call; a context manager, whose exit frees all that it has on the engine.

    Cancelling a wait and leaving the `with` block is all it takes to cancel the call.

    Args:
        engine: where it runs.
        request: what is asked.
        deadline: `time.perf_counter()` at which the call is given up; None never.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        request: GenerationRequest,
        deadline: float | None = None,
    ) -> None:
        self._engine = engine
        self._request = request
        self._deadline = deadline
        self._channel: Channel
        #: From entering on.
        self.state: GenerationState

    def __enter__(self) -> Generation:
        """Send the call to the engine.

        Raises:
            EngineLostError: the engine went away.
            OverloadedError: it has too much to do.
        """
        request = self._request
        self.state = GenerationState(request, self._engine.tokenizer)
        self._channel = self._engine.open(self.state.contexts_wanted, salt=request.salt)
        self._channel.__enter__()
        try:
            self._channel.submit(*self.state.begin(list(self._channel.context_ids)))
        except BaseException:
            self._channel.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.__exit__(kind, error, trace)

    async def next(self, until: float | None = None) -> Update | None:
        """The next update; None when there was none `until` this `time.perf_counter()`.

        Raises:
            DeadlineError: the call took too long.
            EngineLostError: the engine went away.
            GatewayError: the engine gave the call up.
        """
        while True:
            limit = _earlier(until, self._deadline)
            try:
                if limit is None:
                    event = await self._channel.next()
                else:
                    async with asyncio.timeout(limit - time.perf_counter()):
                        event = await self._channel.next()
            except TimeoutError:
                if self._deadline is not None and limit == self._deadline:
                    raise DeadlineError(
                        "The call took longer than this gateway allows "
                        "(setting server.call_timeout_s) and was cancelled."
                    ) from None
                return None
            progress = self.state.apply(event)
            if progress.primitives and not self.state.done:
                self._channel.submit(*progress.primitives)
                self._begin_further()
            if progress.update is not None:
                return progress.update

    def _begin_further(self) -> None:
        """Begin prompts in the place of those that have ended."""
        count = self.state.contexts_wanted
        if not count:
            return
        try:
            context_ids = self._channel.extend(count)
        except OverloadedError as error:
            if isinstance(error, EngineLostError) or not self.state.waits:
                raise
            # The next event of what is in work brings us back here.
            return
        self._channel.submit(*self.state.begin(context_ids))


def _earlier(first: float | None, second: float | None) -> float | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)
