"""Requests and answers of the four APIs, as the linker reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot_gateway.linking.linker.conversation import (
    Answer,
    Choice,
    Message,
    ToolCall,
    answer_of,
    conversation_of,
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CALL = ToolCall("call_1", "look", '{"at":"sea"}')
SAID = (
    Message("system", "Be kind."),
    Message("user", "Look."),
    Message("assistant", "I look.", (CALL,)),
    Message("tool", "A sail.", tool_call_id="call_1"),
)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            CHAT,
            {
                "messages": [
                    {"role": "developer", "content": "Be kind."},
                    {"role": "user", "content": [{"type": "text", "text": "Look."}]},
                    {
                        "role": "assistant",
                        "content": "I look.",
                        "tool_calls": [
                            {"id": "call_1", "function": {"name": "look", "arguments": CALL[2]}}
                        ],
                    },
                    {"role": "tool", "tool_call_id": "call_1", "content": "A sail."},
                ]
            },
        ),
        (
            MESSAGES,
            {
                "system": [{"type": "text", "text": "Be kind."}],
                "messages": [
                    {"role": "user", "content": "Look."},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "text", "text": "I look."},
                            {
                                "type": "tool_use",
                                "id": "call_1",
                                "name": "look",
                                "input": {"at": "sea"},
                            },
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "call_1", "content": "A sail."}
                        ],
                    },
                ],
            },
        ),
    ],
)
def test_chats_and_messages_are_the_same_conversation(path: str, body: dict[str, Any]) -> None:
    found = conversation_of(path, json.dumps(body).encode())
    assert found is not None
    assert found.messages == SAID


def test_items_of_responses() -> None:
    body = {
        "instructions": "Be kind.",
        "previous_response_id": "resp_1",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
            {"type": "message", "role": "assistant", "content": "I look."},
            {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": CALL[2]},
            {"type": "function_call_output", "call_id": "call_1", "output": "A sail."},
        ],
    }
    found = conversation_of(RESPONSES, json.dumps(body).encode())
    assert found is not None
    assert found.previous == "resp_1"
    assert found.messages == (
        *SAID[:2],
        Message("assistant", "I look."),
        Message("assistant", "", (CALL,)),
        SAID[3],
    )


@pytest.mark.parametrize(
    ("status", "is_finished"),
    [("queued", False), ("in_progress", False), ("completed", True), ("failed", True)],
)
def test_a_response_in_the_background_is_not_finished(status: str, is_finished: bool) -> None:
    body = json.dumps({"id": "resp_1", "status": status, "output": []}).encode()
    answer = answer_of("/v1/responses", body)
    assert answer is not None
    assert answer.is_finished is is_finished


def test_prompts_of_completions() -> None:
    text = conversation_of(TEXT, b'{"prompt": "Once"}')
    tokens = conversation_of(TEXT, b'{"prompt": [5, 7]}')
    assert text is not None
    assert text.messages == (Message("prompt", "Once"),)
    assert tokens is not None
    assert tokens.messages == (Message("prompt", "5 7"),)


def sse(*events: dict[str, Any]) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)


WHOLE = Answer("id_1", (Choice("I look.", (CALL,)),))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            CHAT,
            sse(
                {"id": "id_1", "choices": [{"index": 0, "delta": {"content": "I "}}]},
                {"id": "id_1", "choices": [{"index": 0, "delta": {"content": "look."}}]},
                {
                    "id": "id_1",
                    "choices": [
                        {
                            "index": 0,
                            "delta": {
                                "tool_calls": [
                                    {
                                        "index": 0,
                                        "id": "call_1",
                                        "function": {"name": "look", "arguments": '{"at":'},
                                    }
                                ]
                            },
                        }
                    ],
                },
                {
                    "id": "id_1",
                    "choices": [
                        {
                            "index": 0,
                            "delta": {
                                "tool_calls": [{"index": 0, "function": {"arguments": '"sea"}'}}]
                            },
                        }
                    ],
                },
            )
            + b"data: [DONE]\n\n",
        ),
        (
            MESSAGES,
            sse(
                {"type": "message_start", "message": {"id": "id_1"}},
                {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
                {"type": "content_block_delta", "index": 0, "delta": {"text": "I look."}},
                {
                    "type": "content_block_start",
                    "index": 1,
                    "content_block": {"type": "tool_use", "id": "call_1", "name": "look"},
                },
                {"type": "content_block_delta", "index": 1, "delta": {"partial_json": '{"at":'}},
                {"type": "content_block_delta", "index": 1, "delta": {"partial_json": '"sea"}'}},
            ),
        ),
        (
            RESPONSES,
            sse(
                {"type": "response.created", "response": {"id": "id_1"}},
                {
                    "type": "response.completed",
                    "response": {
                        "id": "id_1",
                        "output": [
                            {
                                "type": "message",
                                "role": "assistant",
                                "content": [{"type": "output_text", "text": "I look."}],
                            },
                            {
                                "type": "function_call",
                                "call_id": "call_1",
                                "name": "look",
                                "arguments": CALL[2],
                            },
                        ],
                    },
                },
            ),
        ),
        (
            CHAT,
            json.dumps(
                {
                    "id": "id_1",
                    "choices": [
                        {
                            "message": {
                                "content": "I look.",
                                "tool_calls": [
                                    {
                                        "id": "call_1",
                                        "function": {"name": "look", "arguments": CALL[2]},
                                    }
                                ],
                            }
                        }
                    ],
                }
            ).encode(),
        ),
    ],
)
def test_answers_whole_and_streamed(path: str, body: bytes) -> None:
    assert answer_of(path, body) == WHOLE


FIELDS = [
    *("messages", "prompt", "input", "system", "role", "content", "type", "text", "tool_calls"),
    *("function", "arguments", "id", "choices", "delta", "message", "output", "index", "call_id"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(FIELDS), inner),
)


@given(st.sampled_from([CHAT, TEXT, RESPONSES, MESSAGES]), JSON, st.binary(max_size=60))
def test_whatever_comes_is_read_or_holds_nothing(path: str, value: Any, garbage: bytes) -> None:
    for body in (json.dumps(value).encode(), garbage, sse({"choices": value}), sse({"a": value})):
        conversation_of(path, body)
        answer_of(path, body)


_TEXTS = st.text(alphabet='ab"\\{},:\n é', max_size=6)
_EVENTS = st.one_of(
    _TEXTS.map(lambda text: {"content": text}),
    _TEXTS.map(lambda text: {"content": text, "more": text}),
    _TEXTS.map(lambda text: {"more": text, "content": text}),
    _TEXTS.map(lambda role: {"role": role}),
    _TEXTS.map(lambda text: {"content": text, "role": "assistant"}),
    st.just({"content": None}),
)


@given(deltas=st.lists(_EVENTS, min_size=1, max_size=20), spaced=st.booleans())
def test_events_of_a_stream_count_each_however_alike(
    deltas: list[dict[str, str | None]], spaced: bool
) -> None:
    separators = (", ", ": ") if spaced else (",", ":")
    events = [
        json.dumps(
            {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            separators=separators,
        )
        for delta in deltas
    ]
    body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
    found = answer_of(CHAT, body)
    assert found is not None
    assert found.response_id == "chatcmpl-1"
    assert found.choices == (Choice("".join(delta.get("content") or "" for delta in deltas)),)
