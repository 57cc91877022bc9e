"""Callback methods that run at once, in synchronous and in asynchronous chains alike.

LangChain runs a handler's plain method inside an asynchronous chain in a thread, which costs some
0.1 ms for every event of every run, unless the handler is `run_inline`. That attribute has a side
effect: as long as one such handler is there, others that are not get no events of text models that
start in asynchronous chains (langchain issue 39633). A handler of a whole program must not do that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler


class _Done:
    """An awaitable that is done, and no coroutine that has to be run."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


_DONE = _Done()


async def _looks_asynchronous() -> None:
    """Stand in for `inspect.iscoroutinefunction`; never called."""


class Inline(functools.partial[Any]):
    """A method of a handler: acts when it is called, and can be awaited but need not be.

    `inspect.iscoroutinefunction` looks through a partial at its function, so that asynchronous
    chains await what a call returns; synchronous ones look whether it is a coroutine, which it is
    not.
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
    """Let a handler take no time for all events; those that it wants are set afterwards.

    The methods that it inherits would each be called in a thread: for every token of a stream.
    """
    nothing = Inline(_nothing)
    for name in dir(BaseCallbackHandler):
        if name.startswith("on_"):
            setattr(handler, name, nothing)
