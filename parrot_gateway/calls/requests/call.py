"""Bodies of requests, decoded; of a chat or a completion each part once.

`CallRequest` is what the API makes of a request, what the semantic layer binds values into, and
what becomes a `PreparedCall` on an own engine or, as bytes, the body of an upstream's request.
"""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import msgspec

from parrot_gateway.calls.metadata import ServedModel
from parrot_gateway.calls.requests.chat import ChatCall
from parrot_gateway.calls.requests.completions import CompletionCall
from parrot_gateway.calls.requests.field_checks import explain, nested_too_deeply
from parrot_gateway.calls.requests.prepared import PreparedCall
from parrot_gateway.calls.requests.types import ChatBody, CompletionBody, StreamOptions
from parrot_gateway.exceptions import InvalidRequestError, missing_parameter

#: Bodies up to this size are decoded in the event loop: within a millisecond, or some where most of
#: it is small objects.
MAX_INLINE_BYTES = 256 * 1024
#: Seconds of a turn of the event loop after which no further call is prepared in it, and calls that
#: are prepared in each turn while some wait.
_TURN_S = 0.01
_CALLS_A_TURN = 4

CallKind: TypeAlias = Literal["chat", "completions"]
CallBody: TypeAlias = ChatBody | CompletionBody
#: Where a request of a kind is sent to.
PATHS: Mapping[CallKind, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_Body = TypeVar("_Body", bound=msgspec.Struct)
_Result = TypeVar("_Result")
_Value = TypeVar("_Value")

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_VALUE = msgspec.json.Decoder(msgspec.Raw)
# Pairs first, so that only halves without their other half are left.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


class _CollectorPause:
    """Keeps the garbage collector from walking again and again what is being decoded.

    Takes an eighth of the time of a body of millions of small objects, none of them in a cycle.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._was_enabled = True

    def __enter__(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0 and self._was_enabled:
                gc.enable()


_collector_pause = _CollectorPause()


class PreparationTurns:
    """Spreads calls that arrive together over turns of the event loop, first come, first served.

    Each takes milliseconds to decode and tokenize. Prepared all in one turn, the first would reach
    its engine after the last, and streams would stand still meanwhile.
    """

    def __init__(self) -> None:
        self._ends = 0.0
        self._is_counted = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return in a turn that has time for one more call."""
        now = time.perf_counter()
        if not self._is_counted:
            self._begin(now)
        if now < self._ends and not self._waiting:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def _begin(self, now: float) -> None:
        self._is_counted = True
        self._ends = now + _TURN_S
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_counted = False
        if not self._waiting:
            return
        self._begin(time.perf_counter())
        for _ in range(min(_CALLS_A_TURN, len(self._waiting))):
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)


async def in_thread_if_large(
    read: Callable[[], _Result], num_bytes: int, inline_bytes: int = MAX_INLINE_BYTES
) -> _Result:
    """Call `read`, which reads a body of that size, in a thread if the body is large.

    A cancelled wait leaves the thread to finish.
    """
    return read() if num_bytes <= inline_bytes else await asyncio.to_thread(read)


def decode(body: bytes, decoder: msgspec.json.Decoder[_Value]) -> _Value:
    """The body as a typed object. Call it in a thread for more than `MAX_INLINE_BYTES`.

    Raises:
        InvalidRequestError: not JSON, or a field of a wrong type.
    """
    try:
        # NOTE: msgspec does not look into what it skips, such as the names of unknown fields.
        if not body.isascii():
            body.decode()
        if len(body) <= MAX_INLINE_BYTES:
            return decoder.decode(body)
        with _collector_pause:
            return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise explain(str(error), body) from None
    except RecursionError:
        raise nested_too_deeply() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(error) from None


