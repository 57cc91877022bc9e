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
    argument_texts,
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


def call(arguments: str, name: str = "look", id_: str = "t") -> tuple[ToolCall, ...]:
    return (ToolCall(id_, name, arguments),)


@pytest.mark.parametrize(
    ("item", "messages"),
    [
        ({"role": "developer", "content": "a"}, [Message("system", "a")]),
        ({"role": "ai", "content": None}, [Message("assistant", "")]),
        ({"role": "human", "content": ["a", {"text": "b"}, {"text": 5}, 7]},
         [Message("user", "a\nb")]),
        ({"role": "function", "name": "look", "content": {"text": "a"}}, [Message("tool", "a")]),
        ({"role": 5, "content": 5}, [Message("5", "")]),
        ({"role": "user", "content": [{"type": "image"}]}, []),
        ({"content": "a"}, []),
        ("a", []),
        ({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": "a"},
            {"type": "text", "text": "b"},
        ]}, [Message("tool", "a", tool_call_id="t"), Message("user", "b")]),
        ({"role": "assistant", "content": [
            {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "t", "name": "look", "input": {"n": 1}}
        ]}, [Message("assistant", "a", call('{"n":1}'))]),
        ({"role": "assistant", "function_call": {"name": "look", "arguments": "{}"}},
         [Message("assistant", "", call("{}", id_=""))]),
        ({"role": "assistant", "tool_calls": [
            {"id": "t", "custom": {"name": "look", "input": "a"}}, 5, {"id": "u", "function": 5}
        ]}, [Message("assistant", "", call("a") + call("", "", "u"))]),
        ({"type": "custom_tool_call", "call_id": "t", "name": "look", "input": "a"},
         [Message("assistant", "", call("a"))]),
        ({"type": "function_call", "call_id": "t", "name": "look", "arguments": {"n": 1}},
         [Message("assistant", "", call('{"n":1}'))]),
        ({"type": "custom_tool_call_output", "call_id": "t", "output": "a"},
         [Message("tool", "a", tool_call_id="t")]),
        ({"type": "function_call_output", "call_id": "t", "output": [{"text": "a"}]},
         [Message("tool", "a", tool_call_id="t")]),
    ],
)  # fmt: skip
def test_items_of_every_kind(item: Any, messages: list[Message]) -> None:
    for path, field in ((CHAT, "messages"), (RESPONSES, "input")):
        found = conversation_of(path, json.dumps({field: [item], "system": ""}).encode())
        assert found is not None
        assert list(found.messages) == messages


@pytest.mark.parametrize(
    ("body", "previous", "model", "first"),
    [
        ({"instructions": "a", "system": "b", "input": "c"}, "", "", Message("system", "a")),
        ({"system": "b", "messages": [], "input": "c"}, "", "", Message("system", "b")),
        ({"input": "c", "previous_response_id": "r", "model": "m" * 300}, "r", "m" * 256,
         Message("user", "c")),
        ({"input": "c", "previous_response_id": 5, "model": 5}, "", "", Message("user", "c")),
    ],
)  # fmt: skip
def test_what_a_request_names(
    body: dict[str, Any], previous: str, model: str, first: Message
) -> None:
    found = conversation_of(RESPONSES, json.dumps(body).encode())
    assert found is not None
    assert (found.previous, found.model, found.messages[0]) == (previous, model, first)


def stream(*events: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events)


def delta(index: int | None = None, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"delta": fields}
    return {"id": "r", "choices": [found if index is None else {"index": index, **found}]}


