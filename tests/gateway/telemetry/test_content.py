"""Contents of calls as messages of OpenTelemetry's conventions: all APIs, whole and streamed."""

from __future__ import annotations

import gzip
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot_gateway.telemetry.content import content as content_module
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


def call_part(name: str, arguments: Any, id_: str = "t") -> dict[str, Any]:
    return {"type": "tool_call", "id": id_, "name": name, "arguments": arguments}


def reply(response: str, id_: str = "t") -> dict[str, Any]:
    return {"type": "tool_call_response", "id": id_, "response": response}


def of_type(kind: str, **found: str) -> dict[str, Any]:
    return {"type": kind, **found}


LONG = "n" * 300
TEXT = of_type("text", content="a")
THOUGHT = of_type("reasoning", content="a")
#: Parts of contents, and what they become.
PARTS: list[tuple[Any, dict[str, Any]]] = [
    ("a", TEXT),
    *((of_type(kind, text="a"), TEXT)
      for kind in ("text", "input_text", "output_text", "summary_text")),
    (of_type("refusal", refusal="a"), TEXT),
    *((of_type(kind, text="a"), THOUGHT) for kind in ("reasoning", "reasoning_text")),
    (of_type("thinking", thinking="a"), THOUGHT),
    ({"type": "tool_use", "id": "t", "name": "go", "input": {"n": 1}}, call_part("go", {"n": 1})),
    ({"type": "tool_use", "id": LONG, "name": LONG}, call_part(LONG[:256], "", LONG[:256])),
    ({"type": "tool_result", "tool_use_id": "t", "content": "9"}, reply("9")),
    ({"type": "tool_result", "tool_use_id": LONG, "content": [{"text": "9"}, {"text": "8"}]},
     reply("9\n8", LONG[:256])),
    ({"type": "tool_result", "tool_use_id": 7, "content": [{"text": "9"}, {"n": 8}]},
     reply('[{"text":"9"},{"n":8}]', "7")),
    ({"type": "image_url", "image_url": "https://me:word@host:8/p?key=1#at"},
     of_type("uri", modality="image", uri="https://host:8/p")),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
     of_type("blob", modality="image", mime_type="image/png")),
    ({"type": "input_image", "image_url": "data:,AAAA"}, of_type("blob", modality="image")),
    ({"type": "input_image", "file_id": "f" * 300},
     of_type("file", modality="image", file_id="f" * 256)),
    ({"type": "image", "source": {"type": "base64", "media_type": "image/" + LONG, "data": "AA"}},
     of_type("blob", modality="image", mime_type="image/" + LONG[:250])),
    ({"type": "image", "source": {"mime_type": "image/gif", "url": "http://[broken"}},
     of_type("uri", modality="image", mime_type="image/gif", uri="")),
    ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
     of_type("blob", modality="audio")),
    ({"type": "audio", "url": "https://host/" + "p" * 3000},
     of_type("uri", modality="audio", uri="https://host/" + "p" * 2035)),
    ({"type": "video_url", "video_url": {"url": "https://host/v"}},
     of_type("uri", modality="video", uri="https://host/v")),
    ({"type": "file", "file": {"file_id": "f"}},
     of_type("file", modality="document", file_id="f")),
    ({"type": "input_file", "file_url": "https://host/d"},
     of_type("uri", modality="document", uri="https://host/d")),
    ({"type": "document", "source": {"type": "text", "data": "A secret."}},
     of_type("blob", modality="document")),
    ({"type": LONG}, of_type(LONG[:256])),
    ({"type": 5}, of_type("5")),
    ({}, of_type("unknown")),
]  # fmt: skip


@pytest.mark.parametrize(("part", "becomes"), PARTS)
def test_parts_of_every_kind(part: Any, becomes: dict[str, Any]) -> None:
    for content in ([part], [None, part, 5], part):
        if isinstance(content, list | dict):
            found = read(CHAT, {"messages": [{"role": "user", "content": content}]})
            assert found.input_messages == [{"role": "user", "parts": [becomes]}]


