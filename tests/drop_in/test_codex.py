"""Check what Codex sends and reads, in the words of its version 0.169; `codex.mjs` runs it.

Its own instructions, and the descriptions of its tools, are left out.
"""

from __future__ import annotations

import json
from typing import Any

from harness.clever_engine import FACTS, REPORT
from harness.gateway.serving import Service

ID = "01a20429-760c-7a70-b320-df0ae8d2a55f"


def _tool(name: str, properties: dict[str, str], required: list[str]) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": "…",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in properties.items()},
            "required": required,
            "additionalProperties": False,
        },
    }


def _says(role: str, text: str, number: int) -> dict[str, Any]:
    return {
        "type": "message",
        "id": f"msg_01a20429-78c3-7610-b945-6f3f6272772{number}",
        "role": role,
        "content": [{"type": "input_text", "text": text}],
    }


#: The grammar of its editing tool.
PATCH = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
TOOLS = [
    _tool("exec_command", {"cmd": "string", "login": "boolean", "max_output_tokens": "number"},
          ["cmd"]),
    _tool("write_stdin", {"session_id": "number", "chars": "string"}, ["session_id"]),
    _tool("view_image", {"path": "string"}, ["path"]),
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "…",
        "format": {"type": "grammar", "syntax": "lark", "definition": PATCH},
    },
    {
        "type": "namespace",
        "name": "mcp__weather",
        "description": "Tools in the mcp__weather namespace.",
        "tools": [_tool("get_weather", {"city": "string"}, ["city"])],
    },
]  # fmt: skip
ASKED = [
    _says("developer", "You are a coding agent.", 1),
    _says("user", "<environment_context>\n  <shell>bash</shell>\n</environment_context>", 2),
    _says("user", "What is the weather in Paris? Look it up with get_weather.", 3),
]
BODY: dict[str, Any] = {
    "model": "clever",
    "stream": True,
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": ID,
    "client_metadata": {"session_id": ID, "thread_id": ID, "x-codex-window-id": f"{ID}:0"},
}


async def _done(service: Service, **fields: Any) -> list[dict[str, Any]]:
    """The items that a stream ends with: Codex takes them from `response.output_item.done`."""
    status, _, answer = await service.post("/v1/responses", {**BODY, **fields})
    assert status == 200, answer
    events = [
        json.loads(line.removeprefix("data: "))
        for line in answer.decode().splitlines()
        if line.startswith("data: ")
    ]
    assert events[-1]["type"] == "response.completed"
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


async def test_a_turn_with_a_call(clever: Service) -> None:
    (call,) = await _done(clever, input=ASKED)
    assert (call["type"], call["namespace"], call["name"]) == (
        "function_call", "mcp__weather", "get_weather",
    )  # fmt: skip
    assert json.loads(call["arguments"]) == {"city": FACTS["city"]}
    output = {
        "type": "function_call_output",
        "id": "fco_01a20429-7c0e-7e91-a69e-d40719459727",
        "call_id": call["call_id"],
        "output": [
            {"type": "input_text", "text": "Wall time: 0.0207 seconds\nOutput:"},
            {"type": "input_text", "text": REPORT},
        ],
    }
    (message,) = await _done(clever, input=[*ASKED, call, output])
    assert (message["type"], message["content"][0]["text"]) == ("message", REPORT)


async def test_an_answer_of_a_schema(clever: Service) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "temperature": {"type": "integer"}},
        "required": ["city", "temperature"],
        "additionalProperties": False,
    }
    format = {
        "type": "json_schema",
        "strict": True,
        "schema": schema,
        "name": "codex_output_schema",
    }
    asked = [ASKED[0], _says("user", "How warm is it in Paris?", 3)]
    (message,) = await _done(clever, input=asked, tools=[], text={"format": format})
    assert json.loads(message["content"][0]["text"]) == FACTS
