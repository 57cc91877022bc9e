"""Steps an engine while a caller waits, and passes its events to handlers.

Knows neither texts nor tokenizers. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, TypeAlias

from parrot_engine.exceptions import EngineStateError, GenerationError
from parrot_engine.protocol import (
    AdapterLoading,
    Engine,
    Event,
    Failed,
    Fill,
    Filled,
    FreeContext,
    Primitive,
    SamplingParams,
)

#: Receives the events of a context. Its exceptions end the step and reach the caller of `step`.
Handler: TypeAlias = Callable[[Event], None]


def raise_failure(event: Event) -> None:
    """Raise `GenerationError` if the event is a failure."""
    if isinstance(event, Failed):
        raise GenerationError(event)


class Session:
    """One engine and the handlers of its contexts' events."""

    def __init__(self, engine: Engine) -> None:
        """Initialise with an engine that only this session drives."""
        self.engine = engine
        self._ids = count(1)
        self._handlers: dict[int, Handler] = {}

    def default_params(self) -> SamplingParams:
        chosen: dict[str, Any] = dict(self.engine.info.default_sampling)
        # Meant for chat answers; here the caller chooses the length.
        chosen.pop("max_new_tokens", None)
        if "top_k" in chosen:
            chosen["top_k"] = int(chosen["top_k"])
        return replace(SamplingParams(), **chosen)

    def adapter_id(self, name: str | None) -> str:
        """Return the id by which contexts name a loaded adapter; empty for None.

        Raises:
            ValueError: there is no such adapter.
        """
        if name is None:
            return ""
        adapters = self.engine.adapters if isinstance(self.engine, AdapterLoading) else []
        for adapter in adapters:
            if adapter.name == name:
                return adapter.id
        raise ValueError(f"no adapter {name!r} is loaded")

    def new_id(self) -> int:
        return next(self._ids)

    def submit(self, handler: Handler, *primitives: Primitive) -> None:
        """Queue primitives; `handler` gets the events of their contexts from now on."""
        for primitive in primitives:
            if not isinstance(primitive, FreeContext):
                self._handlers[primitive.context_id] = handler
        self.engine.submit(primitives)

    def ignore(self, context_id: int) -> None:
        """Drop further events of a context, which continues to exist."""
        self._handlers.pop(context_id, None)

    def free(self, *context_ids: int) -> None:
        """Free contexts and drop their further events."""
        for context_id in context_ids:
            self.ignore(context_id)
        self.engine.submit([FreeContext(context_id) for context_id in context_ids])

    def step(self) -> None:
        """Run one step of the engine and pass its events to handlers.

        Raises:
            EngineStateError: a caller waits for events, but the engine has no work.
            BaseException: raised by a handler; the remaining events are lost.
        """
        result = self.engine.step()
        for event in result.events:
            handler = self._handlers.get(event.context_id)
            if handler is not None:
                handler(event)
        if not result.has_work and not result.events and self._handlers:
            raise EngineStateError("engine", "it has nothing to do, but answers are missing")

    def call(self, fill: Fill) -> Filled:
        """Run a single `Fill` to its end.

        Raises:
            GenerationError: it failed. Its context is then freed, as after an interrupt.
        """
        answer: list[Filled] = []

        def handle(event: Event) -> None:
            raise_failure(event)
            if isinstance(event, Filled):
                answer.append(event)

        self.submit(handle, fill)
        try:
            while not answer:
                self.step()
        except BaseException:
            self.free(fill.context_id)
            raise
        self.ignore(fill.context_id)
        return answer[0]