#: Items of a response's input or messages of a chat, and the messages that they become.
ITEMS: list[tuple[Any, str, list[dict[str, Any]]]] = [
    ({"type": "function_call", "call_id": "t", "name": "go", "arguments": "[1]"},
     "assistant", [call_part("go", [1])]),
    ({"type": "custom_tool_call", "call_id": "t", "name": "go", "input": "no JSON"},
     "assistant", [call_part("go", "no JSON")]),
    ({"type": "function_call_output", "call_id": "t", "output": "9"}, "tool", [reply("9")]),
    ({"type": "custom_tool_call_output", "call_id": "t", "output": {"n": 9}},
     "tool", [reply('{"n":9}')]),
    ({"type": "reasoning", "content": [{"text": "a"}], "summary": [{"text": "b"}]},
     "assistant", [THOUGHT]),
    ({"type": "reasoning", "content": [], "summary": [{"text": "a"}, {"text": 5}, "b"]},
     "assistant", [THOUGHT]),
    ({"type": "item_reference", "id": "i"}, "user", [of_type("item_reference")]),
    ({"type": LONG}, "user", [of_type(LONG[:64])]),
    ({"role": 5}, "user", [of_type("unknown")]),
    ({"role": LONG, "content": "a"}, LONG[:64], [TEXT]),
    ({"role": "tool", "tool_call_id": "t", "name": "go", "content": "9"}, "tool", [reply("9")]),
    ({"role": "function", "name": "t", "content": "9"}, "tool", [reply("9")]),
    ({"role": "assistant", "reasoning_content": "a", "content": "a", "refusal": "a"},
     "assistant", [THOUGHT, TEXT, TEXT]),
    ({"role": "assistant", "reasoning": "a", "function_call": {"name": "go", "arguments": "{}"}},
     "assistant", [THOUGHT, call_part("go", {}, "")]),
    ({"role": "assistant", "tool_calls": [
        "none", {"id": "t", "custom": {"name": "go", "input": "1 "}}, {"id": "t", "function": 5}]},
     "assistant", [call_part("go", 1), call_part("", "")]),
]  # fmt: skip


@pytest.mark.parametrize(("item", "role", "parts"), ITEMS)
def test_items_of_every_kind(item: Any, role: str, parts: list[dict[str, Any]]) -> None:
    for field, path in (("input", RESPONSES), ("messages", CHAT)):
        found = read(path, {field: ["none", item]})
        assert found.input_messages == [{"role": role, "parts": parts}]


def said(kind: str, /, *parts: dict[str, Any], reason: str = "stop") -> dict[str, Any]:
    return {"role": kind, "parts": [*parts], "finish_reason": reason}


def choice(index: int | None = None, reason: str | None = None, **delta: Any) -> dict[str, Any]:
    made = {"delta": delta, "finish_reason": reason}
    return {"choices": [made if index is None else {"index": index, **made}]}


def response(*output: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"output": [*output], "status": "completed", **fields}