USE = {"type": "tool_use", "id": "t", "name": "look"}


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        # Choices that come as they like, and one that says nothing.
        (stream(delta(1, content="b"), delta(0, content="a"), delta(2), delta(1, content="c")),
         Answer("r", (Choice("a"), Choice("bc"), Choice("")), is_plain=True)),
        (stream(delta(content="a", tool_calls=[
            {"id": "t", "function": {"name": "lo", "arguments": "[1"}},
            {"id": "u", "function": {"name": "stay"}},
        ]), delta(tool_calls=[{"index": 1, "function": {"arguments": "{}"}}]),
            delta(tool_calls=[
                {"index": 0, "id": "again", "function": {"name": "ok", "arguments": "]"}}])),
         Answer("r", (Choice("a", (ToolCall("t", "look", "[1]"), ToolCall("u", "stay", "{}"))),))),
        (stream({"id": "r", "choices": [{"text": "a", "index": 1}]},
                {"id": "s", "choices": [{"text": "b"}]}),
         Answer("r", (Choice("b"), Choice("a")))),
        (stream({"type": "message_start", "message": {"id": "m"}},
                {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
                {"type": "content_block_delta", "index": 0, "delta": {"text": "a"}},
                {"type": "content_block_start", "index": 1, "content_block": USE},
                {"type": "content_block_delta", "index": 1, "delta": {"partial_json": "{}"}}),
         Answer("m", (Choice("a", call("{}")),))),
        (stream({"type": "response.created", "response": {"id": "x"}},
                {"type": "response.output_text.delta", "delta": "a"}),
         Answer("x", (Choice("a"),))),
        (stream({"type": "response.created", "response": {"id": "x"}}),
         Answer("x", (Choice(""),))),
        (stream({"type": "response.output_text.delta", "delta": "a"}, {
            "type": "response.incomplete",
            "response": {"id": "x", "status": "in_progress", "output": [
                {"type": "message", "role": "assistant", "content": [{"text": "b"}]},
                {"type": "function_call", "call_id": "t", "name": "look", "arguments": "{}"}]}}),
         Answer("x", (Choice("b", call("{}")),), is_finished=False)),
        (stream(5, [], {"id": "r"}), None),
        (b'data: {"id": "r", "choices": [{"delta": {"content": "a"}}]}\n\ndata: {"id"',
         Answer("r", (Choice("a"),))),
    ],
)  # fmt: skip
def test_streams_of_every_shape(sent: bytes, answer: Answer | None) -> None:
    assert answer_of(CHAT, sent) == answer
    if answer is not None and sent.endswith(b"\n\n"):
        assert answer_of(CHAT, sent + b"data: [DONE]\n\n") == answer


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        ({"id": "r", "choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 3}},
         Answer("r", (Choice("a"),), is_plain=True, tokens=3)),
        ({"id": "r", "choices": [{"message": {"content": "a"}}, {"message": {"content": "b"}}]},
         Answer("r", (Choice("a"), Choice("b")), is_plain=True)),
        ({"id": "r", "choices": [{"text": "a"}, 5, {"message": {"content": None}}]},
         Answer("r", (Choice("a"), Choice("")))),
        ({"id": "r", "choices": []}, None),
        ({"id": 5, "choices": [{"text": None}]}, Answer("5", (Choice(""),))),
        ({"id": "m", "content": [{"type": "text", "text": "a"}, {**USE, "input": {}}]},
         Answer("m", (Choice("a", call("{}")),))),
        ({"id": "x", "output": [], "status": "queued"}, Answer("x", (Choice(""),), False)),
        ({"id": "x", "output": [{"type": "message", "role": "assistant", "content": "a"}, 5,
                                {"type": "message", "role": "assistant", "content": "b"}],
          "status": "completed"}, Answer("x", (Choice("a\nb"),))),
        ({"error": {"message": "a"}}, None),
    ],
)  # fmt: skip
def test_answers_of_every_shape(sent: Any, answer: Answer | None) -> None:
    assert answer_of(CHAT, b" " + json.dumps(sent).encode()) == answer


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ('{"a": ["x", {"b": "y"}, 5], "c": "z"}', ["x", "y", "z"]),
        ('"x"', ["x"]),
        ("no JSON", ["no JSON"]),
        ("7", []),
    ],
)
def test_texts_of_arguments(arguments: str, texts: list[str]) -> None:
    assert list(argument_texts(arguments)) == texts
