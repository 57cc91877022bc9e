"""Contents of calls as messages of OpenTelemetry's conventions: all APIs, whole and streamed."""

from __future__ import annotations

import gzip
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot_gateway.telemetry.content.content import CallContent, ReadContent

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
LIMIT = 4000


def read(path: str, request: Any, *answer: bytes, limit: int = LIMIT) -> ReadContent:
    content = CallContent()
    content.asked(path, request if isinstance(request, bytes) else msgspec.json.encode(request))
    for piece in answer:
        content.answered(piece)
    return content.read_now(limit)


def text(content: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": content}]}


def events(*values: Any) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(each) + b"\n\n" for each in values)


def chunk(**delta: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def test_a_chat_with_tools_and_an_image() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}
    image = {"url": "https://user:word@host/cat.png?signature=abc"}
    found = read(
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "What is this?"},
                                             {"type": "image_url", "image_url": image}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "t1", "content": "a cat"},
            ]
        },
        msgspec.json.encode(
            {"choices": [{"message": {"content": "A cat.", "reasoning_content": "Whiskers."},
                          "finish_reason": "stop"}]}
        ),
    )  # fmt: skip
    part = {"type": "tool_call", "id": "t1", "name": "look", "arguments": {"at": 1}}
    assert found.input_messages == [
        text("Be brief.", "system"),
        {"role": "user", "parts": [
            {"type": "text", "content": "What is this?"},
            {"type": "uri", "modality": "image", "uri": "https://host/cat.png"},
        ]},
        {"role": "assistant", "parts": [part]},
        {"role": "tool", "parts": [
            {"type": "tool_call_response", "id": "t1", "response": "a cat"}
        ]},
    ]  # fmt: skip
    assert found.output_messages == [
        {"role": "assistant", "finish_reason": "stop", "parts": [
            {"type": "reasoning", "content": "Whiskers."}, {"type": "text", "content": "A cat."}
        ]}
    ]  # fmt: skip
    assert found.cut_characters == 0


def test_streams_are_put_together() -> None:
    calls = [{"index": 0, "id": "t", "function": {"name": "go", "arguments": '{"n"'}}]
    more = [{"index": 0, "function": {"arguments": ":2}"}}]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    body = events(chunk(content="One "), chunk(content="two"), chunk(tool_calls=calls),
                  chunk(tool_calls=more), end)  # fmt: skip
    for sent in (body + b"data: [DONE]\n\n", gzip.compress(body)):
        (message,) = read(CHAT, {}, sent).output_messages
        assert message["finish_reason"] == "tool_call"
        assert message["parts"] == [
            {"type": "text", "content": "One two"},
            {"type": "tool_call", "id": "t", "name": "go", "arguments": {"n": 2}},
        ]
    (broken,) = read(CHAT, {}, body[:90] + b"\n").output_messages
    assert broken["finish_reason"] == "error"
    assert broken["parts"][0]["content"] == "One "


def test_completions_of_text_and_of_token_ids() -> None:
    found = read(
        "/v1/completions",
        {"prompt": ["Once", "Twice"]},
        msgspec.json.encode({"choices": [{"text": " upon", "finish_reason": "length"}]}),
    )
    assert found.input_messages == [text("Once"), text("Twice")]
    assert found.output_messages[0]["finish_reason"] == "length"
    ids = read("/v1/completions", {"prompt": [1, 2, 3]})
    assert ids.input_messages[0]["parts"] == [{"type": "token_ids", "count": 3}]


def test_messages_of_anthropic() -> None:
    result = {"type": "tool_result", "tool_use_id": "u", "content": [{"type": "text", "text": "9"}]}
    use = {"type": "tool_use", "id": "u", "name": "sum", "input": {"of": [4, 5]}}
    found = read(
        MESSAGES,
        {
            "system": [{"type": "text", "text": "Count."}],
            "messages": [
                {"role": "user", "content": "4 and 5?"},
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result]},
            ],
        },
        events(
            {"type": "message_start", "message": {"id": "m"}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking"}},
            {"type": "content_block_delta", "index": 0, "delta": {"thinking": "Easy."}},
            {"type": "content_block_delta", "index": 1, "delta": {"text": "Nine."}},
            {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}},
        ),
    )
    assert found.system_instructions == [{"type": "text", "content": "Count."}]
    assert [each["role"] for each in found.input_messages] == ["user", "assistant", "user"]
    assert found.input_messages[1]["parts"][0]["arguments"] == {"of": [4, 5]}
    assert found.input_messages[2]["parts"][0]["response"] == "9"
    (message,) = found.output_messages
    assert [part["type"] for part in message["parts"]] == ["reasoning", "text"]
    assert message["finish_reason"] == "length"


