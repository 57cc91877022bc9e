"""Variables, sessions and calls by themselves, over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import COMPLETIONS, Http, http_of
from harness.waiting import until

from parrot_gateway.api.semantic.fields import FIELDS
from parrot_gateway.semantic.templates.reference import reference_of

#: Has the form of an id.
UNKNOWN = "v" + "a" * 26


async def made(http: Http, **fields: Any) -> dict[str, Any]:
    """A new variable."""
    response = await http.post("/v1/variables", json={"session": "s", **fields})
    assert response.status_code == 201, response.text
    return dict(response.json())


async def test_a_variable_is_created_set_once_and_read(http: Http) -> None:
    variable = await made(http, name="x")
    assert (variable["name"], variable["state"], variable["value"]) == ("x", "empty", None)
    assert variable["reference"] == reference_of(variable["id"])
    url = f"/v1/variables/{variable['id']}"
    reading = asyncio.create_task(http.get(url))
    await until(lambda: http.service.gateway.semantic.describe()["readers"] == 1)
    written = await http.put(url, json={"value": "héllo"})
    assert written.json()["size_bytes"] == 6
    assert (await reading).json()["value"] == "héllo"
    again = await http.put(url, json={"value": "other"})
    assert again.status_code == 409
    assert again.json()["error"]["code"] == "variable_already_written"
    assert again.headers["x-should-retry"] == "false"


async def test_a_reference_names_a_variable_too(http: Http) -> None:
    variable = await made(http, value="v")
    reference = variable["reference"]
    inside = reference.removeprefix("[[").removesuffix("]]")
    for text in (reference, quote(reference), inside, quote(inside, safe="")):
        response = await http.get(f"/v1/variables/{text}")
        assert response.json()["value"] == "v"
    for text in (reference[:-1], inside + "x", inside[:-1]):
        assert (await http.get(f"/v1/variables/{text}")).status_code == 404


async def test_creating_what_readers_wait_for(http: Http) -> None:
    parrot = {"session": "s", "inputs": {"x": "late"}, "defer": True}
    answer = await http.call(COMPLETIONS, "{{x}}", parrot=parrot)
    await made(http, name="late", value="v")
    read = await http.value(answer.headers["x-parrot-variable"])
    assert read.json()["value"] == "<v>"


async def test_waits_end_when_they_shall(http: Http) -> None:
    variable = await made(http)
    response = await http.get(f"/v1/variables/{variable['id']}", params={"timeout": "0.01"})
    assert (response.status_code, response.json()["state"]) == (200, "empty")


async def test_waits_without_a_time_of_their_own_end_too(engine: ScriptedRemoteEngine) -> None:
    async with http_of(engine, call_timeout_s=0.05) as http:
        variable = await made(http)
        response = await http.value(variable["id"])
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "timeout"
        assert response.json()["variable"]["state"] == "empty"


async def test_a_reader_that_leaves_is_forgotten(http: Http) -> None:
    variable = await made(http)
    _, writer = await http.service.connect()
    writer.write(f"GET /v1/variables/{variable['id']} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await until(lambda: http.service.gateway.semantic.describe()["readers"] == 1)
    writer.transport.abort()
    await until(lambda: http.service.gateway.semantic.describe()["readers"] == 0)


async def test_text_streams_as_it_is_written(engine: ScriptedRemoteEngine) -> None:
    engine.automatic = False
    async with http_of(engine, keep_alive_s=0.02) as http:
        answer = await http.call(COMPLETIONS, "abc", parrot={"session": "s", "defer": True})
        variable = answer.headers["x-parrot-variable"]
        headers = {"accept": "text/event-stream"}
        texts: list[str] = []
        async with http.stream("GET", f"/v1/variables/{variable}", headers=headers) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            await engine.wait_for(lambda: bool(engine.contexts))
            async for line in lines:
                if line == ": keep-alive":
                    # Only now does the engine go on: what came so far came while it was written.
                    engine.step()
                elif line.startswith("data: {"):
                    event = json.loads(line[6:])
                    texts += [event["text"]] if "text" in event else []
                    last = event
        assert "".join(texts) == "<abc>"
        assert len(texts) > 1
        assert last["state"] == "ready"
        assert "value" not in last


async def test_streams_of_failures_tell_them(http: Http) -> None:
    parrot = {"session": "s", "defer": True, "transform": "json(/a)"}
    answer = await http.call(COMPLETIONS, "x", parrot=parrot)
    response = await http.get(
        f"/v1/variables/{answer.headers['x-parrot-variable']}",
        headers={"accept": "text/event-stream"},
    )
    *_, failure, done = [line for line in response.text.split("\n") if line.startswith("data")]
    assert json.loads(failure[6:])["error"]["code"] == "dependency_failed"
    assert done == "data: [DONE]"


async def test_failed_variables_tell_why(http: Http) -> None:
    parrot = {"session": "s", "defer": True, "transform": "json(/a)", "output": "o"}
    answer = await http.call(COMPLETIONS, "x", parrot=parrot)
    response = await http.value(answer.headers["x-parrot-variable"])
    assert response.status_code == 424
    body = response.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "'o'" in body["error"]["message"]
    assert answer.headers["x-parrot-call"] in body["error"]["message"]
    assert body["variable"]["failure"]["code"] == "transform_failed"


async def test_nobody_writes_what_a_call_writes(http: Http) -> None:
    late = await made(http)
    parrot = {"session": "s", "defer": True}
    answer = await http.call(COMPLETIONS, late["reference"], parrot=parrot)
    url = f"/v1/variables/{answer.headers['x-parrot-variable']}"
    written = await http.put(url, json={"value": "mine"})
    assert written.status_code == 409
    assert written.json()["error"]["code"] == "output_taken"
    in_use = await http.delete(url)
    assert in_use.status_code == 409
    assert in_use.json()["error"]["code"] == "variable_in_use"
    await http.put(f"/v1/variables/{late['id']}", json={"value": "go"})
    await http.get(url)
    assert (await http.delete(url)).json()["deleted"] is True
    assert (await http.get(url)).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("GET", f"/v1/variables/{UNKNOWN}", None, 404, "id"),
        ("PUT", f"/v1/variables/{UNKNOWN}", {"value": "x"}, 404, "id"),
        ("DELETE", f"/v1/variables/{UNKNOWN}", None, 404, "id"),
        ("GET", "/v1/variables", None, 400, "session"),
        ("GET", "/v1/variables?session=nobody", None, 404, "session"),
        ("GET", "/v1/variables?sesion=s", None, 400, "sesion"),
        ("GET", "/v1/variables/x?timeout=soon", None, 404, "id"),
        ("POST", "/v1/variables", {"name": "x"}, 400, "session"),
        ("POST", "/v1/variables", {"session": "s", "value": 5}, 400, "value"),
        ("POST", "/v1/variables", {"session": "s", "nam": "x"}, 400, None),
        ("POST", "/v1/resolve", {}, 400, "text"),
        ("POST", "/v1/resolve", {"text": "a", "value": "b"}, 400, "text"),
        ("POST", "/v1/resolve", {"text": reference_of(UNKNOWN)}, 404, "variable"),
        ("GET", "/v1/sessions/nobody", None, 404, "session"),
        ("DELETE", "/v1/sessions/nobody", None, 404, "session"),
        ("GET", "/v1/sessions/nobody/graph", None, 404, "session"),
        ("GET", "/v1/calls/call_0", None, 404, "call"),
        ("DELETE", "/v1/calls/call_0", None, 404, "call"),
        ("PATCH", "/v1/variables/x", None, 405, None),
        ("PUT", "/v1/resolve", {}, 405, None),
    ],
)
async def test_what_cannot_be_answered_is_told(
    http: Http, method: str, path: str, body: Any, status: int, param: str | None
) -> None:
    response = await http.request(method, path, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param


async def test_a_wrong_timeout_is_told(http: Http) -> None:
    variable = await made(http)
    for wrong in ("soon", "-1", "nan"):
        response = await http.get(f"/v1/variables/{variable['id']}", params={"timeout": wrong})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "timeout"


async def test_references_are_resolved_anywhere(http: Http) -> None:
    parrot = {"session": "s", "defer": True}
    reference = (await http.call(COMPLETIONS, "x", parrot=parrot)).json()["choices"][0]["text"]
    resolved = await http.post("/v1/resolve", json={"text": f"so {reference} it is"})
    assert resolved.json() == {"text": "so <x> it is"}
    nested = {"a": [f"{reference}", 5, {"b": json.dumps({"c": reference})}], "n": None}
    resolved = await http.post("/v1/resolve", json={"value": nested})
    expected = {"a": ["<x>", 5, {"b": json.dumps({"c": "<x>"})}], "n": None}
    assert resolved.json() == {"value": expected}


async def test_resolving_waits_as_long_as_told(http: Http) -> None:
    variable = await made(http, name="never")
    response = await http.post("/v1/resolve", json={"text": variable["reference"], "timeout": 0.01})
    assert response.status_code == 504
    assert "'never'" in response.json()["error"]["message"]


async def test_sessions_are_listed_described_and_deleted(http: Http) -> None:
    await made(http, value="12345")
    (listed,) = (await http.get("/v1/sessions")).json()["data"]
    assert (listed["name"], listed["variables"], listed["value_bytes"]) == ("s", 1, 5)
    for name in ("s", listed["id"]):
        assert (await http.get(f"/v1/sessions/{name}")).json() == listed | {
            "last_used": pytest.approx(listed["last_used"], abs=60)
        }
    assert (await http.delete(f"/v1/sessions/{listed['id']}")).json()["deleted"] is True
    assert (await http.get("/v1/sessions")).json()["data"] == []


async def test_names_with_slashes_are_escaped(http: Http) -> None:
    await http.post("/v1/variables", json={"session": "a/b c", "value": "x"})
    assert (await http.get("/v1/sessions/a%2Fb%20c")).json()["name"] == "a/b c"
    assert (await http.get("/v1/sessions/a%2Fb%20c/graph")).status_code == 200


async def test_calls_are_described(http: Http) -> None:
    answer = await http.call(
        COMPLETIONS, "x", parrot={"session": "s", "defer": True, "priority": 2, "name": "n"}
    )
    await http.value(answer.headers["x-parrot-variable"])
    call = (await http.get(f"/v1/calls/{answer.headers['x-parrot-call']}")).json()
    assert (call["state"], call["name"], call["priority"]) == ("done", "n", 2)
    assert call["output"] == answer.headers["x-parrot-variable"]
    assert call["submitted"] <= call["started"] <= call["first_token"] <= call["finished"]


async def test_values_over_the_limit_are_refused(http: Http) -> None:
    response = await http.post("/v1/variables", json={"session": "s", "value": "x" * 5_000_000})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "value_too_large"
    listed = (await http.get("/v1/variables", params={"session": "s"})).json()
    assert listed["data"] == []


async def test_the_document_has_every_semantic_field_and_header(http: Http) -> None:
    document = (await http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    assert set(schemas["SemanticFields"]["properties"]) == set(FIELDS.values())
    for path, body in (("/v1/completions", "CompletionBody"), ("/v1/chat/completions", "ChatBody")):
        call = document["paths"][path]["post"]
        assert {each["name"].lower().encode() for each in call["parameters"]} == set(FIELDS)
        reference = schemas[body]["properties"]["parrot"]
        assert reference == {"$ref": "#/components/schemas/SemanticFields"}


async def test_the_description_of_the_api_has_all_routes(http: Http) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    for path in ("variables", "variables/{id}", "resolve", "sessions", "sessions/{id}",
                 "sessions/{id}/graph", "calls/{id}"):  # fmt: skip
        assert f"/v1/{path}" in paths
    parrot = {"session", "session/{session_id}", "semantic_call", "semantic_var",
              "semantic_var/{var_id}", "transform"}  # fmt: skip
    assert {f"/v1/{path}" for path in parrot} <= paths.keys()
    assert paths["/v1/semantic_var"].keys() == {"get", "post"}


async def test_names_of_sessions_may_hold_slashes(http: Http) -> None:
    parrot = {"session": "team/app run", "output": "one", "defer": True}
    await http.call(COMPLETIONS, "a", parrot=parrot)
    for url in ("/v1/sessions/team%2Fapp%20run", "/v1/sessions/team%2fapp%20run/graph"):
        response = await http.get(url)
        assert response.status_code == 200, response.text
    assert (await http.delete("/v1/sessions/team%2Fapp%20run")).status_code == 200
    assert (await http.get("/v1/sessions/team%2Fapp%20run")).status_code == 404
