"""A semantic variable: a named text that is written once and read by many.

    empty ──begin──> running ──set──> ready
      │                 ├──fail────> failed
      │                 └──cancel──> cancelled
      └── set, fail, cancel: the same ends, without a run

Holds text, state and listeners; nothing here waits or reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal, TypeAlias

from parrot_gateway.exceptions import (
    DependencyFailedError,
    OverloadedError,
    ValueTooLargeError,
    VariableStateError,
)

State: TypeAlias = Literal["empty", "running", "ready", "failed", "cancelled"]

#: The states that may follow each state.
TRANSITIONS: dict[State, frozenset[State]] = {
    "empty": frozenset({"running", "ready", "failed", "cancelled"}),
    "running": frozenset({"ready", "failed", "cancelled"}),
    "ready": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}

#: Maximum listeners of one variable.
MAX_LISTENERS = 65_536
#: Parts kept before they are joined: a token has a few bytes, and a `str` fifty bytes of overhead.
_MAX_LOOSE_PARTS = 256
#: Maximum characters of a failure's message.
_MAX_MESSAGE = 2_000


def size_of(text: str) -> int:
    """Return the bytes of a text in UTF-8; a lone surrogate, which some upstreams send, counts
    three.
    """
    return len(text.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a variable will never have a value.

    `cause` is the first failure of the chain, and has no cause itself. So a failure that propagates
    through a thousand calls stays as small as the first one.
    """

    code: str
    message: str
    #: The variable that should have been written, and the call that should have written it.
    variable_name: str | None = None
    call_id: str | None = None
    cause: Failure | None = None

    def __post_init__(self) -> None:
        if self.cause is not None and self.cause.cause is not None:
            raise ValueError("the cause of a failure is where it began; use passed_on()")

    @property
    def origin(self) -> Failure:
        """Return the first failure of the chain."""
        return self.cause or self

    def passed_on(self, variable_name: str | None, call_id: str | None) -> Failure:
        """Return the failure of a call that needed this failed variable."""
        message = self.message
        if self.cause is None:
            message = f"it needs variable '{self.variable_name}': {message}"
        return Failure("dependency_failed", message, variable_name, call_id, self.origin)

    def to_error(self, name: str) -> DependencyFailedError:
        """Return the error for readers of variable `name`, and for calls that need it."""
        return DependencyFailedError(variable=name, call=self.call_id, cause=self.message)

    def to_dict(self) -> dict[str, object]:
        return {
            "code": self.code,
            "message": self.message,
            "variable": self.variable_name,
            "call": self.call_id,
            "cause": self.cause.to_dict() if self.cause is not None else None,
        }


Listener: TypeAlias = Callable[["Variable"], None]


def _unlimited(delta: int) -> None:
    """Account for nothing: used by a variable outside a session."""


