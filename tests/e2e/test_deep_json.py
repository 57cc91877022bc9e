"""JSON that can be decoded and is too deep for what is done with it: a bad request, no failure."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.processes import DEMO_MODEL, GatewayProcess
from harness.raw_http import check_error

#: Decoders stop at some 970 levels; Python code that works on their results at half of that.
DEPTHS = (60, 330, 480, 500, 700, *range(930, 1000, 3))
FUNCTION = '{"type":"function","function":{"name":"f","parameters":%s}}'
FIELDS = {
    "schema": '"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":%s}}',
    "tools": f'"tools":[{FUNCTION}]',
    "required": f'"tool_choice":"required","tools":[{FUNCTION}]',
    "variables": '"chat_template_kwargs":%s',
    "metadata": '"metadata":%s',
    "unknown": '"something":%s',
    "parrot": '"parrot":{"session":"deep","inputs":%s}',
}
CALLS = '{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":%s}}]},'


def body(field: str, messages: str = "") -> bytes:
    asked = '{"role":"user","content":"x"}'
    text = f'{{"model":"{DEMO_MODEL}","max_tokens":1,{field}"messages":[{messages}{asked}]}}'
    return text.encode()


def check_answered(demo: GatewayProcess, sent: bytes) -> None:
    answer = demo.ask("POST", "/v1/chat/completions", sent)
    if answer.status != 200:
        check_error(answer, 400)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("level", ['{"a":', '{"a":['])
def test_fields(demo: GatewayProcess, name: str, level: str) -> None:
    for depth in DEPTHS:
        levels = depth // (len(level) - 4)
        value = level * levels + "1" + level[::-1].translate(_CLOSING) * levels
        check_answered(demo, body(FIELDS[name] % value + ","))


@pytest.mark.parametrize("is_text", [False, True])
def test_tool_calls_of_messages(demo: GatewayProcess, is_text: bool) -> None:
    for depth in DEPTHS:
        value: Any = '{"a":' * depth + "1" + "}" * depth
        if is_text:
            value = json.dumps(value)
        check_answered(demo, body("", CALLS % value))


_CLOSING = str.maketrans({"{": "}", "[": "]", '"': None, ":": None, "a": None})
