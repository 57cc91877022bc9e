"""Refusals of semantic calls, and placeholders that are ordinary text."""

from __future__ import annotations

from typing import Any

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import (
    CHAT,
    COMPLETIONS,
    PATHS,
    Http,
    answer_to,
    body_of,
    text_of,
)

from parrot_gateway.semantic.templates.reference import reference_of

#: Has the form of an id.
UNKNOWN = "v" + "a" * 26


@pytest.mark.parametrize(
    ("parrot", "extra", "status", "param"),
    [
        ({"defer": True}, {"n": 2}, 400, "n"),
        ({"output": "o"}, {"n": 2}, 400, "n"),
        ({"defer": True}, {"prompt": ["a", "b"]}, 400, "prompt"),
        ({"defer": True}, {"model": None}, 400, "model"),
        ({"defer": True}, {"temperature": 9}, 400, "temperature"),
        ({"defer": True}, {"suffix": "x"}, 400, "suffix"),
        ({"transform": "strip"}, {}, 400, "transform"),
        ({"defer": True, "transform": "strip |"}, {}, 400, "transform"),
        ({"inputs": {"unused": "v"}}, {}, 400, "inputs"),
        ({"inputs": {"x": "v"}}, {"prompt": "{{x}} {{other}}"}, 400, "inputs"),
        ({"inputs": {"x": UNKNOWN}}, {"prompt": "{{x}}"}, 404, "inputs"),
        ({"colour": "red"}, {}, 400, "parrot.colour"),
        ({}, {"prompt": reference_of(UNKNOWN)}, 404, "variable"),
    ],
)
async def test_what_cannot_be_done_is_refused_at_once(
    http: Http,
    engine: ScriptedRemoteEngine,
    parrot: dict[str, Any],
    extra: dict[str, Any],
    status: int,
    param: str,
) -> None:
    body = body_of(COMPLETIONS, "x") | extra | ({"parrot": parrot} if parrot else {})
    response = await http.post(COMPLETIONS, json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    assert engine.submitted == []
    assert (await http.get("/v1/sessions")).json()["data"] == []


async def test_unknown_headers_are_named(http: Http) -> None:
    response = await http.post(
        COMPLETIONS, json=body_of(COMPLETIONS, "x"), headers={"X-Parrot-Sesion": "s"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Parrot-Sesion"


async def test_an_output_is_written_by_one_call(http: Http) -> None:
    parrot = {"session": "s", "output": "o", "defer": True}
    first = await http.call(COMPLETIONS, "x", parrot=parrot)
    second = await http.call(COMPLETIONS, "y", parrot=parrot)
    assert (first.status_code, second.status_code) == (200, 409)
    assert second.json()["error"]["code"] == "output_taken"
    assert second.headers["x-should-retry"] == "false"


async def test_a_cycle_is_named(http: Http) -> None:
    for output, source in (("a", "b"), ("b", "c")):
        parrot = {"session": "s", "output": output, "inputs": {"x": source}, "defer": True}
        assert (await http.call(COMPLETIONS, "{{x}}", parrot=parrot)).status_code == 200
    parrot = {"session": "s", "output": "c", "inputs": {"x": "a"}, "defer": True}
    response = await http.call(COMPLETIONS, "{{x}}", parrot=parrot)
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "dependency_cycle"
    assert "'a'" in response.json()["error"]["message"]
    await http.delete("/v1/sessions/s")


@pytest.mark.parametrize(
    "text",
    [
        "{{ user.name }} {% for x in y %}{{x}}{% endfor %}",
        r"\frac{{a}}{{b}} and \textbf{{x}}",
        '{"a": {"b": {}}} {{x}}',
        'f"{{x}} {y}"',
        "[[parrot:]] [[parrot:vabc]] [[x]]",
    ],
)
@pytest.mark.parametrize("path", PATHS)
async def test_braces_and_brackets_of_users_stay(http: Http, path: str, text: str) -> None:
    response = await http.call(path, text)
    assert text_of(path, response.json()) == answer_to(path, text)
    assert not [name for name in response.headers if name.startswith("x-parrot")]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": "required"},
        {"functions": [TOOL["function"]]},
    ],
)
async def test_tools_that_may_be_called_are_refused_at_once(
    http: Http, fields: dict[str, Any]
) -> None:
    response = await http.call(CHAT, "x", parrot={"defer": True, "session": "s"}, **fields)
    assert response.status_code == 400
    problem = response.json()["error"]
    assert problem["param"] == "parrot.defer"
    assert next(iter(fields)) in problem["message"]
    assert (await http.get("/v1/sessions")).json()["data"] == []


@pytest.mark.parametrize(
    "fields",
    [{"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {"tools": None}, {"functions": []}],
)
async def test_tools_that_may_not_are_taken(http: Http, fields: dict[str, Any]) -> None:
    response = await http.call(CHAT, "x", parrot={"defer": True}, **fields)
    assert response.status_code == 200, response.text
