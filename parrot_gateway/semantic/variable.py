"""A semantic variable: a named text that is written once and read by many.

    empty ──begin──> running ──set──> ready
      │                 ├──fail────> failed
      │                 └──cancel──> cancelled
      └── set, fail, cancel: the same ends, without a run

Holds the text, its state and who is to be told of changes. Which call writes it, who waits for
it and for how long is decided elsewhere; nothing here waits, reads a clock or knows of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeAlias

from parrot_gateway.exceptions import (
    DependencyFailedError,
    OverloadedError,
    ValueTooLargeError,
    VariableStateError,
)

State: TypeAlias = Literal["empty", "running", "ready", "failed", "cancelled"]

#: From a state to those that may follow it.
TRANSITIONS: dict[State, frozenset[State]] = {
    "empty": frozenset({"running", "ready", "failed", "cancelled"}),
    "running": frozenset({"ready", "failed", "cancelled"}),
    "ready": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}

#: Readers and dependents of one variable that can be told of its changes.
MAX_LISTENERS = 65_536
#: Parts that are kept apart before they are joined: one token is a few bytes, a string is fifty.
_MAX_LOOSE_PARTS = 256
#: Longest message of a failure that is kept.
_MAX_MESSAGE = 2_000


def size_of(text: str) -> int:
    """Bytes of a text in UTF-8; lone surrogates, which some upstreams send, count three."""
    return len(text.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a variable will never have a value.

    `cause` is the failure where it all began. It has no cause of its own, so that a failure that
    travels through a thousand calls stays as small as the first one.
    """

    code: str
    message: str
    #: The variable that was to be written, and the call that was to write it.
    variable_name: str | None = None
    call_id: str | None = None
    cause: Failure | None = None

    def __post_init__(self) -> None:
        if self.cause is not None and self.cause.cause is not None:
            raise ValueError("the cause of a failure is where it began; use passed_on()")

    @property
    def origin(self) -> Failure:
        """The failure where it began."""
        return self.cause if self.cause is not None else self

    def passed_on(self, variable_name: str | None, call_id: str | None) -> Failure:
        """The failure of a call that needed what failed here."""
        return Failure(
            code="dependency_failed",
            message=f"it needs variable '{self.variable_name}': {self.message}"
            if self.cause is None
            else self.message,
            variable_name=variable_name,
            call_id=call_id,
            cause=self.origin,
        )

    def to_error(self, name: str) -> DependencyFailedError:
        """What readers of variable `name`, and calls that need it, are answered."""
        return DependencyFailedError(variable=name, call=self.call_id, cause=self.message)

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        return {
            "code": self.code,
            "message": self.message,
            "variable": self.variable_name,
            "call": self.call_id,
            "cause": self.cause.to_dict() if self.cause is not None else None,
        }


Listener: TypeAlias = Callable[["Variable"], None]


def _unlimited(delta: int) -> None:
    """Accounts for nothing: a variable outside of a session."""


