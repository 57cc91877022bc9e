"""Deferral inside LlamaIndex's response synthesizers, which only pass texts on.

A synthesizer puts the model's text into the next prompt. So inside `get_response` a call of a model
with `defer=True` answers with a reference, which the gateway replaces in the prompt, and
`get_response` returns the text again. A synthesizer that parses answers defers nothing; nor does a
program whose instrumentation or callbacks others follow, because they must see texts.

Importing this wraps `get_response` and `aget_response` of LlamaIndex's synthesizers, once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from llama_index.core import Settings
from llama_index.core.response_synthesizers import (
    Accumulate,
    CompactAndRefine,
    Refine,
    SimpleSummarize,
    TreeSummarize,
)
from llama_index.core.response_synthesizers.compact_and_accumulate import CompactAndAccumulate
from llama_index.llms.parrot.linking import LinkingSpanHandler
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.event_handlers import NullEventHandler
from llama_index_instrumentation.span_handlers import NullSpanHandler

_SYNTHESIZERS = (
    TreeSummarize,
    Refine,
    CompactAndRefine,
    SimpleSummarize,
    Accumulate,
    CompactAndAccumulate,
)

_runs: ContextVar[bool] = ContextVar("llama_index_parrot_synthesis", default=False)


def passes_texts_on() -> bool:
    """Return true if a call's text goes only into another prompt, or is read later."""
    return _runs.get()


def _may_defer(synthesizer: Any) -> bool:
    return (
        not _runs.get()
        and type(synthesizer) in _SYNTHESIZERS
        and bool(getattr(synthesizer._llm, "defer", False))
        and hasattr(synthesizer._llm, "resolve")
        and getattr(synthesizer, "_output_cls", None) is None
        and not getattr(synthesizer, "_structured_answer_filtering", False)
        and not synthesizer._llm.output_parser
        and not _is_observed(synthesizer)
    )


def _is_observed(synthesizer: Any) -> bool:
    dispatcher = get_dispatcher()
    managers = (synthesizer._callback_manager, synthesizer._llm.callback_manager)
    return (
        any(type(each) is not NullEventHandler for each in dispatcher.event_handlers)
        or any(
            type(each) not in (NullSpanHandler, LinkingSpanHandler)
            for each in dispatcher.span_handlers
        )
        or any(manager.handlers for manager in (*managers, Settings.callback_manager))
    )


@contextmanager
def _running() -> Iterator[None]:
    token = _runs.set(True)
    try:
        yield
    finally:
        _runs.reset(token)


# NOTE: LlamaIndex's spans are descriptors; called as plain functions they do not know their class.


def _wrap(method: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def get_response(self: Any, *arguments: Any, **named: Any) -> Any:
        bound = method.__get__(self, type(self))
        if not _may_defer(self):
            return bound(*arguments, **named)
        with _running():
            response = bound(*arguments, **named)
        # A generator comes from an ordinary call.
        return self._llm.resolve(response) if isinstance(response, str) else response

    return get_response


def _wrap_async(method: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    async def aget_response(self: Any, *arguments: Any, **named: Any) -> Any:
        bound = method.__get__(self, type(self))
        if not _may_defer(self):
            return await bound(*arguments, **named)
        with _running():
            response = await bound(*arguments, **named)
        return await self._llm.aresolve(response) if isinstance(response, str) else response

    return aget_response


@functools.cache
def watch_synthesizers() -> None:
    """Wrap the methods, once."""
    for owner in _SYNTHESIZERS:
        for name, wrap in (("get_response", _wrap), ("aget_response", _wrap_async)):
            if name in vars(owner):
                setattr(owner, name, wrap(vars(owner)[name]))
