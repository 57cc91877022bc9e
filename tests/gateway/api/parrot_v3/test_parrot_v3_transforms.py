"""Transforms by way of Parrot's own API, and native functions with code, which are refused."""

from __future__ import annotations

from typing import Any

import pytest
from harness.gateway.parrot_v3_client import V3Client, V3Error, Var
from harness.gateway.serving import Service
from harness.gateway.v3_service import Model


async def test_transforms_are_nodes_between_calls(
    client: V3Client, service: Service, model: Model
) -> None:
    start = await client.variable("start")
    said = (await client.call("say:{{x}}{{y}}", {"x": start}, {"y": {}}))["y"]
    answer = await client.send(
        "POST",
        "/transform",
        {**client.owned, "input": said.id, "transform": "strip('[]') | upper", "func_name": "up"},
    )
    infos = {info["parameter_name"]: info for info in answer["param_info"]}
    assert infos["input"]["var_id"] == said.id
    upper = Var("upper", infos["output"]["var_id"])
    out = (await client.call("say:{{x}}{{y}}", {"x": upper}, {"y": {}}))["y"]
    (session,) = service.gateway.semantic.sessions.of_tenant("default")
    snapshot = service.gateway.semantic.snapshot(session)
    assert [node.kind for node in snapshot.nodes] == ["call", "transform", "call"]
    assert snapshot.nodes[1].detail == "strip('[]') | upper"
    await client.set(start, "abc")
    assert await client.get(out) == "[ABC]"
    assert await client.get(upper) == "ABC"
    assert model.prompts == ["say:abc", "say:ABC"]


async def test_many_transforms_in_a_row(client: V3Client, service: Service) -> None:
    first = await client.variable("first")
    last = first
    (session,) = service.gateway.semantic.sessions.of_tenant("default")
    for _ in range(20):
        target = await client.variable("next")
        body = {**client.owned, "input": last.id, "output": target.id, "transform": "strip | lower"}
        await client.send("POST", "/transform", body)
        last = target
    assert session.graph.num_unfinished == 20
    await client.set(first, " ABC ")
    assert await client.get(last) == "abc"


async def test_failing_transforms_reach_get(client: V3Client) -> None:
    source = await client.variable("source", "no json")
    target = await client.variable("target")
    body = {**client.owned, "input": source.id, "output": target.id, "transform": "json('/a')"}
    await client.send("POST", "/transform", body)
    out = (await client.call("say:{{x}}{{y}}", {"x": target}, {"y": {}}))["y"]
    for variable in (target, out):
        with pytest.raises(V3Error, match="json") as caught:
            await client.get(variable)
        assert caught.value.code == "dependency_failed"


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"transform": "strip |"}, 400, "transform"),
        ({"transform": "truncate(tokens=3)"}, 400, "transform"),
        ({"transform": 5}, 400, "transform"),
        ({"input": "v" * 27}, 404, "input"),
        ({"output": "v" * 27}, 404, "output"),
        ({"output": "itself"}, 409, "output"),
    ],
)
async def test_bad_transforms_are_named(
    client: V3Client, service: Service, changes: dict[str, Any], status: int, param: str
) -> None:
    source = await client.variable("source")
    if changes.get("output") == "itself":
        await client.set(source, "x")
        changes = {"output": source.id}
    body = {**client.owned, "input": source.id, "transform": "strip", **changes}
    with pytest.raises(V3Error) as caught:
        await client.send("POST", "/transform", body)
    assert (caught.value.status, caught.value.error["param"]) == (status, param)
    assert service.gateway.semantic.describe()["sessions"]["variables"] == 1


@pytest.mark.parametrize("path", ["/py_native_call", "/submit_py_native_call"])
async def test_code_is_refused_and_transforms_are_named(client: V3Client, path: str) -> None:
    body = {
        "session_id": client.session_id,
        "func_name": "f",
        "func_code": "4wAAAAAAAAA=",
        "parameters": [],
        "timeout": 1.0,
        "output_criteria": None,
    }
    with pytest.raises(V3Error, match="/v1/transform") as caught:
        await client.send("POST", path, body)
    assert caught.value.status == 400
