"""Reading the text out of answers, however they are cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from harness.scripted_upstream import chat_events, chunk, data
from hypothesis import given
from hypothesis import strategies as st

from parrot_gateway.backends.upstreams import answer as upstream_call
from parrot_gateway.backends.upstreams.answer import UpstreamAnswerReader
from parrot_gateway.backends.upstreams.reported_error import reported_error
from parrot_gateway.calls.observer import GenerationObserver, TextObserver
from parrot_gateway.exceptions import AnswerError

EVENTS = b"text/event-stream; charset=utf-8"
JSON = b"application/json"


def read(parts: list[bytes], content_type: bytes = EVENTS, status: int = 200) -> str:
    texts: list[str] = []
    observer = TextObserver(texts.append)
    reader = UpstreamAnswerReader(observer)
    reader.start(status, content_type)
    for part in parts:
        reader.feed(part)
    reader.end()
    observer.finish()
    return "".join(texts)


@given(
    st.lists(st.text(max_size=8), max_size=8),
    st.lists(st.integers(0, 2000), max_size=8),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
)
def test_streams_read_the_same_however_they_are_cut(
    words: list[str], cuts: list[int], newline: bytes
) -> None:
    whole = b": comment\n\n" + b"".join(chat_events(words))
    whole = whole.replace(b"\n", newline)
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    parts = [whole[a:b] for a, b in pairwise(edges)]
    assert read(parts) == "".join(words)


def test_completions_streams_are_read_too() -> None:
    events = [data({"choices": [{"index": 0, "text": word}]}) for word in ("a", "b")]
    assert read([*events, b"data: [DONE]\n\n"]) == "ab"


def test_the_first_choice_counts() -> None:
    events = [
        data({"choices": [{"index": 1, "text": "x"}, {"index": 0, "text": "a"}]}),
        b"data: [DONE]\n\n",
    ]
    assert read(events) == "a"


@pytest.mark.parametrize("field", [{"text": "t"}, {"message": {"role": "x", "content": "t"}}])
def test_whole_answers_are_read(field: dict[str, Any]) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    body = json.dumps({"choices": [{"index": 0, **field}], "usage": usage}).encode()
    texts: list[str] = []
    reader = UpstreamAnswerReader(TextObserver(texts.append))
    reader.start(200, JSON)
    reader.feed(body[:20])
    reader.feed(body[20:])
    reader.end()
    assert texts == ["t"]
    assert reader.usage is not None
    assert reader.usage.completion_tokens == 2


def test_streams_tell_their_usage() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    reader = UpstreamAnswerReader(GenerationObserver())
    reader.start(200, EVENTS)
    reader.feed(data({"choices": [], "usage": usage}))
    assert reader.usage is not None
    assert reader.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    ("parts", "content_type", "status", "message", "code"),
    [
        (chat_events(["a"])[:2], EVENTS, 200, "before it was complete", "answer_unusable"),
        (
            [data({"choices": [{"index": 1, "text": "b", "finish_reason": "stop"}]})],
            EVENTS,
            200,
            "before it was complete",
            "answer_unusable",
        ),
        ([data({"error": {"message": "gone", "code": "c"}})], EVENTS, 200, "gone", "c"),
        ([b"data: {nonsense\n\n"], EVENTS, 200, "OpenAI's shape", "answer_unusable"),
        ([b"<html>"], JSON, 200, "OpenAI's shape", "answer_unusable"),
        ([b"{}"], JSON, 200, "no choices", "answer_unusable"),
        ([b'{"error": {"message": "slow", "code": "rate"}}'], JSON, 429, "slow", "rate"),
        ([b"nothing"], b"text/plain", 503, "status 503", "answer_unusable"),
        ([b'{"error": "plain words"}'], JSON, 400, "plain words", "answer_unusable"),
        (
            [data(chunk("m", {"tool_calls": [{"index": 0}]}, "tool_calls"))],
            EVENTS,
            200,
            "called tools",
            "no_text",
        ),
        (
            [b'{"choices":[{"message":{"content":null,"tool_calls":[{"id":"x"}]}}]}'],
            JSON,
            200,
            "called tools",
            "no_text",
        ),
    ],
)
def test_what_holds_no_text_is_an_error(
    parts: list[bytes], content_type: bytes, status: int, message: str, code: str
) -> None:
    with pytest.raises(AnswerError) as caught:
        read(parts, content_type, status)
    assert message in caught.value.message
    assert caught.value.code == code


@pytest.mark.parametrize("content_type", [EVENTS, JSON])
def test_what_is_held_of_an_answer_is_bounded(
    monkeypatch: pytest.MonkeyPatch, content_type: bytes
) -> None:
    monkeypatch.setattr(upstream_call, "MAX_HELD_BYTES", 300)
    with pytest.raises(AnswerError, match="too long"):
        read([b"data: " + b"x" * 150, b"x" * 150], content_type)
    # Whole events are not held.
    assert read(chat_events(["a"] * 100)) == "a" * 100


def test_empty_answers_are_texts() -> None:
    assert read(chat_events([])) == ""


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({"error": {"message": "no", "code": 400, "type": "Bad"}}, "Bad"),
        ({"type": "error", "error": {"type": "api_error", "message": "no"}}, "api_error"),
        ({"type": "error", "code": "c", "message": "no"}, "c"),
        ({"type": "response.failed", "response": {"error": {"code": "c", "message": "no"}}}, "c"),
        ({"error": "no"}, "answer_unusable"),
    ],
)
@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", ""])
def test_an_error_with_a_status_of_success(event: dict[str, Any], code: str, end: str) -> None:
    text = f'data: {{"choices": []}}\n\ndata: {json.dumps(event)}{end}'
    found = reported_error(text.encode())
    assert found is not None
    assert (found.code, found.message) == (code, "no")


@given(st.text() | st.sampled_from(['"error": {"message": "no"}', '{"type": "error"}']))
def test_what_a_model_writes_is_no_error(text: str) -> None:
    event = {"error": None, "choices": [{"delta": {"content": text}}]}
    assert reported_error(b"data: " + json.dumps(event).encode() + b"\n\n") is None