class BodyDecoder(Generic[_Body]):
    """Decodes the bodies of one kind of request, and names the fields that it does not know.

    Args:
        body: their type.
        also: names of further fields, which are read elsewhere.
    """

    def __init__(self, body: type[_Body], also: Iterable[str] = ()) -> None:
        own = [name for name in also if name not in body.__struct_fields__]
        fields = [(name, msgspec.Raw, msgspec.Raw()) for name in own]
        strict = msgspec.defstruct(
            body.__name__, fields, bases=(body,), forbid_unknown_fields=True, kw_only=True
        )
        self._known = frozenset(strict.__struct_fields__)
        self._strict: msgspec.json.Decoder[_Body] = msgspec.json.Decoder(strict)
        self._lenient = msgspec.json.Decoder(body)

    def decode(self, body: bytes) -> tuple[_Body, Sequence[str]]:
        """The body, and the names of its unknown fields.

        Raises:
            InvalidRequestError: as `decode`.
        """
        try:
            # NOTE: most bodies have known fields only, for which this is the whole work.
            return decode(body, self._strict), ()
        except InvalidRequestError as error:
            if error.code != "unknown_parameter":
                raise
        typed = decode(body, self._lenient)
        _, fields = read_object(body)
        return typed, [name for name in fields if name not in self._known]


def read_object(body: bytes) -> tuple[bytes, dict[str, msgspec.Raw]]:
    """The body, with lone surrogates replaced, and its fields, undecoded.

    Raises:
        InvalidRequestError: it is no JSON object or not valid UTF-8.
    """
    return _read_raw(body, _OBJECT)


def read_value(body: bytes) -> tuple[bytes, msgspec.Raw]:
    """The same of any JSON value."""
    return _read_raw(body, _VALUE)


def _read_raw(body: bytes, decoder: msgspec.json.Decoder[_Value]) -> tuple[bytes, _Value]:
    try:
        # NOTE: msgspec does not look into what it leaves raw.
        if not body.isascii():
            body.decode()
        try:
            return body, decoder.decode(body)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            # Some clients send what was cut in two.
            mended = mend_surrogates(body)
            return mended, decoder.decode(mended)
    except msgspec.ValidationError:
        raise explain("", body) from None
    except RecursionError:
        raise nested_too_deeply() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(error) from None


def mend_surrogates(document: bytes) -> bytes:
    """A JSON document with escapes of lone surrogates replaced by that of U+FFFD; linear."""
    return _ESCAPE.sub(lambda match: rb"\ufffd" if match["lone"] else match[0], document)


def _not_json(error: Exception) -> InvalidRequestError:
    reason = "it is not valid UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
    return InvalidRequestError(f"We could not parse the JSON body of your request: {reason}.")


_ABSENT = msgspec.Raw()


class IdentityFields(msgspec.Struct, kw_only=True):
    """The fields of a body that may name a session, undecoded; empty where they are left out."""

    previous_response_id: msgspec.Raw = _ABSENT
    conversation: msgspec.Raw = _ABSENT
    prompt_cache_key: msgspec.Raw = _ABSENT
    metadata: msgspec.Raw = _ABSENT

    @property
    def may_name_session(self) -> bool:
        """Return whether any of them is there."""
        return bool(
            self.previous_response_id or self.conversation or self.prompt_cache_key or self.metadata
        )


class CallHead(IdentityFields):
    """The fields that a call is routed by, and those that may name its session."""

    model: str | None = None
    stream: bool | None = None


