"""Hints to an upstream on the urgency of a call; by default there are none."""

from __future__ import annotations

import json

import msgspec
import pytest
from harness.gateway.relaying import relaying
from hypothesis import given
from hypothesis import strategies as st
from parrot_scheduler.task import LATENCY, THROUGHPUT, Objective

from parrot_gateway.backends.upstreams.answer import urgency_of, with_hints
from parrot_gateway.calls.metadata import ORDINARY_CALL, CallMetadata

BODY = b'{"model": "m",  "prompt": "x", "n": 1.0}'
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
WAITING = (LATENCY, Objective("ttft", 1.0), Objective("tpot", 1.0), Objective("deadline", 1.0))


def priority(style: str, metadata: CallMetadata) -> int:
    found = json.loads(with_hints(BODY, style, metadata))  # type: ignore[arg-type]
    assert {**found, "priority": None} == {**json.loads(BODY), "priority": None}
    return int(found.get("priority", 0))


def test_the_stronger_objective_runs_earlier() -> None:
    metadata = [CallMetadata(objective=each) for each in (*WAITING, THROUGHPUT)]
    vllm = [priority("vllm", each) for each in metadata]
    assert vllm == sorted(vllm)
    assert len(set(vllm)) == 5
    # SGLang counts the other way round.
    assert [priority("sglang", each) for each in metadata] == [-value for value in vllm]


@given(
    mine=st.integers(-1000, 1000),
    theirs=st.integers(-1000, 1000),
    one=st.sampled_from([*WAITING, THROUGHPUT]),
    other=st.sampled_from([*WAITING, THROUGHPUT]),
)
def test_the_callers_own_priority_comes_first(
    mine: int, theirs: int, one: Objective, other: Objective
) -> None:
    if mine > theirs:
        first = urgency_of(CallMetadata(objective=one, priority=mine))
        assert first < urgency_of(CallMetadata(objective=other, priority=theirs))


def test_an_ordinary_call_is_left_alone_where_that_says_the_same() -> None:
    assert with_hints(BODY, "vllm", ORDINARY_CALL) is BODY
    assert json.loads(with_hints(BODY, "sglang", ORDINARY_CALL))["priority"] == 0
    assert with_hints(BODY, "none", CallMetadata(objective=THROUGHPUT)) is BODY


@pytest.mark.parametrize(
    "body", [b'{"priority": 7}', b'{"priority": null}', b"[1]", b"nothing", b"", b"\xff"]
)
def test_what_the_caller_sent_stays(body: bytes) -> None:
    for style in ("vllm", "sglang"):
        assert with_hints(body, style, CallMetadata(objective=THROUGHPUT)) is body


def test_other_fields_keep_their_bytes() -> None:
    hinted = with_hints(b'{"a": 1.0e0, "b": "\\u0041"}', "vllm", CallMetadata(objective=THROUGHPUT))
    assert hinted == b'{"a":1.0e0,"b":"\\u0041","priority":4}'


async def test_the_upstream_gets_it_where_it_shall() -> None:
    raw = msgspec.json.encode(CHAT)
    for style, expected in (("none", raw), ("sglang", raw[:-1] + b',"priority":0}')):
        async with relaying(hints=style) as relay:
            await relay.post("/chat/completions", raw, "key=chat")
            await relay.post("/embeddings", raw, "key=other")
            (chat,) = relay.fake.calls("chat")
            (other,) = relay.fake.calls("other")
            assert chat.body == expected
            assert other.body == raw
