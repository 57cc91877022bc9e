"""The place in the program where a LangChain run begins, and its session.

A script may run a batch, and then a model on its results: two runs with nothing around them. They
are one session exactly if the program itself starts both: from its main module's top level, through
functions in files of its folder, or from the coroutine that it gave to `asyncio.run`. A server
calls its handlers itself, and other threads and tasks are started by their makers, so their runs
stay apart unless the program says `with session(…)`.
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

#: Packages whose frames lie between a run and the code that started it; any installed `langchain_…`
#: package counts too.
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
        place: its function, or at top level its file, and the line; empty if unknown.
        is_program: true if only the program's own functions lie between the main module's top
            level and it.
    """

    place: str
    is_program: bool


NOBODY = Caller("", is_program=False)


@contextmanager
def session(name: str | None = None) -> Iterator[str]:
    """Let all runs that begin inside be one session, unless their configuration names a thread.

    Args:
        name: name of the session; None generates one.

    Yields:
        the session's name.

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
    """Return the name given by the innermost `session` around this."""
    return _named.get()


def program_session() -> str:
    """Return the session of the program's own runs: the name of its file with a unique suffix."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return f"{Path(path).stem if path else 'python'}-{os.getpid()}-{_TOKEN}"


def caller_here() -> Caller:
    """Find the code that started a run that begins here."""
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
    """Return true if a file is the program's own: below its folder, and not in an environment
    there.
    """
    if folder is None:
        return False
    file = Path(os.path.abspath(path))
    return file.is_relative_to(folder) and not _is_installed(file.relative_to(folder))


def _current_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