GO = {"type": "tool_use", "id": "t", "name": "go"}
#: Events of a stream, or an answer as a whole, and what they say.
ANSWERS: list[tuple[Any, list[dict[str, Any]]]] = [
    # Candidates, which come as they like.
    ([choice(1, content="b"), choice(0, content="a"), choice(1, "length"), choice(0, "stop"),
      choice(1)],
     [said("assistant", TEXT), said("assistant", of_type("text", content="b"), reason="length")]),
    ([choice(reasoning_content="a"), choice(refusal="a"), choice(reason="content_filter")],
     [said("assistant", THOUGHT, TEXT, reason="content_filter")]),
    ([choice(reasoning="a", content="a")], [said("assistant", THOUGHT, TEXT, reason="error")]),
    ([choice(tool_calls=[{"id": "t", "function": {"name": "go", "arguments": "[1"}},
                         {"id": "u", "function": {"name": "stay"}}]),
      choice(tool_calls=[{"index": 1, "function": {"arguments": "2"}}]),
      choice(tool_calls=[{"index": 0, "function": {"arguments": "]"}}]),
      choice(reason="function_call")],
     [said("assistant", call_part("go", [1]), call_part("stay", 2, "u"), reason="tool_call")]),
    ([{"choices": [{"text": "a", "finish_reason": None}]},
      {"choices": [{"text": "", "finish_reason": "stop"}]}], [said("assistant", TEXT)]),
    ([{"type": "content_block_start", "index": 0, "content_block": {"type": "text", "id": "no"}},
      {"type": "content_block_start", "index": 1, "content_block": GO},
      {"type": "content_block_delta", "index": 0, "delta": {"text": "a"}},
      {"type": "content_block_delta", "index": 1, "delta": {"partial_json": "[1"}},
      {"type": "content_block_delta", "index": 1, "delta": {"partial_json": "]"}},
      {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
      {"type": "message_delta", "delta": {}}],
     [said("assistant", TEXT, call_part("go", [1]), reason="tool_call")]),
    ([{"type": "response.reasoning_text.delta", "delta": "a"},
      {"type": "response.output_text.delta", "delta": "a"}],
     [said("assistant", THOUGHT, TEXT, reason="error")]),
    *(([{"type": "response.output_text.delta", "delta": "b"},
        {"type": f"response.{status}", "response": {**response(), "status": status}}],
       [said("assistant", reason=reason)])
      for status, reason in (("completed", "stop"), ("incomplete", "length"), ("failed", "error"))),
    (response({"type": "web_search_call"}, {"type": "reasoning", "content": [{"text": "a"}]},
              {"type": "message", "content": [{"type": "output_text", "text": "a"}]}),
     [said("assistant", of_type("web_search_call"), THOUGHT, TEXT)]),
    (response({"type": "custom_tool_call", "call_id": "t", "name": "go", "input": "[1]"},
              status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
     [said("assistant", call_part("go", [1]), reason="length")]),
    (response(status="cancelled", incomplete_details=None), [said("assistant", reason="error")]),
    ({"content": [{"type": "text", "text": "a"}, {**GO, "input": 1}], "stop_reason": "end_turn"},
     [said("assistant", TEXT, call_part("go", 1))]),
    ({"content": [], "stop_reason": "stop_sequence"}, [said("assistant")]),
    ({"choices": [{"text": "a", "finish_reason": "stop"}, {"message": {"refusal": "a"}}]},
     [said("assistant", TEXT), said("assistant", TEXT, reason="error")]),
    ({"object": "list"}, []),
    ({"choices": [5]}, []),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "says"), ANSWERS)
def test_answers_of_every_shape(answer: Any, says: list[dict[str, Any]]) -> None:
    sent = events(*answer) if isinstance(answer, list) else b" \n" + msgspec.json.encode(answer)
    assert read(CHAT, {}, sent).output_messages == says
    assert read(CHAT, {}, sent[:5], sent[5:]).output_messages == says, "in pieces"
    packed = gzip.compress(sent)
    assert read(CHAT, {}, packed).output_messages == says
    assert read(CHAT, {}, packed[:12] + b"\xff" * 9).output_messages == []


def test_what_is_cut_is_counted() -> None:
    arguments = {"name": "go", "arguments": '{"at": 12345}'}
    turns = [
        {"role": "user", "content": "é" * 5},
        {"role": "assistant", "tool_calls": [{"id": "t", "function": arguments}]},
        {"role": "user", "content": "x" * 10},
    ]
    answer = msgspec.json.encode({"choices": [{"text": "y" * 9, "finish_reason": "stop"}]})
    # The answer leaves 1 of its half to the prompt.
    found = read(CHAT, {"messages": turns}, answer, limit=20)
    cut = "{… [12 characters cut]"
    earlier = len(msgspec.json.encode(turns[0]).decode())
    assert found.input_messages == [
        text(f"[1 earlier messages cut, {earlier} characters]"),
        {"role": "assistant", "parts": [call_part("go", cut)]},
        text("x" * 10),
    ]
    assert found.output_messages == [said("assistant", of_type("text", content="y" * 9))]
    assert found.cut_characters == 12 + earlier
    # Of an odd number the prompt has one more; the answer is cut where it is longer.
    found = read(CHAT, {"messages": turns[2:]}, answer, limit=11)
    assert found.input_messages == [text("x" * 6 + "… [4 characters cut]")]
    assert found.output_messages[0]["parts"][0]["content"] == "y" * 5 + "… [4 characters cut]"
    assert (found.cut_characters, found.request) == (8, "")


async def test_large_calls_are_read_in_a_thread_and_of_long_answers_the_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = list[threading.Thread]()

    def read_text(*args: Any) -> list[Any]:
        threads.append(threading.current_thread())
        return []

    monkeypatch.setattr(content_module, "_MAX_ANSWER_BYTES", 10)
    monkeypatch.setattr(content_module, "text_answer", read_text)
    answer = events(choice(content="a"))
    for size in (64 * 1024, 64 * 1024 + 1):
        content = CallContent()
        content.asked(CHAT, b"p" * (size - len(answer) - 4))
        for piece in (answer[:9], answer[9:], b"behind"):
            content.answered(piece)
        content.wrote("four", "stop")
        assert content.size_bytes == size
        assert (await content.read(9)).path == CHAT
    assert [each is threading.main_thread() for each in threads] == [True, False]


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
