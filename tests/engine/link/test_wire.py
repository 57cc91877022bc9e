"""The link's messages survive the journey, and nothing else gets through."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parrot_engine import protocol
from parrot_engine.link import wire
from parrot_engine.link.wire import (
    Blocks,
    Events,
    Goodbye,
    Heartbeat,
    Refused,
    Register,
    Registered,
    Submit,
    WireError,
    decode_from_engine,
    decode_from_gateway,
    encode,
)
from parrot_engine.text import TextAssets


def instances(cls: type) -> st.SearchStrategy[Any]:
    """Values of a dataclass, from its annotations, that can be encoded and compared."""
    return st.from_type(cls).filter(lambda value: all(map(is_plain, leaves(value))))


def is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isnan(value)
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        inner: Any = value
    elif isinstance(value, dict):
        inner = [*value, *value.values()]
    elif is_dataclass(value):
        inner = [getattr(value, item.name) for item in fields(value)]
    else:
        yield value
        return
    for item in inner:
        yield from leaves(item)


PRIMITIVES = st.one_of(*map(instances, (protocol.Fill, protocol.Generate, protocol.FreeContext)))
EVENTS = st.one_of(*map(instances, (protocol.Filled, protocol.Generated, protocol.Failed)))
FROM_ENGINE = st.one_of(
    instances(Register),
    instances(Heartbeat),
    instances(Blocks),
    instances(Goodbye),
    st.builds(Events, st.lists(EVENTS)),
)
FROM_GATEWAY = st.one_of(
    instances(Registered), instances(Refused), st.builds(Submit, st.lists(PRIMITIVES))
)


@given(FROM_ENGINE)
def test_from_engine_round_trip(message: Any) -> None:
    data = encode(message)
    assert decode_from_engine(data) == message
    with pytest.raises(WireError):
        decode_from_gateway(data)


@given(FROM_GATEWAY)
def test_from_gateway_round_trip(message: Any) -> None:
    data = encode(message)
    assert decode_from_gateway(data) == message
    with pytest.raises(WireError):
        decode_from_engine(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_wire_error(data: bytes) -> None:
    for decode in (decode_from_engine, decode_from_gateway):
        try:
            message = decode(data)
        except WireError:
            continue
        assert decode(encode(message)) == message or not all(map(is_plain, leaves(message)))


@given(FROM_ENGINE, st.data())
def test_a_damaged_message_never_raises_anything_else(message: Any, data: st.DataObject) -> None:
    raw = bytearray(encode(message))
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        decode_from_engine(bytes(raw))


SAMPLING = {"max_tokens": 4}


@pytest.mark.parametrize(
    "array",
    [
        [],
        [99],
        [0, "name"],
        [7],
        [8, [[7, 1]]],
        [8, [[2, 1, 2]]],
        [8, [[2, 1, "later"]]],
        [8, [[2, 1, "drop", 2]]],
        [8, [[2]]],
        [8, [[2, "1", "drop"]]],
        [8, [[2, 1.5, "drop"]]],
        [8, [[0, 1, [1, None], None, "", None, 0, False]]],
        [8, [[1, 1, {"max_tokens": "4"}, None, 0, 0]]],
        [8, [[1, 1, {"max_tokens": 4}, None, 0]]],
        [6, "engine", 2.0, "surplus"],
        {"type": "Submit"},
    ],
)
def test_malformed_arrays_are_refused(array: Any) -> None:
    data = msgspec.msgpack.encode(array)
    with pytest.raises(WireError):
        decode_from_gateway(data)
    with pytest.raises(WireError):
        decode_from_engine(data)


def test_the_malformed_arrays_are_nearly_right() -> None:
    """The control for the test above: the same tags with right fields pass."""
    for array in ([8, [[2, 1, "drop"]]], [8, [[1, 1, SAMPLING, None, 0, 0]]], [6, "engine", 2.0],
                  [8, [[0, 1, [1], None, "", None, 0, False, ""]]]):  # fmt: skip
        decode_from_gateway(msgspec.msgpack.encode(array))


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(WireError):
        decode_from_engine(encode(Goodbye("bye")) + b"\x00")


def test_sizes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(WireError, match="larger"):
        encode(Goodbye("x" * 200))
    with pytest.raises(WireError, match="larger"):
        decode_from_engine(b"x" * 200)


def test_values_without_encoding_are_wire_errors() -> None:
    with pytest.raises(WireError, match="Submit"):
        encode(Submit([protocol.FreeContext(2**70)]))


def test_a_step_of_many_contexts_is_small() -> None:
    events = Events([protocol.Generated(context_id, [50_000]) for context_id in range(1000, 1064)])
    assert len(encode(events)) < 64 * 16


def test_everything_filled_in() -> None:
    sampling = protocol.SamplingParams(
        logit_bias={7: -100.0}, stop_token_ids=(1, 2), stop=("\n",), seed=3
    )
    logprobs = [protocol.TokenLogprobs(1, -0.5, [(1, -0.5), (2, -1.0)]), None]
    submit = Submit(
        [protocol.Fill(1, [1, 2], 0, "tenant", 2, -1, True), protocol.Generate(1, sampling)]
    )
    events = Events(
        [protocol.Filled(1, 2, 0, logprobs), protocol.Generated(1, [3], logprobs[:1], "stop")]
    )  # type: ignore[arg-type]
    info = protocol.EngineInfo("m", "builtin", "A", "cpu", "float32", 10, 20, [2])
    register = Register("e", info, TextAssets("{}", {"default": "x"}, {"eos_token": "</s>"}))
    assert decode_from_gateway(encode(submit)) == submit
    assert decode_from_engine(encode(events)) == events
    assert decode_from_engine(encode(register)) == register
    assert decode_from_engine(encode(Heartbeat(protocol.EngineStats(running=1)))).stats.running == 1  # type: ignore[union-attr]


def test_statistics_that_only_one_end_knows_are_no_mistake() -> None:
    tag, stats = msgspec.msgpack.decode(encode(Heartbeat(protocol.EngineStats(steps=3))))
    del stats["read_once_tokens"]
    stats["of_a_later_version"] = 7
    found = decode_from_engine(msgspec.msgpack.encode([tag, stats]))
    assert isinstance(found, Heartbeat)
    assert (found.stats.steps, found.stats.read_once_tokens) == (3, 0)
