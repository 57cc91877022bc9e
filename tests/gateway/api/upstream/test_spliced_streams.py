"""A stream that is cut after any byte, and its rest: one answer, whoever goes on and how."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from harness.continuing_server import PROMPT, TEXT, ContinuingServer, Takes
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot_gateway.api.openai.rest_of_stream import RestOfStream
from parrot_gateway.api.upstream.event_guard import EventGuard
from parrot_gateway.api.upstream.event_tail import EventTail
from parrot_gateway.backends.upstreams.answer import UpstreamAnswerReader
from parrot_gateway.backends.upstreams.continuation import (
    ContinuationStyle,
    ContinuedAnswer,
    PartialAnswer,
)
from parrot_gateway.calls.observer import GenerationObserver
from parrot_gateway.calls.requests.call import CallKind, CallRequest

OPTIONS = {"stream": True, "stream_options": {"include_usage": True}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "?"}], **OPTIONS}
COMPLETION = {"model": "m", "prompt": PROMPT, "max_tokens": 99, **OPTIONS}
NOBODY = GenerationObserver()


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def spliced(
    body: dict[str, Any], breaks: list[int], takes: Takes, trims: bool, chunks: list[int]
) -> bytes:
    """The bytes that a client gets of streams that break off one after the other.

    Args:
        breaks: bytes of each server's stream that come; the one behind the last writes to the end.
        chunks: where each stream is cut into chunks.
    """
    kind: CallKind = "chat" if "messages" in body else "completions"
    request = CallRequest(kind, msgspec.json.encode(body))
    style: ContinuationStyle = "prefill" if takes == "refuse" else takes
    servers = [ContinuingServer(takes, trims, port=port) for port in range(len(breaks) + 1)]
    partial = PartialAnswer(request)
    guard = EventGuard(EventTail("chat"), partial, NOBODY)
    got = b""
    for chunk in pieces(b"".join(servers[0].events(body))[: breaks[0]], chunks):
        got += guard.feed(chunk)
    if guard.is_done:
        return got
    partial.broke_off(guard.reader.usage)
    rest = RestOfStream(request, guard.sample, "call_1", ["0"])
    for server, end in zip(servers[1:], [*breaks[1:], None], strict=True):
        if partial.is_complete:
            break
        assert partial.obstacle() is None
        following = partial.continuation(style)
        stream = b"".join(server.events(json.loads(following.request.body)))[:end]
        reader = UpstreamAnswerReader(ContinuedAnswer(partial, following.seam, rest, str))
        reader.start(200, b"text/event-stream")
        for chunk in pieces(stream, chunks):
            reader.feed(chunk)
        if reader.is_finished:
            reader.end()
            return got + rest.take()
        partial.broke_off(reader.usage)
    rest.ended(partial.usage)
    return got + rest.take()


def check(answer: bytes) -> None:
    """One answer with the whole text."""
    *events, last, empty = answer.split(b"\n\n")
    assert (last, empty) == (b"data: [DONE]", b"")
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    for name in ("id", "created", "model", "object"):
        assert len({chunk[name] for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [
        each["delta"].get("content", "") if "delta" in each else each["text"] for each in choices
    ]
    assert "".join(texts) == TEXT
    assert [each["finish_reason"] for each in choices].count("stop") == 1
    assert sum("role" in each.get("delta", {}) for each in choices) == ("delta" in choices[0])
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert len(usages) <= 1
    for usage in usages:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


WAYS: list[tuple[dict[str, Any], Takes, bool]] = [
    (CHAT, "continue_final_message", False),
    (CHAT, "continue_final_message", True),
    (CHAT, "prefill", False),
    (CHAT, "prefill", True),
    (CHAT, "prefix", False),
    (CHAT, "prefix", True),
    (COMPLETION, "continue_final_message", False),
]


@pytest.mark.parametrize(("body", "takes", "trims"), WAYS)
def test_a_stream_may_be_cut_after_any_byte(
    body: dict[str, Any], takes: Takes, trims: bool
) -> None:
    ends = list(itertools.accumulate(map(len, ContinuingServer().events(body))))
    cuts = set(range(ends[-1]))
    if (takes, trims) != ("continue_final_message", False):
        # Within an event all bytes are alike.
        cuts = {end + near for end in ends for near in (-1, 0, 1)}
    for cut in cuts:
        check(spliced(body, [cut], takes, trims, []))


@given(
    way=st.sampled_from(WAYS),
    breaks=st.lists(st.integers(0, 1600), min_size=1, max_size=4),
    chunks=st.lists(st.integers(0, 1600), max_size=8),
)
@settings(max_examples=300)
def test_streams_may_be_cut_again_and_come_in_any_chunks(
    way: tuple[dict[str, Any], Takes, bool], breaks: list[int], chunks: list[int]
) -> None:
    check(spliced(way[0], breaks, way[1], way[2], chunks))