@dataclass(slots=True, eq=False, repr=False)
class Variable:
    """One semantic variable."""

    #: Opaque and unguessable; within the tenant, knowing it is enough to read the value.
    id: str
    #: Unique in its session.
    name: str
    session_id: str
    #: Maximum bytes of the value in UTF-8.
    max_value_bytes: int = field(kw_only=True)
    #: Called with the bytes by which the text is about to grow (negative: shrank); may refuse
    #: growth by raising.
    account: Callable[[int], None] = field(default=_unlimited, kw_only=True)
    state: State = field(default="empty", init=False)
    #: The text; None until the variable is ready.
    value: str | None = field(default=None, init=False)
    #: Set if failed or cancelled.
    failure: Failure | None = field(default=None, init=False)
    #: Id of the call or transform that writes it; None if the user writes it, or nobody yet.
    producer: str | None = field(default=None, init=False)
    #: Ids of the calls and transforms that read it.
    consumers: set[str] = field(default_factory=set, init=False)
    #: Bytes of text held now.
    size_bytes: int = field(default=0, init=False)
    #: Text so far while running: its length, joined chunks, then single parts.
    _length: int = field(default=0, init=False)
    _chunks: list[str] = field(default_factory=list, init=False)
    _loose: list[str] = field(default_factory=list, init=False)
    #: Listeners of every change, and listeners of the last one only.
    _followers: dict[int, Listener] = field(default_factory=dict, init=False)
    _waiters: dict[int, Listener] = field(default_factory=dict, init=False)
    _next_listener: int = field(default=0, init=False)
    _story: list[str] = field(default_factory=lambda: ["empty"], init=False)

    def __repr__(self) -> str:
        return f"<Variable {self.name!r} {self.state} {self.size_bytes} bytes>"

    @property
    def is_final(self) -> bool:
        return not TRANSITIONS[self.state]

    @property
    def story(self) -> tuple[str, ...]:
        """Return the states it went through, oldest first, with their causes."""
        return tuple(self._story)

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the text so far while running, in pieces; empty in every other state."""
        return (*self._chunks, *self._loose)

    @property
    def text(self) -> str:
        """Return the value if ready, the text so far while running, otherwise ""."""
        return self.value if self.value is not None else "".join(self.parts)

    def text_after(self, offset: int) -> str:
        """Return the text (`text`) from character `offset` on."""
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
        """Note that the call `by` has started to write.

        Raises:
            VariableStateError: it is not empty.
        """
        self._check("running", "begin")
        self._move("running", by)

    def append(self, text: str) -> None:
        """Add text while running. The final value must begin with it, as readers may have passed it
        on.

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
            VariableStateError: it is final, or the value does not begin with the appended text.
            ValueTooLargeError: over the limit; the state is as before.
        """
        self._check("ready", "be set")
        if not value.startswith("".join(self.parts)):
            raise VariableStateError(
                self.name, "be set to something else than was read of it", self._story
            )
        self._grow(size_of(value) - self.size_bytes)
        self.value = value
        self._drop_parts()
        self._move("ready", by)

    def fail(self, failure: Failure) -> None:
        """End without a value; the text so far is dropped.

        Raises:
            VariableStateError: it is final.
        """
        self._end("failed", failure)

    def cancel(self, failure: Failure | None = None) -> None:
        """End like `fail`, because the value is no longer needed."""
        if failure is None:
            failure = Failure("cancelled", "it was cancelled", self.name, self.producer)
        self._end("cancelled", failure)

    def release(self) -> None:
        """Stop accounting for a final variable that its session drops.

        Listeners that were called may still read its state and value.
        """
        self.account(-self.size_bytes)
        self.size_bytes = 0
        self.account = _unlimited

    def subscribe(self, listener: Listener, *, last_only: bool = False) -> Callable[[], None]:
        """Call `listener(variable)` after every change, from within the change.

        A final variable never calls listeners; all are dropped after the last change.

        Args:
            last_only: call it only for the change that makes the variable final.

        Returns:
            a function that ends the subscription; it may be called any number of times.

        Raises:
            OverloadedError: it has `MAX_LISTENERS` listeners already.
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
        if self.size_bytes + delta > self.max_value_bytes:
            raise ValueTooLargeError(self.name, self.max_value_bytes)
        self.account(delta)
        self.size_bytes += delta

    def _end(self, state: State, failure: Failure) -> None:
        self._check(state, "fail" if state == "failed" else "be cancelled")
        if len(failure.message) > _MAX_MESSAGE:
            failure = replace(failure, message=failure.message[: _MAX_MESSAGE - 1] + "…")
        self.failure = failure
        self.account(-self.size_bytes)
        self.size_bytes = 0
        self._drop_parts()
        self._move(state, failure.call_id)

    def _move(self, to: State, by: str | None) -> None:
        self.state = to
        self._story.append(to if by is None else f"{to} (by {by})")
        self._notify()

    def _notify(self) -> None:
        """Call all listeners, then raise the first error among theirs."""
        if self.is_final:
            # In order of subscription.
            self._followers = dict(sorted([*self._followers.items(), *self._waiters.items()]))
            self._waiters.clear()
        elif not self._followers:
            return
        first: Exception | None = None
        for key, listener in list(self._followers.items()):
            # A listener may end other subscriptions, or change the variable again, which calls the
            # remaining listeners.
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
