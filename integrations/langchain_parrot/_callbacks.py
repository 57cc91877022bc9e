"""Callback methods that run at once, in synchronous and in asynchronous chains alike.

LangChain runs a plain handler method of an asynchronous chain in a thread, unless the handler is
`run_inline`. That costs some 0.1 ms per event and run. The attribute `run_inline` has a side
effect: while such a handler exists, other handlers get no events of text models that start in
asynchronous chains (langchain issue 39633). A handler for a whole program must avoid that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler


class _Done:
    """A finished awaitable, which unlike a coroutine need not be run."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


_DONE = _Done()


async def _looks_asynchronous() -> None:
    """Stand-in for `inspect.iscoroutinefunction`; never called."""


class Inline(functools.partial[Any]):
    """A handler method that acts when called, and may but need not be awaited.

    `inspect.iscoroutinefunction` looks through a partial at its function, so asynchronous chains
    await the result of a call. Synchronous chains check the result itself, which is no coroutine.
    """

    act: Callable[..., None]

    def __new__(cls, act: Callable[..., None]) -> Inline:
        made = super().__new__(cls, _looks_asynchronous)
        made.act = act
        return made

    def __call__(self, /, *arguments: Any, **named: Any) -> _Done:
        self.act(*arguments, **named)
        return _DONE


def _nothing(*_: Any, **__: Any) -> None:
    pass


def ignore_events(handler: BaseCallbackHandler) -> None:
    """Give a handler cheap methods for all events; the wanted ones are set afterwards.

    Each inherited method would be called in a thread, for every token of a stream.
    """
    nothing = Inline(_nothing)
    for name in dir(BaseCallbackHandler):
        if name.startswith("on_"):
            setattr(handler, name, nothing)
