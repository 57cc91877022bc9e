"""Where in the program a run of LangChain is begun, and which session that means.

A script calls a batch, and then a model with its results: two runs with nothing around them. They
are one session exactly if both are called by the program itself: from the top level of its main
module, through functions of files in its folder, or from the coroutine that `asyncio.run` was given
there. A server's handlers are called by the server, other threads and tasks by their makers, so
their runs stay apart unless the program says `with session(…)`.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import NamedTuple

#: Packages whose frames stand between a run and the code that called for it; so do those of any
#: installed `langchain_…` package.
_FRAMEWORKS = frozenset(
    {
        "asyncio", "concurrent", "contextlib", "functools", "langchain", "langchain_core",
        "langchain_parrot", "langgraph", "langsmith", "threading",
    }
)  # fmt: skip
#: Folders of installed packages.
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_TOKEN = uuid.uuid4().hex[:8]

_named: ContextVar[str | None] = ContextVar("langchain_parrot_session", default=None)


class Caller(NamedTuple):
    """The code that began a run.

    Attributes:
        place: its function, or at top level its file, and the line; empty if nobody is known.
        is_program: whether the main module's top level got there by the program's own functions.
    """

    place: str
    is_program: bool


NOBODY = Caller("", is_program=False)


@contextmanager
def session(name: str | None = None) -> Iterator[str]:
    """Let all runs that begin inside be one session, unless their configuration names a thread.

    Args:
        name: of the session; None makes one up.

    Yields:
        the name.

    Raises:
        ValueError: the name is empty.
    """
    if name is not None and not name.strip():
        raise ValueError("The name of a session has at least one character.")
    text = name or f"session-{uuid.uuid4()}"
    token = _named.set(text)
    try:
        yield text
    finally:
        _named.reset(token)


def named_session() -> str | None:
    """The name given by the innermost `session` around this."""
    return _named.get()


def program_session() -> str:
    """The session of what the program itself calls: the name of its file, and a unique ending."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return f"{Path(path).stem if path else 'python'}-{os.getpid()}-{_TOKEN}"


def caller_here() -> Caller:
    """Find the code that called for a run that begins here."""
    frame: FrameType | None = sys._getframe(1)
    folder, place = _folder_of_program(), ""
    while frame is not None:
        module, code = str(frame.f_globals.get("__name__", "")), frame.f_code
        is_framework = _is_framework(module, code.co_filename)
        is_own = not is_framework and (module == "__main__" or _is_within(code.co_filename, folder))
        if not is_framework and not place:
            place = _place_of(frame)
        if module == "__main__" and code.co_name == "<module>":
            return Caller(place, is_program=True)
        if not is_own and place:
            if not module.startswith("asyncio."):
                break
            if module == "asyncio.runners" and code.co_name == "run":
                task = frame.f_locals.get("task")
                if task is not None and task is not _current_task():
                    break
        frame = frame.f_back
    return Caller(place, is_program=False)


def _place_of(frame: FrameType) -> str:
    code = frame.f_code
    name = Path(code.co_filename).stem if code.co_name == "<module>" else code.co_name
    return f"{name.strip('<>')}:{frame.f_lineno}"


@functools.lru_cache(maxsize=4096)
def _is_framework(module: str, path: str) -> bool:
    root = module.partition(".")[0]
    return root in _FRAMEWORKS or (root.startswith("langchain_") and _is_installed(Path(path)))


def _is_installed(path: Path) -> bool:
    return not _INSTALLED.isdisjoint(path.parts)


@functools.cache
def _folder_of_program() -> Path | None:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(os.path.abspath(path)).parent if path else None


@functools.lru_cache(maxsize=4096)
def _is_within(path: str, folder: Path | None) -> bool:
    """True if a file is the program's own: below its folder, and not in an environment there."""
    if folder is None:
        return False
    file = Path(os.path.abspath(path))
    return file.is_relative_to(folder) and not _is_installed(file.relative_to(folder))


def _current_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
