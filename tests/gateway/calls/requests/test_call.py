"""Requests of calls: what is decoded when, and that values land in types as they do in JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import CHAT, PATHS, http_of
from parrot_engine.protocol import Generate

from parrot_gateway.calls.requests import call, chat
from parrot_gateway.calls.requests.call import CallKind, CallRequest
from parrot_gateway.calls.requests.types import ChatBody
from parrot_gateway.exceptions import InvalidRequestError, RequestTooLargeError
from parrot_gateway.semantic.templates.body_template import BodyTemplate
from parrot_gateway.semantic.templates.reference import mint_variable_id, reference_of
from parrot_gateway.semantic.templates.text_template import MAX_INSERTED_CHARACTERS, Binding

V, W = mint_variable_id(), mint_variable_id()
REF = reference_of(V)
VALUES = {V: 'a "quoted"\n value \\ é', W: "{{name}}"}
PLAIN = {"model": "m", "temperature": 0.5, "unknown": {"a": [1, REF]}, "parrot": {"defer": True}}

BODIES: list[tuple[CallKind, dict[str, Any]]] = [
    ("completions", {"prompt": f"{REF} and {{{{name}}}}", "suffix": REF}),
    ("completions", {"prompt": ["x", REF, "y"]}),
    ("completions", {"prompt": [[1, 2], [3]]}),
    ("chat", {"messages": [{"role": "user", "content": f"so: {REF}"}]}),
    (
        "chat",
        {
            "messages": [
                {"role": "system", "content": "constant", "reasoning": REF},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": f"{{{{name}}}} {REF}", "odd": REF},
                        {"type": "image_url", "image_url": {"url": REF}},
                        {"type": "refusal", "refusal": REF},
                    ],
                },
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": REF,
                    "tool_calls": [
                        {"id": REF, "function": {"name": "f", "arguments": f'{{"a": "{REF}"}}'}},
                        {"id": "c", "custom": {"input": REF}},
                    ],
                    "function_call": {"name": "g", "arguments": f'["{REF}"]'},
                },
            ],
            "prediction": {"content": REF},
            "tools": [{"type": "function", "function": {"name": REF}}],
            "stop": REF,
        },
    ),
]


@pytest.mark.parametrize(("kind", "fields"), BODIES)
def test_values_land_in_types_as_in_json(kind: CallKind, fields: dict[str, Any]) -> None:
    request = CallRequest(kind, json.dumps(PLAIN | fields).encode())
    template = BodyTemplate.of_call(request, {"name": Binding(variable_id=W)})
    before = request.typed
    bound = request.bound(template, VALUES)
    decoded = CallRequest(kind, template.render(VALUES)).typed
    assert bound.typed == decoded
    assert bound.body == template.render(VALUES)
    assert "parrot" not in bound.fields
    # The request itself stays as it was.
    assert request.typed is before == CallRequest(kind, json.dumps(PLAIN | fields).encode()).typed


def test_without_values_the_request_stays_itself() -> None:
    request = CallRequest("chat", b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}')
    assert request.bound(BodyTemplate.of_call(request), {}) is request


def test_too_large_values_are_refused_in_both_forms() -> None:
    request = CallRequest("completions", json.dumps({"prompt": REF}).encode())
    bound = request.bound(BodyTemplate.of_call(request), {V: "x" * (MAX_INSERTED_CHARACTERS + 1)})
    for read in (lambda: bound.typed, lambda: bound.body):
        with pytest.raises(RequestTooLargeError):
            read()


def test_only_what_is_asked_for_is_checked() -> None:
    request = CallRequest("chat", b'{"model": "m", "stream": true, "n": "many"}')
    assert (request.model, request.head.stream) == ("m", True)
    with pytest.raises(InvalidRequestError, match="'n'"):
        _ = request.typed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "decimal above maximum value. Expected a value <= 2, but got 3.0"),
        ({"n": 0}, "integer below minimum value. Expected a value >= 1, but got 0"),
        ({"stop": list("abcde")}, "maximum length 4, but got an array with length 5"),
        ({"stop": ["x" * 5000]}, "Invalid 'stop': string too long"),
        ({"logit_bias": {"1": 0, "2": -101}}, "Expected a value >= -100, but got -101"),
        ({"metadata": {str(i): "" for i in range(17)}}, "17 entries, at most 16"),
        ({"seed": 10**30}, "a number of more than 18 digits"),
    ],
)
def test_what_is_out_of_range_is_told_with_its_value(fields: dict[str, Any], message: str) -> None:
    request = CallRequest("chat", json.dumps(fields).encode())
    with pytest.raises(InvalidRequestError) as caught:
        _ = request.typed
    assert message in caught.value.message
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize("inputs", [{}, {"x": {"value": "bound"}}])
async def test_a_deferred_chat_is_decoded_and_checked_once(
    engine: ScriptedRemoteEngine, monkeypatch: pytest.MonkeyPatch, inputs: dict[str, Any]
) -> None:
    checks, decodes = [], []
    check, decode = chat.check_sampling, call.decode

    def noted_check(request: ChatBody, info: Any) -> Any:
        checks.append(request)
        return check(request, info)

    def noted_decode(body: bytes, decoder: Any) -> Any:
        found = decode(body, decoder)
        decodes.append(type(found))
        return found

    monkeypatch.setattr(chat, "check_sampling", noted_check)
    monkeypatch.setattr(call, "decode", noted_decode)
    async with http_of(engine) as http:
        parrot = {"session": "s", "defer": True, "inputs": inputs}
        text = "{{x}}" if inputs else "bound"
        answer = await http.call(CHAT, text, parrot=parrot)
        value = (await http.value(answer.headers["x-parrot-variable"])).json()["value"]
    assert "bound" in value
    assert len(checks) == 1
    assert sum(issubclass(kind, ChatBody) for kind in decodes) == 1
    assert len(decodes) == 2


@pytest.mark.parametrize("path", PATHS)
async def test_what_binding_changes_is_all_that_changes(
    engine: ScriptedRemoteEngine, path: str
) -> None:
    async with http_of(engine) as http:
        for text, inputs in (("one value", {}), ("one {{x}}", {"x": {"value": "value"}})):
            parrot = {"session": "s", "defer": True, "inputs": inputs}
            fields = {"temperature": 0.25, "seed": 3, "stop": ["zzz"], "logit_bias": {"7": 1}}
            answer = await http.call(path, text, parrot=parrot | {"dedupe": False}, **fields)
            await http.value(answer.headers["x-parrot-variable"])
    first, second = [item.sampling for item in engine.submitted if isinstance(item, Generate)]
    assert first == second
