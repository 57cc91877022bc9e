"""Failures, time-outs, cancellations and clients that leave reach whoever has to know."""

from __future__ import annotations

import asyncio
import json

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import COMPLETIONS, Http, body_of, http_of
from harness.waiting import until


async def test_a_prompt_too_long_fails_the_variable_and_its_readers(http: Http) -> None:
    long = (await http.post("/v1/variables", json={"session": "s", "value": "x" * 1000})).json()
    first = await http.call(COMPLETIONS, long["reference"], parrot={"session": "s", "defer": True})
    second = await http.call(COMPLETIONS, first.json()["choices"][0]["text"])
    assert second.status_code == 424
    error = second.json()["error"]
    assert error["code"] == "dependency_failed"
    assert "maximum context length" in error["message"]
    assert first.headers["x-parrot-call"] in error["message"]
    assert second.headers["x-should-retry"] == "false"
    read = await http.value(first.headers["x-parrot-variable"])
    assert read.status_code == 424
    assert read.json()["variable"]["failure"]["code"] == "context_length_exceeded"
    attended = await http.call(COMPLETIONS, long["reference"])
    assert attended.status_code == 400
    assert attended.json()["error"]["code"] == "context_length_exceeded"


async def test_a_prompt_too_long_as_it_stands_is_refused_at_once(http: Http) -> None:
    parrot = {"session": "s", "defer": True}
    response = await http.call(COMPLETIONS, "x" * 1000, parrot=parrot)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_waits_of_attended_calls_end(engine: ScriptedRemoteEngine) -> None:
    async with http_of(engine, call_timeout_s=0.05) as http:
        late = (await http.post("/v1/variables", json={"session": "s", "name": "late"})).json()
        response = await http.call(COMPLETIONS, late["reference"])
        assert response.status_code == 504
        assert "'late'" in response.json()["error"]["message"]
        assert response.headers["x-should-retry"] == "false"


async def test_cancelled_calls_stop_on_the_engine(engine: ScriptedRemoteEngine) -> None:
    engine.automatic = False
    async with http_of(engine) as http:
        response = await http.call(COMPLETIONS, "x", parrot={"session": "s", "defer": True})
        reader = asyncio.create_task(http.call(COMPLETIONS, response.json()["choices"][0]["text"]))
        await engine.wait_for(lambda: bool(engine.contexts))
        await until(lambda: http.service.gateway.semantic.executor.statistics().waiting == 1)
        cancelled = await http.delete(f"/v1/calls/{response.headers['x-parrot-call']}")
        assert cancelled.json()["state"] == "cancelled"
        await engine.wait_for(lambda: not engine.contexts)
        assert (await reader).status_code == 424


@pytest.mark.parametrize("stream", [False, True])
async def test_attended_calls_can_be_cancelled_too(
    engine: ScriptedRemoteEngine, stream: bool
) -> None:
    engine.automatic = False
    async with http_of(engine) as http:
        parrot = {"session": "s", "output": "o"}
        call = asyncio.create_task(http.call(COMPLETIONS, "x", stream=stream, parrot=parrot))
        await engine.wait_for(lambda: bool(engine._fills or engine._runs))
        await http.delete("/v1/sessions/s")
        response = await call
        assert response.status_code == 409
        assert response.json()["error"]["code"] == "call_cancelled"
        await engine.wait_for(lambda: not engine.contexts)


@pytest.mark.parametrize("phase", ["waiting", "running"])
async def test_a_client_that_leaves_cancels_its_call(
    engine: ScriptedRemoteEngine, phase: str
) -> None:
    engine.automatic = False
    async with http_of(engine) as http:
        executor = http.service.gateway.semantic.executor
        source = {"session": "s", "name": "in", **({"value": "v"} if phase == "running" else {})}
        await http.post("/v1/variables", json=source)
        parrot = {"session": "s", "inputs": {"x": "in"}, "output": "o"}
        body = json.dumps(body_of(COMPLETIONS, "{{x}}", parrot=parrot)).encode()
        _, writer = await http.service.send(COMPLETIONS, body)
        if phase == "waiting":
            await until(lambda: executor.statistics().waiting == 1)
        else:
            await engine.wait_for(lambda: bool(engine.contexts))
        writer.transport.abort()
        await until(lambda: executor.statistics().cancelled == 1)
        await engine.wait_for(lambda: not engine.contexts)
        listed = (await http.get("/v1/variables", params={"session": "s"})).json()["data"]
        assert {v["name"]: v["state"] for v in listed}["o"] == "cancelled"


async def test_deferred_calls_do_not_care_whether_their_client_stays(http: Http) -> None:
    parrot = {"session": "s", "output": "o", "defer": True}
    body = json.dumps(body_of(COMPLETIONS, "x", parrot=parrot)).encode()
    reader, writer = await http.service.send(COMPLETIONS, body)
    await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()
    listed = (await http.get("/v1/variables", params={"session": "s"})).json()["data"]
    assert (await http.value(listed[0]["id"])).json()["value"] == "<x>"
