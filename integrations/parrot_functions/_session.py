"""Sessions, and texts that may not be written yet: inputs and results of semantic functions.

A session contains variables. A `Text` stands for one of its variables on the server: passing it on
costs nothing and waits for nothing; only reading it does. A call of a function becomes one deferred
completion per output. The names of variables are chosen here, so dependent calls are sent without
waiting for any answer.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, NamedTuple, NoReturn, ParamSpec, Protocol, TypeVar

from parrot_functions._client import DEFAULT_TIMEOUT_S, Client
from parrot_functions._exceptions import (
    ArgumentError,
    DeadlineError,
    DependencyFailedError,
    FunctionsError,
    NotReadyError,
    ProtocolError,
    ServerError,
    SessionError,
)

T = TypeVar("T")
P = ParamSpec("P")

#: Longest wait of the server in one request. Longer waits use several requests, so that many waits
#: share few connections.
MAX_POLL_S = 5.0
#: Time limit of a session's last request, which makes the server forget it, in seconds.
DELETE_TIMEOUT_S = 5.0
#: Extra time for the server itself to report a time-out.
GRACE_S = 5.0
#: Pause between two requests for the same text.
PAUSE_S = 0.02

_current: ContextVar[Session] = ContextVar("parrot_functions.session")


class Text:
    """A text that is written once, by a submitted call or by the program.

    Made by semantic functions and by `Session.variable`. It may be read any number of times from
    any thread.

    Attributes:
        name: name of the variable within its session.
        session: session that owns it.
    """

    def __init__(self, session: Session, name: str, value: str | None = None) -> None:
        self.session = session
        self.name = name
        self._value = value
        self._failure: FunctionsError | None = None
        # The attributes below belong to the client's thread.
        self._id: str | None = None
        #: Set when the server has registered it, or it has failed.
        self._is_registered = asyncio.Event()
        self._has_failed = asyncio.Event()
        #: Requests that the server has not confirmed: its own, and those of its dependencies. If
        #: one is lost, the server waits for a text that no call writes.
        self._unconfirmed = 1
        #: Texts whose calls read this one, until all its requests are confirmed.
        self._dependents: list[Text] = []

    def get(self, timeout: float | None = None, *, objective: str | None = None) -> str:
        """Return the text as soon as it is written.

        Args:
            timeout: in seconds; by default the client's.
            objective: objective of the wait: `latency` (the server's default), `throughput`,
                `ttft=200ms`, `tpot=50ms` or `deadline=2s`.

        Raises:
            DependencyFailedError: the call that writes it failed; the message says why.
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
            # Needed when Ctrl-C ended the wait.
            waiting.cancel()

    async def aget(self, timeout: float | None = None, *, objective: str | None = None) -> str:
        """Return the text in asynchronous programs; `await text` is the same without arguments.

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
        """Return true if the text has been read; sends no request."""
        return self._value is not None

    def __str__(self) -> str:
        """Return the text if it is here.

        Raises:
            NotReadyError: the text is not here; so an f-string never gets a placeholder.
        """
        if self._value is None:
            raise NotReadyError(
                f"'{self.name}' has not been read yet. Await it or call get() first, or pass it "
                "to a semantic function as it is."
            )
        return self._value

    def __eq__(self, other: object) -> bool:
        # Comparison by identity would claim that it differs from every text.
        return str(self) == other if isinstance(other, str) else self is other

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return bool(str(self))

    def __repr__(self) -> str:
        if self._value is not None:
            return f"Text({self.name!r}, {self._value!r})"
        return f"<Text {self.name!r}, {'failed' if self._failure else 'not read yet'}>"

    def _start_fetch(self, timeout: float | None, objective: str | None) -> Future[str]:
        wait_s = self.session.client.timeout if timeout is None else timeout
        deadline = time.monotonic() + wait_s
        return self.session._start(lambda: self._fetch(deadline, objective))

    async def _fetch(self, deadline: float, objective: str | None) -> str:
        """Wait for the value, or for a failure that makes it impossible."""
        reading = asyncio.create_task(self.session._read(self, deadline, objective))
        broken = asyncio.create_task(self._has_failed.wait())
        try:
            await asyncio.wait({reading, broken}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                self.session._unreported.pop(self, None)
                raise self._failure
            self._value = reading.result()
            return self._value
        finally:
            reading.cancel()
            broken.cancel()
            await asyncio.gather(reading, broken, return_exceptions=True)

    def _add_dependent(self, dependent: Text) -> None:
        """Register `dependent`, whose call reads this text and is about to be sent."""
        if self._failure is not None:
            dependent._fail(dependent._failed_with(self, self._failure))
        elif self._unconfirmed:
            self._dependents.append(dependent)
            dependent._unconfirmed += 1

    def _accept(self, variable_id: str) -> None:
        """Note that the server has registered it."""
        self._id = variable_id
        self._is_registered.set()
        confirmed = [self]
        while confirmed:
            text = confirmed.pop()
            text._unconfirmed -= 1
            if text._unconfirmed == 0:
                confirmed += text._dependents
                text._dependents.clear()

    def _fail(self, error: FunctionsError) -> None:
        """Fail it and everything that depends on it."""
        failing: list[tuple[Text, FunctionsError]] = [(self, error)]
        while failing:
            text, why = failing.pop()
            if text._failure is not None:
                continue
            text._failure = why
            text._is_registered.set()
            text._has_failed.set()
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
    """The outputs of one call of a semantic function, in template order and by name.

    `a, b = f()`, `f().a`, `f()["a"]`. A call with one output can be used like that `Text`.
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
        """Return the only output.

        Raises:
            ArgumentError: there are several.
        """
        if len(self._outputs) != 1:
            self._refuse()
        return next(iter(self))

    def get(self, timeout: float | None = None, *, objective: str | None = None) -> str:
        """Return `Text.get` of the only output."""
        return self.only.get(timeout, objective=objective)

    async def aget(self, timeout: float | None = None, *, objective: str | None = None) -> str:
        """Return `Text.aget` of the only output."""
        return await self.only.aget(timeout, objective=objective)

    def __await__(self) -> Generator[object, None, str]:
        return self.only.__await__()

    def __str__(self) -> str:
        return str(self.only)

    def __eq__(self, other: object) -> bool:
        return self.only == other if isinstance(other, str) else self is other

    __hash__ = object.__hash__

    def _refuse(self) -> NoReturn:
        names = ", ".join(f"'{name}'" for name in self._outputs)
        raise ArgumentError(f"'{self._function}' has the outputs {names}: take one of them.")


class Submission(NamedTuple):
    """One deferred call ready to be sent: fields of its body, and the bindings of its inputs."""

    output: Text
    body: dict[str, Any]
    parrot: dict[str, Any]
    inputs: Mapping[str, str | Text]


class _Submittable(Protocol[P]):
    """A semantic function."""

    def submit(self, session: Session, /, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Submit it to a session."""


class Session:
    """One run of an application. Use it in `with` or `async with`.

    Calls of semantic functions inside the block go to it. At the end of the block the server
    forgets an unnamed session, with everything that still runs in it. A named session stays: at the
    end everything has been submitted, and another program can continue with it.

    Args:
        base_url, api_key, model, timeout: as for `Client`, which is made with them.
        name: name of the session, unique per key.
        client: a client to share; it stays open.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        name: str | None = None,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        client: Client | None = None,
    ) -> None:
        if client is not None and (base_url is not None or api_key is not None):
            raise ArgumentError("base_url and api_key are the client's when one is given.")
        self._owns_client = client is None
        self.client = client or Client(base_url, api_key=api_key, timeout=timeout)
        self.is_closed = False
        self.model = model or self.client.model
        self.is_named = name is not None
        self._token = secrets.token_hex(8)
        self.name = name if name is not None else f"functions-{self._token}"
        self._counter = itertools.count(1)
        #: True if the server may know the session.
        self._was_used = False
        self._resets: list[Token[Session]] = []
        # Only for the client's thread.
        self._tasks: set[asyncio.Task[Any]] = set()
        #: Tasks that register variables.
        self._registering: set[asyncio.Task[Any]] = set()
        #: Failures to register a text that no reader has seen yet.
        self._unreported: dict[Text, FunctionsError] = {}

    def __repr__(self) -> str:
        return f"Session({self.name!r}, {self.client!r})"

    def __enter__(self) -> Session:
        self._require_open()
        self._resets.append(_current.set(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave()
        self.close(flush=kind is None)

    async def __aenter__(self) -> Session:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave()
        await self.aclose(flush=kind is None)

    def variable(self, name: str, value: str | None = None) -> Text:
        """Return a variable by its name.

        A value is written now. Without a value, something else in the session writes the variable,
        here or in another program.

        Raises:
            ArgumentError: the name is empty.
        """
        name = name.strip()
        if not name:
            raise ArgumentError("A variable needs a name.")
        text = Text(self, name, value)
        if value is None:
            self._register(text, lambda: self._find(text))
        else:
            self._register(text, lambda: self._write(text, value))
        return text

    def call(self, function: _Submittable[P], *args: P.args, **kwargs: P.kwargs) -> Call:
        """Call a function in this session, whatever the current one is."""
        return function.submit(self, *args, **kwargs)

    def close(self, *, flush: bool = True) -> None:
        """End it like the end of a `with` block; safe to call twice.

        Args:
            flush: for a named session, wait until all calls have been submitted.

        Raises:
            FunctionsError: a call of a named session could not be submitted.
        """
        if not self.is_closed:
            try:
                self._start(lambda: self._end(flush)).result()
            finally:
                self._release()

    async def aclose(self, *, flush: bool = True) -> None:
        """Do the same as `close` in asynchronous programs."""
        if not self.is_closed:
            try:
                await asyncio.wrap_future(self._start(lambda: self._end(flush)))
            finally:
                await asyncio.to_thread(self._release)

    def _leave(self) -> None:
        try:
            _current.reset(self._resets.pop())
        except ValueError:
            # Entered in another context, which has its own variable.
            return

    def _release(self) -> None:
        self.is_closed = True
        if self._owns_client:
            self.client.close()

    def _new_name(self, base: str) -> str:
        """Return a name for an output, unique in the session."""
        number = next(self._counter)
        return f"{base}-{self._token}-{number}" if self.is_named else f"{base}-{number}"

    def _start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run `work`'s coroutine on the client's thread until the session ends."""
        self._require_open()
        return self.client.start(self._run(work))

    def _require_open(self) -> None:
        if self.is_closed:
            raise SessionError(f"Session '{self.name}' is closed.")

    async def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work()
        except asyncio.CancelledError:
            if self.is_closed or self.client.is_closed:
                raise SessionError(f"Session '{self.name}' was closed meanwhile.") from None
            raise
        finally:
            self._tasks.discard(task)

    def _submit(self, submissions: Sequence[Submission]) -> None:
        """Send calls; returns at once."""
        for submission in submissions:
            self._register(submission.output, partial(self._deliver, submission))

    def _register(self, text: Text, work: Callable[[], Coroutine[Any, Any, str]]) -> None:
        """Register a variable through `work`, which returns its id; returns at once."""

        async def register() -> None:
            task = asyncio.current_task()
            assert task is not None
            self._registering.add(task)
            try:
                # NOTE: the session may have been closed before this began.
                self._require_open()
                self._was_used = True
                text._accept(await work())
            except FunctionsError as error:
                self._unreported[text] = error
                text._fail(error)
            except asyncio.CancelledError:
                text._fail(SessionError(f"Session '{self.name}' was closed meanwhile."))
                raise
            finally:
                self._registering.discard(task)

        self._start(register)

    async def _deliver(self, submission: Submission) -> str:
        inputs: dict[str, Any] = {}
        for placeholder, source in submission.inputs.items():
            if isinstance(source, str):
                inputs[placeholder] = {"value": source}
                continue
            source._add_dependent(submission.output)
            inputs[placeholder] = {"variable": await self._name_of(source)}
        if submission.output._failure is not None:
            raise submission.output._failure
        parrot = {
            **submission.parrot,
            "session": self.name,
            "output": submission.output.name,
            "inputs": inputs,
            "defer": True,
        }
        answer = await self.client.request(
            "POST",
            "/completions",
            self._request_deadline(),
            body={**submission.body, "parrot": parrot},
            done_code="output_taken",
        )
        if answer is None:
            return await self._find(submission.output)
        variable_id = answer.headers.get("x-parrot-variable")
        if variable_id is None:
            raise ProtocolError(
                f"{self.client.base_url} does not know deferred calls: is it a Parrot Gateway?"
            )
        return variable_id

    async def _name_of(self, text: Text) -> str:
        """Return a text's name in this session, or its id if it belongs to another one."""
        if text.session is self:
            return text.name
        await text._is_registered.wait()
        return text._id or text.name

    async def _write(self, text: Text, value: str) -> str:
        answer = await self.client.request(
            "POST",
            "/variables",
            self._request_deadline(),
            body={"session": self.name, "name": text.name, "value": value},
            done_code="variable_already_written",
        )
        return await self._find(text) if answer is None else str(answer.body["id"])

    async def _find(self, text: Text) -> str:
        """Return the id of the named variable, creating it empty if needed."""
        deadline = self._request_deadline()
        new = {"session": self.name, "name": text.name}
        try:
            answer = await self.client.request("POST", "/variables", deadline, body=new)
        except ServerError as error:
            # It already has a producer or a value.
            if error.status != 409:
                raise
            answer = await self.client.request(
                "GET", "/variables", deadline, params={"session": self.name}
            )
        assert answer is not None
        for variable in answer.body.get("data", [answer.body]):
            if variable["name"] == text.name:
                return str(variable["id"])
        raise ProtocolError(f"'{text.name}' is not among the variables of session '{self.name}'.")

    async def _read(self, text: Text, deadline: float, objective: str | None) -> str:
        """Ask for the value until it is there."""
        self._require_open()
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await text._is_registered.wait()
        except TimeoutError:
            raise _deadline_error(text) from None
        if text._failure is not None:
            raise text._failure
        left_s = deadline - time.monotonic()
        while True:
            poll_s = max(0.0, min(left_s, MAX_POLL_S))
            params = {"timeout": f"{poll_s:.3f}"}
            if objective is not None:
                params["objective"] = objective
            try:
                answer = await self.client.request(
                    "GET",
                    f"/variables/{text._id}",
                    deadline + GRACE_S,
                    params=params,
                    wait_s=poll_s,
                )
            except DeadlineError:
                raise _deadline_error(text) from None
            assert answer is not None
            if answer.body.get("state") == "ready":
                return str(answer.body["value"])
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise _deadline_error(text)
            # The server may answer without waiting.
            await asyncio.sleep(min(left_s, PAUSE_S))

    def _request_deadline(self) -> float:
        return time.monotonic() + self.client.timeout

    async def _end(self, flush: bool) -> None:
        if flush and self.is_named and self._registering:
            await asyncio.wait(self._registering, timeout=self.client.timeout)
        self.is_closed = True
        left = self._tasks - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if not self.is_named and self._was_used:
            # NOTE: a server that misses this forgets the session by itself.
            with suppress(FunctionsError):
                await self.client.request(
                    "DELETE",
                    f"/sessions/{self.name}",
                    time.monotonic() + DELETE_TIMEOUT_S,
                    retry=False,
                )
        if flush and self.is_named:
            for error in self._unreported.values():
                raise error


def current_session() -> Session:
    """Return the session of the surrounding `with` block.

    Raises:
        SessionError: no session is open; new threads begin without one.
    """
    session = _current.get(None)
    if session is None:
        raise SessionError("No session is open here: use 'with Session(…):', or Session.call.")
    return session


def _deadline_error(text: Text) -> DeadlineError:
    return DeadlineError(f"'{text.name}' was not there in time; it is still being written.")
