"""Named contexts of a session: messages or text so far that the next call continues.

Calls on a context run one at a time, in the order of submission. Each gets the contents of the
context before its own prompt, and adds its prompt and its text when it succeeds; a failed call
changes nothing. `chat<main` forks a context from another one. Only text is kept: the engine finds
its KV by the prompt's prefix (docs/decisions/014).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from parrot_gateway.calls.fifo_lock import FifoLock, LockRequest
from parrot_gateway.calls.requests.call import CallBody, CallKind, CallRequest
from parrot_gateway.calls.requests.types import ChatBody, Message
from parrot_gateway.exceptions import (
    ConflictError,
    ContextNotFoundError,
    ContextTooLargeError,
    InvalidRequestError,
    UnsupportedError,
)
from parrot_gateway.semantic.session import Session, check_name
from parrot_gateway.semantic.variable import size_of

Kind: TypeAlias = Literal["chat", "text"]

_KINDS: dict[CallKind, Kind] = {"chat": "chat", "completions": "text"}
_ROUTES: dict[Kind, str] = {"chat": "/v1/chat/completions", "text": "/v1/completions"}

_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_MESSAGE = msgspec.json.Decoder(Message)


class _Body(msgspec.Struct):
    n: int | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"null")
    echo: bool | None = None
    continue_final_message: bool | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: msgspec.Raw = msgspec.Raw(b"null")


_body_decoder = msgspec.json.Decoder(_Body)


class ContextName(NamedTuple):
    """The value of `X-Parrot-Context`."""

    name: str
    #: The context to fork a new one from.
    parent: str | None = None


def parse_context(text: str, param: str = "context") -> ContextName:
    """Read `chat`, or `chat<main`.

    Raises:
        InvalidRequestError: one cannot be a name, or both are the same.
    """
    name, fork, parent = text.partition("<")
    if not fork:
        return ContextName(check_name(name, param))
    found = ContextName(check_name(name, param), check_name(parent, param))
    if found.name == found.parent or "<" in parent:
        raise InvalidRequestError(
            f"'{text[:80]}' is no context: write 'new<old' to make one from another.",
            param=param,
            code="invalid_value",
        )
    return found


@dataclass(frozen=True, slots=True)
class Contents:
    kind: Kind
    #: Messages of a chat, as JSON.
    messages: tuple[bytes, ...] = ()
    #: Text of completions.
    text: str = ""

    @property
    def size_bytes(self) -> int:
        return size_of(self.text) + sum(map(len, self.messages)) + 64 * len(self.messages)

    def plus(self, other: Contents) -> Contents:
        return Contents(self.kind, self.messages + other.messages, self.text + other.text)

    def before(self, body: CallBody) -> CallBody:
        """Return a typed request with these contents before its prompt."""
        if isinstance(body, ChatBody):
            earlier = [_MESSAGE.decode(message) for message in self.messages]
            return replace(body, messages=earlier + (body.messages or []))
        assert isinstance(body.prompt, str)
        return replace(body, prompt=self.text + body.prompt)

    def written_into(self, fields: Mapping[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
        """Return the fields of a request with these contents as its prompt."""
        if self.kind == "chat":
            return {**fields, "messages": msgspec.Raw(b"[" + b",".join(self.messages) + b"]")}
        return {**fields, "prompt": msgspec.Raw(msgspec.json.encode(self.text))}


@dataclass(slots=True, eq=False)
class NamedContext:
    """One context of a session."""

    name: str
    #: None until a call on the context has succeeded.
    contents: Contents | None = None
    size_bytes: int = 0
    lock: FifoLock = field(default_factory=FifoLock)

    @property
    def is_idle(self) -> bool:
        """Return true if no call uses it or waits for it."""
        return self.lock.is_free


class ContextUse:
    """One call's use of a context, from submission to end. Made by `enter`.

    Args:
        parent: the context to fork from.
    """

    def __init__(
        self, session: Session, context: NamedContext, parent: NamedContext | None, kind: Kind
    ) -> None:
        self.context = context
        self._session = session
        self._parent = parent
        self._kind: Kind = kind
        self._request: LockRequest = context.lock.request(f"context '{context.name}'")
        self._parent_request: LockRequest | None = None
        #: Contents of the parent when its lock was granted.
        self._inherited: Contents | None = None
        self._base: Contents | None = None
        self._prompt: Contents | None = None
        self._parts: list[str] = []
        self._before: Contents | None = None
        self._on_turn: Callable[[], None] = lambda: None
        self._left = False
        try:
            if parent is not None:
                self._parent_request = parent.lock.request(f"context '{parent.name}'")
                self._parent_request.future.add_done_callback(lambda _: self._inherit())
        except BaseException:
            context.lock.release(self._request)
            raise
        self._request.future.add_done_callback(lambda _: self._call())

    @property
    def is_granted(self) -> bool:
        return self._request.is_granted and self._parent_request is None

    def when_turn(self, callback: Callable[[], None]) -> None:
        """Call `callback` when `is_granted` becomes true."""
        self._on_turn = callback

    def compose(self, request: CallRequest) -> CallRequest:
        """Put the contents of the context before the call's prompt.

        Raises:
            ConflictError: the fork exists already, or the context is of the other kind.
            ContextNotFoundError: the parent is empty.
            ContextTooLargeError: over the limit.
        """
        assert self.is_granted
        base = self.context.contents
        if self._parent is not None:
            if base is not None:
                raise _exists(self.context.name)
            if self._inherited is None:
                raise ContextNotFoundError(self._parent.name, self._session.name)
            base = self._inherited
        check_kind(self.context.name, base, self._kind)
        fields = request.fields
        prompt = self._prompt_of(fields)
        whole = prompt if base is None else base.plus(prompt)
        self._check_size(whole)
        self._base, self._prompt = base, prompt
        if base is None:
            return request
        return CallRequest(
            request.kind,
            lambda: msgspec.json.encode(whole.written_into(fields)),
            typed=lambda: base.before(request.typed),
            head=request.semantic_head,
            size=request.size + base.size_bytes,
        )

    def append(self, text: str) -> None:
        self._parts.append(text)

    def commit(self) -> None:
        """Add the prompt and text of a successful call to the context.

        Raises:
            ContextTooLargeError, SessionFullError, OverloadedError: no room; nothing was added.
        """
        assert self._prompt is not None
        text = "".join(self._parts)
        if self._kind == "chat":
            message = msgspec.json.encode({"role": "assistant", "content": text})
            output = Contents("chat", (message,))
        else:
            output = Contents("text", text=text)
        prompt = self._prompt if self._base is None else self._base.plus(self._prompt)
        whole = prompt.plus(output)
        self._check_size(whole)
        self._before = self.context.contents
        _hold(self._session, self.context, whole)

    def undo(self) -> None:
        """Undo `commit`."""
        _hold(self._session, self.context, self._before)

    def leave(self) -> None:
        """End the use: grant the next call, or forget an empty context. Safe to repeat."""
        if self._left:
            return
        self._left = True
        self._on_turn = lambda: None
        if self._parent is not None and self._parent_request is not None:
            self._parent.lock.release(self._parent_request)
        self.context.lock.release(self._request)
        _forget_empty(self._session, self.context)
        if self._parent is not None:
            _forget_empty(self._session, self._parent)

    def _inherit(self) -> None:
        if self._left or self._parent is None or self._parent_request is None:
            return
        self._inherited = self._parent.contents
        request, self._parent_request = self._parent_request, None
        self._parent.lock.release(request)
        self._call()

    def _call(self) -> None:
        if not self._left and self.is_granted:
            self._on_turn()

    def _prompt_of(self, fields: Mapping[str, msgspec.Raw]) -> Contents:
        if self._kind == "chat":
            return Contents("chat", tuple(bytes(raw) for raw in _LIST.decode(fields["messages"])))
        return Contents("text", text=msgspec.json.decode(fields["prompt"], type=str))

    def _check_size(self, contents: Contents) -> None:
        limit = self._session.limits.max_context_bytes
        if contents.size_bytes > limit:
            raise ContextTooLargeError(self.context.name, limit)


def enter(session: Session, name: ContextName, request: CallRequest) -> ContextUse:
    """Enqueue a call on a context, creating it if needed; pair with `ContextUse.leave`.

    Args:
        request: the call, before values are bound.

    Raises:
        UnsupportedError: calls with these fields cannot have a context.
        InvalidRequestError: the prompt is not a single text or list of messages.
        ContextNotFoundError: there is no parent of that name.
        ConflictError: the fork exists already, or the context is of the other kind.
        SessionFullError: the session has too many contexts.
        OverloadedError: too many calls wait for it.
    """
    kind = _KINDS[request.kind]
    _check_body(request.body, kind)
    parent = None
    if name.parent is not None:
        parent = find_context(session, name.parent)
    known = session.contexts.get(name.name)
    context = known if isinstance(known, NamedContext) else NamedContext(name.name)
    if context.is_idle and context.contents is not None:
        if parent is not None:
            raise _exists(context.name)
        check_kind(context.name, context.contents, kind)
    if parent is not None and parent.is_idle:
        check_kind(parent.name, parent.contents, kind)
    if known is None:
        session.keep_context(context.name, context)
    try:
        return ContextUse(session, context, parent, kind)
    except BaseException:
        _forget_empty(session, context)
        raise


def find_context(session: Session, name: str) -> NamedContext:
    """Return the session's context of that name.

    Raises:
        ContextNotFoundError: there is none.
    """
    found = session.contexts.get(name.strip())
    if not isinstance(found, NamedContext):
        raise ContextNotFoundError(name, session.name)
    return found


def free_context(session: Session, name: str) -> NamedContext:
    """Forget a context.

    Raises:
        ContextNotFoundError: there is none.
        ConflictError: a call uses it or waits for it.
    """
    found = find_context(session, name)
    if not found.is_idle:
        raise ConflictError(
            f"Context '{found.name}' is used by a call that has not finished; cancel that call "
            "first.",
            param="context",
            code="context_in_use",
        )
    session.drop_context(found.name)
    _hold(session, found, None)
    return found


def free_all_contexts(session: Session) -> None:
    for name, context in list(session.contexts.items()):
        session.drop_context(name)
        if isinstance(context, NamedContext):
            _hold(session, context, None)


def _check_body(body: bytes, kind: Kind) -> None:
    """Refuse calls whose prompt or answer is more than one text."""
    try:
        call = _body_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # The decoder of the whole body gives better messages.
        raise InvalidRequestError("The JSON body of your request is not valid.") from None
    if call.n not in (None, 1):
        raise _wrong("n", "a call on a context has one answer, so 'n' must be 1")
    if kind == "text" and bytes(call.prompt)[:1] != b'"':
        raise _wrong("prompt", "a call on a context has one prompt, a string")
    if kind == "chat" and bytes(call.messages)[:1] != b"[":
        raise _wrong("messages", "expected an array of messages")
    for name in ("echo", "continue_final_message"):
        if getattr(call, name):
            raise UnsupportedError(
                f"Unsupported parameter: '{name}' does not go with a context.", param=name
            )
    if call.tools and bytes(call.tool_choice) != b'"none"':
        raise UnsupportedError(
            "Unsupported parameter: 'tools' do not go with a context, which keeps text only; send "
            "the messages yourself.",
            param="tools",
        )


def check_kind(name: str, contents: Contents | None, kind: Kind) -> None:
    """Refuse to continue messages as text, or text as messages (`ConflictError`)."""
    if contents is not None and contents.kind != kind:
        raise ConflictError(
            f"Context '{name}' was begun with {_ROUTES[contents.kind]}; go on with that route, or "
            "take another name.",
            param="context",
            code="context_kind",
        )


def _hold(session: Session, context: NamedContext, contents: Contents | None) -> None:
    size = 0 if contents is None else contents.size_bytes
    session.account(size - context.size_bytes)
    context.contents, context.size_bytes = contents, size


def _forget_empty(session: Session, context: NamedContext) -> None:
    is_kept = session.contexts.get(context.name) is context
    if is_kept and context.is_idle and context.contents is None:
        session.drop_context(context.name)


def _exists(name: str) -> ConflictError:
    return ConflictError(
        f"Context '{name}' is there already, so it cannot be made from another one; name it alone "
        "to go on with it, or free it first.",
        param="context",
        code="context_exists",
    )


def _wrong(param: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid '{param}': {what}.", param=param, code="invalid_value")