class SemanticHead(CallHead):
    """The fields that are read of every call of a session."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    #: Of any type: it is checked where the call runs.
    best_of: Any = None


_HEAD = msgspec.json.Decoder(CallHead)
_SEMANTIC_HEAD = msgspec.json.Decoder(SemanticHead)
#: Fields that are read elsewhere.
_READ_ELSEWHERE = (*IdentityFields.__struct_fields__, "parrot")
_BODIES: Mapping[CallKind, BodyDecoder[Any]] = {
    "chat": BodyDecoder(ChatBody, _READ_ELSEWHERE),
    "completions": BodyDecoder(CompletionBody, _READ_ELSEWHERE),
}


class CallRequest:
    """One request; each part is decoded on first use and kept.

    Args:
        kind: of the call.
        body: JSON, as it came or as it is to be sent; or the function that writes it on first use.
        typed: gives the typed body, where that takes no decoding.
        head: where it is known.
        size: of the JSON in bytes, about; of a `body` that is bytes, their number.
        origin: the request as received, which this was made of.
    """

    __slots__ = (
        "_body", "_fields", "_head", "_ignored", "_origin", "_read_typed", "_semantic_head",
        "_typed", "kind", "size"
    )  # fmt: skip

    def __init__(
        self,
        kind: CallKind,
        body: bytes | Callable[[], bytes],
        *,
        typed: Callable[[], CallBody] | None = None,
        head: CallHead | None = None,
        size: int = 0,
        origin: CallRequest | None = None,
    ) -> None:
        self.kind: CallKind = kind
        self._ignored: Sequence[str] = ()
        self._origin = origin
        self.size = len(body) if isinstance(body, bytes) else size
        self._body = body
        self._fields: dict[str, msgspec.Raw] | None = None
        self._read_typed = typed
        self._typed: CallBody | None = None
        self._head = head
        self._semantic_head = head if isinstance(head, SemanticHead) else None

    @property
    def body(self) -> bytes:
        if not isinstance(self._body, bytes):
            self._body = self._body()
        return self._body

    @property
    def head(self) -> CallHead:
        """Model and stream.

        Raises:
            InvalidRequestError: not a JSON object, or one of these fields is of a wrong type.
        """
        if self._head is None:
            self._head = decode(self.body, _HEAD)
        return self._head

    @property
    def semantic_head(self) -> SemanticHead:
        """The fields that are read of every call of a session.

        Raises:
            InvalidRequestError: as `head`.
        """
        if self._semantic_head is None:
            self._head = self._semantic_head = decode(self.body, _SEMANTIC_HEAD)
        return self._semantic_head

    @property
    def model(self) -> str:
        """The model that it names.

        Raises:
            InvalidRequestError: as `head`, or it names none.
        """
        model = (self._head or self.head).model
        if not model:
            raise missing_parameter("model")
        return model

    @property
    def fields(self) -> dict[str, msgspec.Raw]:
        """The fields of the body, undecoded. From here on `body` has no lone surrogates.

        Raises:
            InvalidRequestError: it is no JSON object.
        """
        if self._fields is None:
            self._body, self._fields = read_object(self.body)
        return self._fields

    @property
    def known_fields(self) -> dict[str, msgspec.Raw]:
        """The same; none of a body that is no JSON object, for which decoding it whole gives a
        better error."""
        try:
            return self.fields
        except InvalidRequestError:
            return {}

    @property
    def typed(self) -> CallBody:
        """The body as own engines read it.

        Raises:
            InvalidRequestError: a field is malformed.
        """
        if self._typed is None:
            if self._read_typed is not None:
                self._typed = self._read_typed()
            else:
                self._typed, self._ignored = _BODIES[self.kind].decode(self.body)
        return self._typed

    @property
    def ignored(self) -> Sequence[str]:
        """Names of fields that mean nothing to own engines; known once `typed` is."""
        return self._ignored if self._origin is None else self._origin.ignored

    def bound(self, template: Template, values: Mapping[str, str]) -> CallRequest:
        """This request with values in it; JSON is written on first use.

        Args:
            template: of this request's body.
            values: by variable id.
        """
        if template.is_unchanged:
            return self
        return CallRequest(
            self.kind,
            lambda: template.render(values),
            typed=lambda: template.bind(self.typed, values),
            head=self.semantic_head,
            size=self.size + sum(map(len, values.values())),
            origin=self,
        )


class Template(Protocol):
    """The places of values in a request."""

    @property
    def is_unchanged(self) -> bool:
        """Return whether the body stays as it came."""
        ...

    def render(self, values: Mapping[str, str]) -> bytes:
        """The body with values, as JSON."""
        ...

    def bind(self, typed: CallBody, values: Mapping[str, str]) -> CallBody:
        """The typed body with values."""
        ...


def prepare(
    request: CallRequest, served: ServedModel, checked: PreparedCall[Any] | None = None
) -> PreparedCall[Any]:
    """Check a request against a model.

    Args:
        checked: what this made of the request before values were bound.

    Raises:
        InvalidRequestError: a field is malformed or out of range, or this model cannot honour it.
    """
    typed, size = request.typed, request.size
    if checked is not None:
        again = checked.rebound(typed, served, size)
        if again is not None:
            return again
    if isinstance(typed, ChatBody):
        return ChatCall(typed, served, size)
    return CompletionCall(typed, served, size)
