"""Messages between an engine and a gateway, and their encoding on the link.

One binary WebSocket frame is one message: a MessagePack array that begins with the message's tag.
Primitives and events travel the same way inside their messages. Decoding is strict: an unknown
tag, a missing or surplus field, or a value of another type is a `WireError`, and its receiver
closes the link. The engine checks the values, such as ranges.

The types of `protocol` stay plain dataclasses, so that an offline engine needs no msgspec; the
structs that it encodes are derived from them here.

    engine -> gateway   Register, Events, Blocks, Heartbeat, Goodbye, Adapters
    gateway -> engine   Registered, Refused, Submit, LoadAdapter, UnloadAdapter
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import attrgetter, or_
from types import GenericAlias
from typing import Any, TypeAlias, cast, get_type_hints

import msgspec

from parrot_engine import protocol
from parrot_engine.text.tokenizer import TextAssets

#: Largest message in bytes. A tokenizer of 250,000 entries takes about 20 MB.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class WireError(ValueError):
    """A message that is malformed, from the wrong side, or too large."""


@dataclass(frozen=True, slots=True)
class Register:
    """The engine's first message: its identity, limits and tokenizer."""

    #: The engine's own name, for operators: `host:pid` unless given.
    name: str
    info: protocol.EngineInfo
    text: TextAssets
    protocol_version: int = protocol.PROTOCOL_VERSION
    #: Adapters that it has loaded.
    adapters: list[protocol.AdapterInfo] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Registered:
    """The gateway's answer to an engine that it takes."""

    engine_id: str
    #: Send a heartbeat this often; three missing ones end the link.
    heartbeat_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The gateway's answer to an engine that it does not take; it then ends the link."""

    reason: str
    #: Whether trying again later can help.
    retry: bool


@dataclass(frozen=True, slots=True)
class Submit:
    """Primitives for the engine, in order."""

    primitives: list[protocol.Primitive]


@dataclass(frozen=True, slots=True)
class Events:
    """The events of one engine step, for all of its contexts."""

    events: list[protocol.Event]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Changes of what the engine can find in its cache; see `BlockChanges`."""

    stored: list[int]
    evicted: list[int]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The engine is alive; its gauges and counters."""

    stats: protocol.EngineStats


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The engine takes no new contexts, finishes those it has, and then leaves."""

    reason: str


@dataclass(frozen=True, slots=True)
class Adapters:
    """The answer to a command: the adapters that the engine has loaded now."""

    adapters: list[protocol.AdapterInfo]
    #: Of the command.
    number: int
    #: Why it was not carried out.
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load an adapter under a name, in the place of one that has it."""

    number: int
    name: str
    #: A folder on the engine's machine.
    path: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Take no new contexts with an adapter."""

    number: int
    name: str


FromEngine: TypeAlias = Register | Events | Blocks | Heartbeat | Goodbye | Adapters
FromGateway: TypeAlias = Registered | Refused | Submit | LoadAdapter | UnloadAdapter
Message: TypeAlias = FromEngine | FromGateway

_PRIMITIVES: tuple[type, ...] = (
    protocol.Fill,
    protocol.Generate,
    protocol.FreeContext,
    protocol.Pool,
)
_EVENTS: tuple[type, ...] = (protocol.Filled, protocol.Generated, protocol.Failed, protocol.Pooled)
_FROM_ENGINE: tuple[type, ...] = (Register, Events, Blocks, Heartbeat, Goodbye, Adapters)
_FROM_GATEWAY: tuple[type, ...] = (Registered, Refused, Submit, LoadAdapter, UnloadAdapter)


#: Tags are positions in a group; messages of the two sides do not overlap.
_TAGS: dict[type, int] = {
    cls: tag
    for group in (_PRIMITIVES, _EVENTS, (*_FROM_ENGINE, *_FROM_GATEWAY))
    for tag, cls in enumerate(group)
}
#: By the struct that msgspec decodes, the class that it mirrors.
_CLASSES: dict[type, type] = {}


def _getter(cls: type) -> Callable[[Any], tuple[Any, ...]]:
    names = [item.name for item in fields(cls)]
    if len(names) == 1:
        only = attrgetter(names[0])
        return lambda value: (only(value),)
    return cast("Callable[[Any], tuple[Any, ...]]", attrgetter(*names))


_FIELDS = {cls: (tag, _getter(cls)) for cls, tag in _TAGS.items()}


def _mirrors(classes: tuple[type, ...], types: dict[type, Any] | None = None) -> Any:
    """The union of a tagged array struct for each class, whose members msgspec can tell apart.

    Fields with defaults stay required: both ends speak the same protocol version, so a short
    array is a mistake and not an older peer.

    Args:
        classes: the dataclasses to mirror.
        types: of the only field of some of them, in place of its annotation.
    """
    structs = []
    for cls in classes:
        hints = get_type_hints(cls)
        struct = msgspec.defstruct(
            f"_{cls.__name__}",
            [(item.name, (types or {}).get(cls, hints[item.name])) for item in fields(cls)],
            array_like=True,
            tag=_TAGS[cls],
            forbid_unknown_fields=True,
        )
        _CLASSES[struct] = cls
        structs.append(struct)
    return reduce(or_, structs)


def _list_of(union: Any) -> Any:
    return GenericAlias(list, (union,))


_encoder = msgspec.msgpack.Encoder()
_engine_decoder = msgspec.msgpack.Decoder(
    _mirrors(_FROM_ENGINE, {Events: _list_of(_mirrors(_EVENTS))})
)
_gateway_decoder = msgspec.msgpack.Decoder(
    _mirrors(_FROM_GATEWAY, {Submit: _list_of(_mirrors(_PRIMITIVES))})
)


def encode(message: Message) -> bytes:
    """One message as bytes.

    Raises:
        WireError: it is larger than `MAX_MESSAGE_BYTES`, or holds a value that has no encoding.
    """
    try:
        data = _encoder.encode(_plain(message))
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"a {type(message).__name__} cannot be encoded: {error}") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"a {type(message).__name__} of {len(data)} bytes is larger than the link's "
            f"limit of {MAX_MESSAGE_BYTES}"
        )
    return data


def decode_from_engine(data: bytes) -> FromEngine:
    """A message that came from an engine.

    Raises:
        WireError: it is malformed, too large, or not one that engines send.
    """
    return cast("FromEngine", _decode(data, _engine_decoder))


def decode_from_gateway(data: bytes) -> FromGateway:
    """A message that came from a gateway.

    Raises:
        WireError: it is malformed, too large, or not one that gateways send.
    """
    return cast("FromGateway", _decode(data, _gateway_decoder))


def _plain(value: Any) -> tuple[Any, ...]:
    tag, get = _FIELDS[type(value)]
    if type(value) is Events:
        return (tag, [_plain(event) for event in value.events])
    if type(value) is Submit:
        return (tag, [_plain(primitive) for primitive in value.primitives])
    return (tag, *get(value))


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}")
    try:
        struct = decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"malformed message: {error}") from error
    values = msgspec.structs.astuple(struct)
    cls = _CLASSES[type(struct)]
    if cls is Events or cls is Submit:
        values = ([_restore(item) for item in values[0]],)
    return cls(*values)


def _restore(struct: Any) -> Any:
    return _CLASSES[type(struct)](*msgspec.structs.astuple(struct))
