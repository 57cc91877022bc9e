"""Texts that may not be written yet: what semantic functions give and take.

A `Text` stands for one variable of a session on the server. Passing it on costs nothing and waits
for nothing; only reading it does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn

from parrot_functions._exceptions import (
    ArgumentError,
    DependencyFailedError,
    FunctionsError,
    NotReadyError,
)

if TYPE_CHECKING:
    from parrot_functions._session import Session


class Text:
    """A text that is written once: by a call that was submitted, or by the program.

    Made by semantic functions and by `Session.variable`. May be read any number of times, from
    any thread.

    Attributes:
        name: of the variable, within its session.
        session: that owns it.
    """

    def __init__(self, session: Session, name: str, value: str | None = None) -> None:
        self.session = session
        self.name = name
        self._value = value
        self._failure: FunctionsError | None = None
        # The rest is for the client's thread only.
        self._id: str | None = None
        #: Set when the server has taken it in, or it failed.
        self._is_known = asyncio.Event()
        self._is_broken = asyncio.Event()
        #: Requests that the server has not confirmed: its own, and those of what it depends on.
        #: Without one of them the server would wait for a text that nobody writes.
        self._unsettled = 1
        #: Texts whose calls read this one, until it is settled.
        self._dependents: list[Text] = []

    def get(self, timeout: float | None = None, *, objective: str | None = None) -> str:
        """The text, as soon as it is written.

        Args:
            timeout: in seconds; the client's when left out.
            objective: what it is waited for: `latency` (the server's default), `throughput`,
                `ttft=200ms`, `tpot=50ms` or `deadline=2s`.

        Raises:
            DependencyFailedError: the call that was to write it failed; tells why.
            DeadlineError: it was not there in time; it is still being written.
            SessionError: its session was closed before it was read.
            ServerError, UnreachableError: the call could not be submitted, or the text not read.
        """
        if self._value is not None:
            return self._value
        waiting = self._start_fetch(timeout, objective)
        try:
            return waiting.result()
        finally:
            # Of use when Ctrl-C ended the wait.
            waiting.cancel()

    async def aget(self, timeout: float | None = None, *, objective: str | None = None) -> str:
        """`get` for asynchronous programs; `await text` is the same without arguments.

        Cancelling it ends the wait; the text is still being written.
        """
        if self._value is not None:
            return self._value
        waiting = self._start_fetch(timeout, objective)
        return await asyncio.wrap_future(waiting)

    def __await__(self) -> Generator[object, None, str]:
        return self.aget().__await__()

    @property
    def is_ready(self) -> bool:
        """Whether the text is here. Asks nobody: written on the server is not yet here."""
        return self._value is not None

    def __str__(self) -> str:
        """The text, if it is here.

        Raises:
            NotReadyError: it is not; an f-string never gets half a promise.
        """
        if self._value is None:
            raise NotReadyError(
                f"'{self.name}' has not been read yet. Await it or call get() first, or pass it "
                "to a semantic function as it is."
            )
        return self._value

    def __repr__(self) -> str:
        if self._value is not None:
            return f"Text({self.name!r}, {self._value!r})"
        return f"<Text {self.name!r}, {'failed' if self._failure else 'not read yet'}>"

    def _start_fetch(self, timeout: float | None, objective: str | None) -> Future[str]:
        wait_s = self.session.client.timeout if timeout is None else timeout
        deadline = time.monotonic() + wait_s
        return self.session._start(lambda: self._fetch(deadline, objective))

    async def _fetch(self, deadline: float, objective: str | None) -> str:
        """Wait for the value, or for news that it will never come."""
        reading = asyncio.create_task(self.session._read(self, deadline, objective))
        broken = asyncio.create_task(self._is_broken.wait())
        try:
            await asyncio.wait({reading, broken}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                self.session._untold.pop(self, None)
                raise self._failure
            self._value = reading.result()
            return self._value
        finally:
            reading.cancel()
            broken.cancel()
            await asyncio.gather(reading, broken, return_exceptions=True)

    def _add_dependent(self, dependent: Text) -> None:
        """The call that writes `dependent` is about to be sent, and reads this one."""
        if self._failure is not None:
            dependent._fail(dependent._failed_with(self, self._failure))
        elif self._unsettled:
            self._dependents.append(dependent)
            dependent._unsettled += 1

    def _accept(self, variable_id: str) -> None:
        """The server has taken it in."""
        self._id = variable_id
        self._is_known.set()
        settling = [self]
        while settling:
            text = settling.pop()
            text._unsettled -= 1
            if text._unsettled == 0:
                settling += text._dependents
                text._dependents.clear()

    def _fail(self, error: FunctionsError) -> None:
        """It will never be written; nor will what depends on it."""
        failing: list[tuple[Text, FunctionsError]] = [(self, error)]
        while failing:
            text, why = failing.pop()
            if text._failure is not None:
                continue
            text._failure = why
            text._is_known.set()
            text._is_broken.set()
            failing += [(other, other._failed_with(text, why)) for other in text._dependents]
            text._dependents.clear()

    def _failed_with(self, source: Text, why: FunctionsError) -> DependencyFailedError:
        error = DependencyFailedError(
            424,
            {
                "message": f"'{self.name}' reads '{source.name}', which has no value: {why}",
                "type": "invalid_request_error",
                "param": "inputs",
                "code": "dependency_failed",
            },
        )
        error.__cause__ = why
        return error


class Call:
    """What a semantic function gives: its outputs, in the order of its template and by name.

    `a, b = f()`, `f().a`, `f()["a"]`. With one output it can be used like that `Text`.
    """

    def __init__(self, function: str, outputs: Mapping[str, Text]) -> None:
        self._function = function
        self._outputs = dict(outputs)

    def __getattr__(self, name: str) -> Text:
        try:
            return self._outputs[name]
        except KeyError:
            raise AttributeError(f"'{self._function}' has no output '{name}'") from None

    def __getitem__(self, name: str) -> Text:
        return self._outputs[name]

    def __iter__(self) -> Iterator[Text]:
        return iter(self._outputs.values())

    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        return f"Call({self._function}: {', '.join(map(repr, self))})"

    @property
    def only(self) -> Text:
        """The output.

        Raises:
            ArgumentError: there are several.
        """
        if len(self._outputs) != 1:
            self._refuse()
        return next(iter(self))

    def get(self, timeout: float | None = None, *, objective: str | None = None) -> str:
        """`Text.get` of the only output."""
        return self.only.get(timeout, objective=objective)

    async def aget(self, timeout: float | None = None, *, objective: str | None = None) -> str:
        """`Text.aget` of the only output."""
        return await self.only.aget(timeout, objective=objective)

    def __await__(self) -> Generator[object, None, str]:
        return self.only.__await__()

    def __str__(self) -> str:
        return str(self.only)

    def _refuse(self) -> NoReturn:
        names = ", ".join(f"'{name}'" for name in self._outputs)
        raise ArgumentError(f"'{self._function}' has the outputs {names}: take one of them.")