def test_responses_and_their_items() -> None:
    answer = {
        "id": "resp_1",
        "status": "completed",
        "output": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "message", "content": [{"type": "output_text", "text": "Yes."}]},
            {"type": "function_call", "call_id": "f", "name": "go", "arguments": "{}"},
        ],
    }
    whole = msgspec.json.encode(answer)
    stream = events(
        {"type": "response.output_text.delta", "delta": "Y"},
        {"type": "response.completed", "response": answer},
    )
    for sent in (whole, stream):
        found = read(RESPONSES, {"instructions": "Short.", "input": "Well?"}, sent)
        assert found.system_instructions == [{"type": "text", "content": "Short."}]
        assert found.input_messages == [text("Well?")]
        (message,) = found.output_messages
        assert [part["type"] for part in message["parts"]] == ["reasoning", "text", "tool_call"]
        assert message["finish_reason"] == "tool_call"
    (broken,) = read(RESPONSES, {}, stream[:70] + b"\n\n").output_messages
    assert broken["parts"] == [{"type": "text", "content": "Y"}]


def test_long_texts_are_cut_and_say_so() -> None:
    messages = [{"role": "user", "content": f"{n:03}" + "x" * 97} for n in range(100)]
    answer = {"choices": [{"message": {"content": "y" * 5000}, "finish_reason": "stop"}]}
    found = read(CHAT, {"messages": messages}, msgspec.json.encode(answer), limit=1000)
    output = found.output_messages[0]["parts"][0]["content"]
    assert output == "y" * 500 + "… [4500 characters cut]"
    said = [each["parts"][0]["content"] for each in found.input_messages]
    assert said[0].startswith("[95 earlier messages cut, ")
    assert [each[:3] for each in said[1:]] == ["095", "096", "097", "098", "099"]
    assert found.cut_characters > 4500 + 95 * 100
    assert found.request == "", "a request that is cut cannot be sent again"


def test_keys_are_hidden() -> None:
    key = "sk-live-0123456789abcdef"
    tool = {"type": "mcp", "server_url": "https://tools", "headers": {"Authorization": "x7"}}
    request = {"input": f"My key is {key}.", "tools": [tool], "parrot": {"session": "s"}}
    found = read(RESPONSES, request, events({"choices": [{"delta": {"content": f"Use {key}"}}]}))
    shown = msgspec.json.encode(found).decode()
    assert "0123456789" not in shown
    assert "x7" not in shown
    kept = msgspec.json.decode(found.request)
    assert kept["tools"] == [{**tool, "headers": "…"}]
    assert kept["parrot"] == {"session": "s"}


def test_a_bound_request_has_values_in_place_of_variables() -> None:
    content = CallContent()
    content.asked(CHAT, b'{"messages": [], "parrot": {"inputs": {}}}', is_bound=True)
    content.wrote("Done \ud800.", "length")
    found = content.read_now(LIMIT)
    assert found.request == '{"messages":[]}'
    assert found.output_messages[0]["finish_reason"] == "length"
    assert msgspec.json.encode(found), "what cannot be written is replaced"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"messages": 5}', b'{"messages": [7, {"role": 3}]}',
             b'{"prompt": {}}', b"\xff\xfe", b"[" * 5000]
)  # fmt: skip
def test_what_is_in_no_shape_is_no_fault(body: bytes) -> None:
    read(CHAT, body, body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["messages", "prompt", "input", "system", "role", "content", "type", "text", "output",
             "choices", "delta", "message", "tool_calls", "function", "source", "image_url"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(request=JSON, answer=JSON, limit=st.integers(1, 60))
def test_any_json_is_read(request: Any, answer: Any, limit: int) -> None:
    body = msgspec.json.encode(answer)
    for sent in (body, b"data: " + body + b"\n\n"):
        assert msgspec.msgpack.encode(read(CHAT, request, sent, limit=limit))
