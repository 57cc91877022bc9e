"""One call on one engine: from prompts to the text of its candidates. No HTTP.

What a call needs of an engine, and the thin shell that waits for it. Which primitives are sent and
what events mean is decided in `generation_state`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol

from parrot_engine.protocol import EngineInfo, Event, Filled, Primitive, Retention
from parrot_engine.text import Tokenizer

from parrot_gateway.exceptions import DeadlineError, EngineLostError, OverloadedError
from parrot_gateway.generation.observer import GenerationObserver, Observers
from parrot_gateway.generation.placement import Placement, Placer
from parrot_gateway.generation.request import (
    ChoiceDelta,
    GenerationRequest,
    PromptFilled,
    Update,
)
from parrot_gateway.generation.state import GenerationState
from parrot_gateway.generation.tools.parsing import ToolCallText

#: The scheduler hears of a call's output every so many tokens.
PROGRESS_INTERVAL_TOKENS = 16


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

    def open(
        self,
        count: int,
        *,
        salt: str = "",
        retention: Retention = "normal",
        application: str = "",
    ) -> Channel:
        """A channel with `count` fresh contexts.

        Args:
            count: at least 1.
            salt: of their tokens, in the prefix cache.
            retention: what becomes of their KV when they are freed.
            application: whose they are, for what is kept of them.

        Raises:
            EngineLostError: the engine went away.
            OverloadedError: it has too much to do.
        """
        ...


class Generation:
    """Runs one call; a context manager, whose exit frees all that it has on the engine.

    Cancelling a wait and leaving the `with` block is all it takes to cancel the call.

    Args:
        placer: the engines of its model, of which it gets one.
        request: what is asked.
        deadline: `time.perf_counter()` at which the call is given up; None never.
        observers: are told of the answer as it comes.
    """

    def __init__(
        self,
        placer: Placer,
        request: GenerationRequest,
        deadline: float | None = None,
        observers: Iterable[GenerationObserver] = (),
    ) -> None:
        self._placer = placer
        self._request = request
        self._deadline = deadline
        self._observers = Observers(observers)
        #: Which candidates are answered is known in the end only.
        self._ranks = request.best_of > request.n
        tools = request.tools
        #: By candidate of the only prompt, where tools may be called.
        self._tool_texts = [] if tools is None else [ToolCallText(tools) for _ in range(request.n)]
        self._placement: Placement
        #: Once there is a place for the call.
        self._channel: Channel | None = None
        #: Generated tokens that the placement has been told of.
        self._told = 0
        #: From entering on.
        self.state: GenerationState

    def __enter__(self) -> Generation:
        """Ask for an engine; `next` begins as soon as there is one."""
        self.state = GenerationState(self._request, self._placer.tokenizer)
        self._placement = self._placer.place(self._request)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._channel is not None:
            self._channel.__exit__(kind, error, trace)
        if self.state.done:
            self._tell_progress()
            self._placement.succeed()
        self._placement.close()
        if error is not None:
            self._observers.failed(error)
        elif self.state.done:
            self._observers.ended(self.state.usage)

    async def next(self, until: float | None = None) -> Update | None:
        """The next update; None when there was none `until` this `time.perf_counter()`.

        Raises:
            DeadlineError: the call took too long.
            EngineLostError: the engine went away.
            OverloadedError: there is too much to do.
            GatewayError: the engine gave the call up.
        """
        while True:
            limit = _earlier(until, self._deadline)
            try:
                if limit is None:
                    event = await self._next_event()
                else:
                    async with asyncio.timeout(limit - time.perf_counter()):
                        event = await self._next_event()
            except TimeoutError:
                if self._deadline is not None and limit == self._deadline:
                    raise DeadlineError(
                        "The call took longer than this gateway allows "
                        "(setting server.call_timeout_s) and was cancelled."
                    ) from None
                return None
            progress = self.state.apply(event)
            if progress.primitives and not self.state.done and self._channel is not None:
                self._channel.submit(*progress.primitives)
                self._begin_further(self._channel)
            if isinstance(event, Filled) or self._told + PROGRESS_INTERVAL_TOKENS <= (
                self.state.usage.completion_tokens
            ):
                self._tell_progress()
            if progress.update is not None:
                return self._observed(progress.update)

    def _observed(self, update: Update) -> Update:
        """Read tool calls and tell observers."""
        if isinstance(update, PromptFilled):
            if self._request.echoes is not None and self._observers:
                self._observe_echo(update.prompt, self._request.echoes[update.prompt])
            return update
        if self._tool_texts:
            text, reason = self._tool_texts[update.choice], update.finish_reason
            pieces = text.push(update.text, ends=reason is not None)
            if reason == "stop" and text.has_calls:
                reason = "tool_calls"
            update = update._replace(pieces=pieces, finish_reason=reason)
        if not self._ranks:
            self._observers.delta(update)
        return update

    def _observe_echo(self, prompt: int, echo: str) -> None:
        for choice in range(self._request.n):
            self._observers.delta(ChoiceDelta(prompt, choice, echo, [], [], None))

    def choose(self, chosen: Iterable[ChoiceDelta]) -> None:
        """Tell observers of the candidates that are answered, where there are more than those.

        Args:
            chosen: each whole, numbered by its rank.
        """
        for delta in chosen:
            self._observers.delta(delta)

    async def _next_event(self) -> Event:
        if self._channel is None:
            placement = self._placement
            engine = await placement.engine()
            self._observers.started(placement.engine_name, placement.queued_s, placement.reason)
            self._channel = self._begin(engine)
        return await self._channel.next()

    def _begin(self, engine: GenerationEngine) -> Channel:
        """Send the call to its engine."""
        self.state.priority = self._placement.priority
        channel = engine.open(
            self.state.contexts_wanted,
            salt=self._request.salt,
            retention=self._placement.retention,
            application=self._placement.application,
        )
        channel.__enter__()
        try:
            channel.submit(*self.state.begin(list(channel.context_ids)))
        except BaseException:
            channel.__exit__(None, None, None)
            raise
        return channel

    def _tell_progress(self) -> None:
        usage = self.state.usage
        self._told = usage.completion_tokens
        self._placement.progress(
            filled=self.state.filled_tokens,
            cached=usage.cached_tokens,
            generated=usage.completion_tokens,
        )

    def _begin_further(self, channel: Channel) -> None:
        """Begin prompts in the place of those that have ended."""
        count = self.state.contexts_wanted
        if not count:
            return
        try:
            context_ids = channel.extend(count)
        except OverloadedError as error:
            if isinstance(error, EngineLostError) or not self.state.waits:
                raise
            # The next event of what is in work brings us back here.
            return
        channel.submit(*self.state.begin(context_ids))


def _earlier(first: float | None, second: float | None) -> float | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)
