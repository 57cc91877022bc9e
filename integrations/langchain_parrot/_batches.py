"""Identifies the runs that one `batch`, `abatch` or `…_as_completed` starts.

LangChain gives each input of a batch a run of its own, and tells no callback that they belong
together. So the methods that fan out are wrapped. While one runs, a context variable names the
batch, and the threads and tasks of its inputs inherit it.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from langchain_core.language_models import BaseLLM
from langchain_core.runnables import Runnable, RunnableSequence
from langchain_core.runnables.configurable import DynamicRunnable

from langchain_parrot.program import Caller, caller_here


class Batch(NamedTuple):
    """One call of a batch method.

    Attributes:
        id: its own id.
        outermost: id of the outermost batch around it, possibly its own.
        thread: the conversation of all its inputs, if their configuration names one. Unlike
            other steps, those of a batch do not run within a configuration.
        caller: the code that began the outermost batch.
    """

    id: str
    outermost: str
    thread: str | None
    caller: Caller


def _new_batch(config: Any) -> Batch:
    around = _batch.get()
    identity = str(uuid.uuid4())
    configs = [config] if isinstance(config, dict) else config or ()
    threads = {str((one.get("configurable") or {}).get("thread_id") or "") for one in configs}
    thread = threads.pop() if len(threads) == 1 else ""
    if around is None:
        return Batch(identity, identity, thread or None, caller_here())
    return Batch(identity, around.outermost, thread or around.thread, around.caller)


_batch: ContextVar[Batch | None] = ContextVar("langchain_parrot_batch", default=None)


def current_batch() -> Batch | None:
    """Return the innermost batch that has an input running here."""
    return _batch.get()


@contextmanager
def _fan_out(inputs: Sized, config: Any) -> Iterator[None]:
    if len(inputs) < 2:
        yield
        return
    token = _batch.set(_new_batch(config))
    try:
        yield
    finally:
        _batch.reset(token)


def _wrap(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def batch(self: Any, inputs: Any, config: Any = None, **named: Any) -> Any:
        with _fan_out(inputs, config):
            return method(self, inputs, config, **named)

    return batch


def _wrap_async(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def abatch(self: Any, inputs: Any, config: Any = None, **named: Any) -> Any:
        with _fan_out(inputs, config):
            return await method(self, inputs, config, **named)

    return abatch


def _wrap_as_completed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def batch_as_completed(
        self: Any, inputs: Any, config: Any = None, **named: Any
    ) -> Iterator[Any]:
        results = method(self, inputs, config, **named)
        # All inputs are started before the first result is returned.
        with _fan_out(inputs, config):
            first = next(results, results)
        if first is not results:
            yield first
            yield from results

    return batch_as_completed


def _wrap_async_as_completed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def abatch_as_completed(
        self: Any, inputs: Any, config: Any = None, **named: Any
    ) -> AsyncIterator[Any]:
        results = method(self, inputs, config, **named)
        with _fan_out(inputs, config):
            first = await anext(results, results)
        if first is not results:
            yield first
            async for result in results:
                yield result

    return abatch_as_completed


_WRAPPERS = {
    "batch": _wrap,
    "abatch": _wrap_async,
    "batch_as_completed": _wrap_as_completed,
    "abatch_as_completed": _wrap_async_as_completed,
}
#: Classes that start one run per input; other classes delegate to them.
_CLASSES: tuple[type, ...] = (Runnable, RunnableSequence, DynamicRunnable, BaseLLM)


@functools.cache
def watch_batches() -> None:
    """Wrap the methods, once."""
    for owner in _CLASSES:
        for name, wrap in _WRAPPERS.items():
            if name in vars(owner):
                setattr(owner, name, wrap(vars(owner)[name]))
