"""Bad bodies: always a 4xx in OpenAI's shape that names the field; no engine hears of them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "m", "prompt": "Hi"},
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
}

BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": []}, "temperature"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_p": -1}, "top_p"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "16"}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**400}, "n"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"logit_bias": {"foo": 0}}, "logit_bias"),
    ({"logit_bias": {"-1": 0}}, "logit_bias"),
    ({"logit_bias": {"99999999": 0}}, "logit_bias"),
    ({"logit_bias": {"²": 0}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"user": 5}, "user"),
    ({"min_p": 1.5}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 2000}, "stop_token_ids"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.name",
    ),
    ({"response_format": "text"}, "response_format"),
]

ONLY_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"suffix": "end"}, "suffix"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 21}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"echo": 1}, "echo"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, [2]]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [[100_000]]}, "prompt"),
    ({"prompt": ["a"] * 3000}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 128}, "n"),
    ({"prompt": "x" * 1000}, "prompt"),
    ({"max_tokens": 10**100}, "max_tokens"),
]

TEXT_PART = {"type": "text", "text": "x"}
ONLY_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [TEXT_PART, {"type": "text"}]}]},
        "messages[0].content[1].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 10**100}, "max_completion_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": "f"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"modalities": "text"}, "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"prediction": {"type": "content"}}, "prediction"),
    ({"web_search_options": {"a": 1}}, "web_search_options"),
    ({"store": True}, "store"),
    ({"moderation": {"model": "m"}}, "moderation"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"verbosity": "high"}, "verbosity"),
    ({"verbosity": {}}, "verbosity"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]

CASES = [
    *((path, fields, param) for path in (COMPLETIONS, CHAT) for fields, param in BOTH),
    *((COMPLETIONS, fields, param) for fields, param in ONLY_COMPLETIONS),
    *((CHAT, fields, param) for fields, param in ONLY_CHAT),
]


def check_error(status: int, headers: dict[bytes, bytes], answer: bytes) -> dict[str, Any]:
    assert 400 <= status < 500, answer
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"x-request-id"].startswith(b"req_")
    error: dict[str, Any] = json.loads(answer)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    return error


async def test_fields_are_named() -> None:
    engine = ScriptedRemoteEngine()
    wrong = []
    async with serving(engine) as service:
        for path, fields, param in CASES:
            status, headers, answer = await service.post(path, {**BASE[path], **fields})
            error = check_error(status, headers, answer)
            if error["param"] != param:
                wrong.append((path, str(fields)[:80], param, error))
            if "content" not in param:
                assert param.split(".")[-1].split("[")[0] in error["message"], error
    assert wrong == []
    assert engine.submitted == []


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
async def test_what_is_no_json_object(service: Service, path: str) -> None:
    bodies = [
        b"",
        b"nonsense",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"text"',
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"model": "m", "prompt": "x", "messages": [], "tokens": [], "\x80unknown": 1}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00\\ud800"}',
        b'{"prompt": "\\x"}',
        b'{"prompt": "a\x00b"}',
        b'{"prompt": "a"} {}',
        b"\xef\xbb\xbf{}",
        b'{"unknown": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"messages": [{"tool_calls": [' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"]}]}",
        b'{"logit_bias": ' + b"[" * 5000,
        b'{"temperature": 1e999}',
        b'{"temperature": 1' + b"0" * 5000 + b"}",
        b'{"seed": 1' + b"0" * 5000 + b"}",
        b"\x00" * 100,
    ]
    for body in bodies:
        status, headers, answer = await service.post(path, body)
        check_error(status, headers, answer)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("text", ["\0", "\u2028", "😀" * 20, "\\", '"', "\x7f\x1b[0m", "\ufffd"])
async def test_odd_text_is_welcome(
    service: Service, engine: ScriptedRemoteEngine, path: str, text: str
) -> None:
    engine.script = lambda prompt, sampling: engine.text(text)
    fields = {"prompt": text, "stop": [text + text], "user": text, "max_tokens": 200}
    if path == CHAT:
        fields["messages"] = [{"role": "user", "content": text, "name": text}]
    for stream in (False, True):
        status, _, answer = await service.post(path, {**BASE[path], **fields, "stream": stream})
        assert status == 200
        joined = ""
        if stream:
            for block in answer.decode().split("\n\n")[:-2]:
                choice = json.loads(block.removeprefix("data: "))["choices"][0]
                joined += choice["text"] if path == COMPLETIONS else (
                    choice["delta"].get("content") or "")  # fmt: skip
        else:
            choice = json.loads(answer)["choices"][0]
            joined = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert joined == text


ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**400, 0.5, -1e308, 1e-308, "", "x",
    "null", "\0", "😀", [], [[]], [None], ["a", 1], {}, {"a": None}, {"type": "text"},
    [{"role": "user"}], [{"role": "user", "content": [{"type": "text"}]}], [[[[[1]]]]],
    {"1": {}}, {"include_usage": "x"}, [1, 2.5], ["x"] * 9,
]  # fmt: skip

FIELDS = [
    "model", "prompt", "messages", "suffix", "max_tokens", "max_completion_tokens", "temperature",
    "top_p", "n", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "stop",
    "presence_penalty", "frequency_penalty", "best_of", "logit_bias", "user", "seed", "tools",
    "tool_choice", "functions", "function_call", "response_format", "modalities", "audio",
    "metadata", "store", "service_tier", "reasoning_effort", "prediction", "min_p", "top_k",
    "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "add_special_tokens",
    "skip_special_tokens", "return_token_ids", "chat_template_kwargs", "continue_final_message",
    "parallel_tool_calls", "web_search_options", "verbosity", "tokens", "unknown",
]  # fmt: skip


def mutate(raw: bytes, chance: random.Random) -> bytes:
    """Bytes changed, cut out or doubled."""
    data = bytearray(raw)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(3)
        if kind == 0:
            data[at : at + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            del data[at : at + chance.randint(1, 8)]
        else:
            data[at:at] = data[at : at + 8] * 2
    return bytes(data)


async def test_random_bodies_never_break_the_server() -> None:
    """A thousand bodies: an answer, or a 4xx in OpenAI's shape; never a 5xx, never silence."""
    chance = random.Random(20260921)
    engine = ScriptedRemoteEngine()
    statuses: dict[int, int] = {}
    async with serving(engine) as service:
        for number in range(1000):
            path = chance.choice([COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
            fields: dict[str, Any] = dict(BASE.get(path, BASE[COMPLETIONS]))
            for _ in range(chance.randint(1, 4)):
                fields[chance.choice(FIELDS)] = chance.choice(ODD_VALUES)
            body = json.dumps(fields).encode()
            if number % 2:
                body = mutate(body, chance)
            status, headers, answer = await service.post(path, body)
            statuses[status] = statuses.get(status, 0) + 1
            assert status == 200 or 400 <= status < 500, (status, body, answer)
            if status != 200:
                check_error(status, headers, answer)
            assert engine.contexts == {}
    assert statuses[400] >= 500
    assert statuses.get(200, 0) >= 20
