"""Fields that cost more than they look like: refused by name, or worked on in linear time."""

from __future__ import annotations

import time
from typing import Any

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import CHAT, COMPLETIONS, body_of, http_of
from harness.gateway.serving import Service

from parrot_gateway.api.openai.tokenize import MAX_CHARACTERS
from parrot_gateway.calls.requests.chat import MAX_MESSAGES
from parrot_gateway.calls.requests.types import MAX_STOP_CHARACTERS
from parrot_gateway.calls.tools.parsing import ArgumentsPiece, ToolCallReader, ToolFormat

RESPONSES = "/v1/responses"
LONG = "x" * (MAX_STOP_CHARACTERS + 1)


async def refused(
    engine: ScriptedRemoteEngine, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    async with http_of(engine) as http:
        answer = await http.post(path, json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize("stop", [LONG, ["a", LONG]])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
async def test_a_stop_string(engine: ScriptedRemoteEngine, path: str, stop: Any) -> None:
    """Each candidate of a call takes them to its engine."""
    body = {"model": "m", "input": "x"} if path == RESPONSES else body_of(path, "x")
    await refused(engine, path, body | {"stop": stop}, "stop", "string_above_max_length")


async def test_the_longest_stop_string(engine: ScriptedRemoteEngine) -> None:
    async with http_of(engine) as http:
        answer = await http.call(COMPLETIONS, "x", stop=[LONG[1:]])
        assert answer.status_code == 200


async def test_messages(engine: ScriptedRemoteEngine) -> None:
    messages = [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)
    body = {"model": "m", "messages": messages}
    await refused(engine, CHAT, body, "messages", "array_above_max_length")


async def test_parameters_of_tools(engine: ScriptedRemoteEngine) -> None:
    def tool(number: int, size: int) -> dict[str, Any]:
        schema = {"type": "object", "description": "x" * size}
        return {"type": "function", "function": {"name": f"f{number}", "parameters": schema}}

    body = body_of(CHAT, "x") | {"tools": [tool(n, 200_000) for n in range(6)]}
    await refused(engine, CHAT, body, "tools", "string_above_max_length")
    async with http_of(engine) as http:
        answer = await http.post(CHAT, json=body | {"tools": body["tools"][:5]})
        assert answer.json().get("error", {}).get("param") != "tools"


@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_text_to_tokenize(service: Service, is_chat: bool) -> None:
    text = "x" * (MAX_CHARACTERS + 1)
    field: dict[str, Any] = {"prompt": text}
    if is_chat:
        field = {"messages": [{"role": "user", "content": text}]}
    status, _, answer = await service.post("/tokenize", {"model": "m", **field})
    assert status == 400
    assert b'"string_above_max_length"' in answer


@pytest.mark.parametrize(
    ("format", "before", "after"),
    [
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":"', '"}}</tool_call>'),
        ("llama", '{"name":"f","parameters":{"a":"', '"}}'),
    ],
)
def test_long_arguments(format: ToolFormat, before: str, after: str) -> None:
    check_linear(format, before, "x", after)
    reader = ToolCallReader(format, {"f"})
    pieces = reader.push(before + "x" * 1000 + after) + reader.finish()
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, ArgumentsPiece))
    assert arguments == '{"a":"' + "x" * 1000 + '"}'


@pytest.mark.parametrize(
    ("format", "before"),
    [("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]"), ("llama", '{"name":"f"}')],
)
def test_long_blanks(format: ToolFormat, before: str) -> None:
    check_linear(format, before, " ", "")


def check_linear(format: ToolFormat, before: str, filling: str, after: str) -> None:
    """Eight times the text, some eight times the work; the square would be 64."""

    def seconds(size: int) -> float:
        reader = ToolCallReader(format, {"f"})
        text = before + filling * size + after
        began = time.process_time()
        reader.push(text)
        reader.finish()
        return time.process_time() - began

    small = max(min(seconds(100_000) for _ in range(3)), 0.002)
    assert min(seconds(800_000) for _ in range(3)) < 25 * small