class Variable:
    """One semantic variable.

    Args:
        id: opaque and unguessable; who knows it may read the value within the tenant.
        name: what the application calls it, unique in its session.
        session_id: the session that owns it.
        max_value_bytes: limit of the value in UTF-8.
        account: is told how many bytes the text is about to grow (or shrank, negative), and may
            refuse growth by raising.
    """

    __slots__ = (
        "_account",
        "_chunks",
        "_followers",
        "_length",
        "_loose",
        "_next_listener",
        "_size_bytes",
        "_story",
        "_waiters",
        "consumers",
        "failure",
        "id",
        "max_value_bytes",
        "name",
        "producer",
        "session_id",
        "state",
        "value",
    )

    def __init__(
        self,
        id: str,
        name: str,
        session_id: str,
        *,
        max_value_bytes: int,
        account: Callable[[int], None] = _unlimited,
    ) -> None:
        self.id = id
        self.name = name
        self.session_id = session_id
        self.max_value_bytes = max_value_bytes
        self.state: State = "empty"
        #: The text; None until the variable is ready.
        self.value: str | None = None
        #: Why there will be no value; set when failed or cancelled.
        self.failure: Failure | None = None
        #: Id of the call or transform that writes it; None when the user does, or nobody yet.
        self.producer: str | None = None
        #: Ids of the calls and transforms that read it.
        self.consumers: set[str] = set()
        self._account = account
        self._size_bytes = 0
        #: Text so far while running, in characters: joined runs of parts, then single parts.
        self._length = 0
        self._chunks: list[str] = []
        self._loose: list[str] = []
        #: Those who are told of every change, and those who are told of the last one only.
        self._followers: dict[int, Listener] = {}
        self._waiters: dict[int, Listener] = {}
        self._next_listener = 0
        self._story: list[str] = ["empty"]

    def __repr__(self) -> str:
        return f"<Variable {self.name!r} {self.state} {self._size_bytes} bytes>"

    @property
    def is_final(self) -> bool:
        """Whether nothing will change any more."""
        return not TRANSITIONS[self.state]

    @property
    def story(self) -> tuple[str, ...]:
        """The states it went through, oldest first, with who caused them."""
        return tuple(self._story)

    @property
    def size_bytes(self) -> int:
        """Bytes of text held now."""
        return self._size_bytes

    @property
    def parts(self) -> tuple[str, ...]:
        """Text so far while running, in pieces; empty in every other state."""
        return (*self._chunks, *self._loose)

    @property
    def text(self) -> str:
        """The value when ready, the text so far while running, else nothing."""
        return self.value if self.value is not None else "".join(self.parts)

    def text_after(self, offset: int) -> str:
        """What a reader who has seen `offset` characters has not seen yet."""
        if self.value is not None:
            return self.value[offset:]
        begin, unseen = self._length, []
        for part in chain(reversed(self._loose), reversed(self._chunks)):
            if begin <= offset:
                break
            begin -= len(part)
            unseen.append(part)
        return "".join(reversed(unseen))[max(0, offset - begin) :]

    def begin(self, by: str | None = None) -> None:
        """The producer `by` has started to write.

        Raises:
            VariableStateError: it is not empty.
        """
        self._check("running", "begin")
        self._move("running", by)

    def append(self, text: str) -> None:
        """Add text while running.

        Readers may have passed it on at once: the value must begin with it. A producer whose
        text still goes through a transform appends nothing.

        Raises:
            VariableStateError: it is not running.
            ValueTooLargeError: over the limit; nothing was added.
        """
        if self.state != "running":
            raise VariableStateError(self.name, "be appended to", self._story)
        if not text:
            return
        self._grow(size_of(text))
        self._length += len(text)
        self._loose.append(text)
        if len(self._loose) >= _MAX_LOOSE_PARTS:
            self._chunks.append("".join(self._loose))
            self._loose.clear()
        self._notify()

    def set(self, value: str, by: str | None = None) -> None:
        """Write the value.

        Raises:
            VariableStateError: it was written before, failed or was cancelled; or the value does
                not begin with the text that readers have seen.
            ValueTooLargeError: over the limit; the state is as before.
        """
        self._check("ready", "be set")
        if not value.startswith("".join(self.parts)):
            raise VariableStateError(
                self.name, "be set to something else than was read of it", self._story
            )
        self._grow(size_of(value) - self._size_bytes)
        self.value = value
        self._drop_parts()
        self._move("ready", by)

    def fail(self, failure: Failure) -> None:
        """There will be no value; text so far is dropped.

        Raises:
            VariableStateError: it was written before, failed or was cancelled.
        """
        self._end("failed", failure)

    def cancel(self, failure: Failure | None = None) -> None:
        """There will be no value, because nobody wants it any more.

        Raises:
            VariableStateError: it was written before, failed or was cancelled.
        """
        if failure is None:
            failure = Failure("cancelled", "it was cancelled", self.name, self.producer)
        self._end("cancelled", failure)

    def release(self) -> None:
        """The owner forgets the variable: it no longer counts, and listeners are not told.

        State and value stay for whoever was told of them and is only now about to read.
        """
        self._account(-self._size_bytes)
        self._size_bytes = 0
        self._followers.clear()
        self._waiters.clear()
        self._account = _unlimited

    def subscribe(self, listener: Listener, *, last_only: bool = False) -> Callable[[], None]:
        """Call `listener(variable)` after every change, from within the change.

        A final variable changes no more: look at the state before relying on a call. After the
        last change all listeners are forgotten.

        Args:
            listener: is told.
            last_only: only of the change that makes the variable final: whoever does not read
                the text as it is written costs its writer nothing until then.

        Returns:
            a function that ends it; it may be called any number of times.

        Raises:
            OverloadedError: `MAX_LISTENERS` listen already.
        """
        if self.is_final:
            return lambda: None
        if self.num_listeners >= MAX_LISTENERS:
            raise OverloadedError(
                f"{MAX_LISTENERS} readers wait for variable '{self.name}', which is the limit."
            )
        key = self._next_listener
        self._next_listener += 1
        (self._waiters if last_only else self._followers)[key] = listener
        return lambda: self._unsubscribe(key)

    @property
    def num_listeners(self) -> int:
        """How many are told of changes."""
        return len(self._followers) + len(self._waiters)

    def _unsubscribe(self, key: int) -> None:
        self._followers.pop(key, None)
        self._waiters.pop(key, None)

    def _drop_parts(self) -> None:
        self._chunks.clear()
        self._loose.clear()
        self._length = 0

    def _check(self, to: State, attempt: str) -> None:
        if to not in TRANSITIONS[self.state]:
            raise VariableStateError(self.name, attempt, self._story)

    def _grow(self, delta: int) -> None:
        if self._size_bytes + delta > self.max_value_bytes:
            raise ValueTooLargeError(self.name, self.max_value_bytes)
        self._account(delta)
        self._size_bytes += delta

    def _end(self, state: State, failure: Failure) -> None:
        self._check(state, "fail" if state == "failed" else "be cancelled")
        if len(failure.message) > _MAX_MESSAGE:
            failure = Failure(
                failure.code,
                failure.message[: _MAX_MESSAGE - 1] + "…",
                failure.variable_name,
                failure.call_id,
                failure.cause,
            )
        self.failure = failure
        self._account(-self._size_bytes)
        self._size_bytes = 0
        self._drop_parts()
        self._move(state, failure.call_id)

    def _move(self, to: State, by: str | None) -> None:
        self.state = to
        self._story.append(to if by is None else f"{to} (by {by})")
        self._notify()

    def _notify(self) -> None:
        """Tell everybody; a listener that raises keeps no other from being told."""
        if self.is_final:
            # In the order in which they came.
            self._followers = dict(sorted([*self._followers.items(), *self._waiters.items()]))
            self._waiters.clear()
        elif not self._followers:
            return
        first: Exception | None = None
        for key, listener in list(self._followers.items()):
            # A listener may end other subscriptions, or change the variable once more, upon
            # which those that were not told yet have heard of it already.
            if key not in self._followers:
                continue
            if self.is_final:
                del self._followers[key]
            try:
                listener(self)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
