"""Calls that wait for their inputs while their client waits for them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import (
    CHAT,
    COMPLETIONS,
    PATHS,
    Http,
    answer_to,
    body_of,
    events_of,
    http_of,
    text_of,
)
from harness.waiting import until


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_attended_calls_wait_for_their_inputs(http: Http, path: str, stream: bool) -> None:
    late = (await http.post("/v1/variables", json={"session": "s", "name": "late"})).json()
    task = asyncio.create_task(
        http.call(path, "so: " + late["reference"], stream=stream, parrot={"output": "o"})
    )
    semantic = http.service.gateway.semantic
    await until(lambda: semantic.executor.statistics().waiting == 1)
    await http.put(f"/v1/variables/{late['id']}", json={"value": "v"})
    response = await task
    if stream:
        choices = [event["choices"][0] for event in events_of(response)]
        texts = [c["delta"].get("content") or "" if path == CHAT else c["text"] for c in choices]
        assert "".join(texts) == answer_to(path, "so: v")
    else:
        assert text_of(path, response.json()) == answer_to(path, "so: v")
        assert response.headers["x-parrot-cached-tokens"] == "0"
    assert response.headers["x-parrot-engine"] == "scripted"
    assert response.headers["x-parrot-queue-ms"].isdigit()
    assert response.headers["x-parrot-session"] == late["session"]
    variable = (await http.value(response.headers["x-parrot-variable"])).json()
    assert (variable["name"], variable["value"]) == ("o", answer_to(path, "so: v"))


async def test_the_queue_header_tells_of_the_wait_for_inputs(http: Http) -> None:
    parrot = {"session": "s", "inputs": {"x": "x"}}
    call = asyncio.create_task(http.call(COMPLETIONS, "{{x}}", parrot=parrot))
    await until(lambda: http.service.gateway.semantic.executor.statistics().waiting == 1)
    begun = time.perf_counter()
    listed = (await http.get("/v1/variables", params={"session": "s"})).json()["data"]
    waited_ms = (time.perf_counter() - begun) * 1000
    await http.put(f"/v1/variables/{listed[0]['id']}", json={"value": "v"})
    response = await call
    assert int(response.headers["x-parrot-queue-ms"]) >= int(waited_ms)


async def test_only_whole_answers_tell_what_was_cached(engine: ScriptedRemoteEngine) -> None:
    engine.tokens_per_step = 200
    async with http_of(engine) as http:
        for stream in (False, True):
            parrot = {"session": "s"}
            response = await http.call(COMPLETIONS, "x", stream=stream, parrot=parrot)
            assert response.status_code == 200
            assert ("x-parrot-cached-tokens" in response.headers) is not stream


@asynccontextmanager
async def waiting_stream(
    engine: ScriptedRemoteEngine,
) -> AsyncIterator[tuple[Http, str, httpx.Response, AsyncIterator[str]]]:
    """A stream that has got a comment and waits for a variable: client, variable, stream, lines."""
    async with http_of(engine, keep_alive_s=0.02) as http:
        late = (await http.post("/v1/variables", json={"session": "s"})).json()
        body = body_of(COMPLETIONS, late["reference"], stream=True)
        async with http.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            yield http, late["id"], response, lines


async def test_streams_are_kept_alive_while_they_wait(engine: ScriptedRemoteEngine) -> None:
    async with waiting_stream(engine) as (http, late, response, lines):
        assert response.headers["x-parrot-call"]
        await http.put(f"/v1/variables/{late}", json={"value": "v"})
        rest = [line async for line in lines]
    texts = [json.loads(t[6:])["choices"][0]["text"] for t in rest if t.startswith("data: {")]
    assert "".join(texts) == "<v>"
    assert [line for line in rest if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("fault", ["producer", "prompt"])
async def test_failures_after_a_comment_go_in_band(
    engine: ScriptedRemoteEngine, fault: str
) -> None:
    async with waiting_stream(engine) as (http, late, _, lines):
        if fault == "producer":
            await http.delete("/v1/sessions/s")
        else:
            await http.put(f"/v1/variables/{late}", json={"value": "x" * 1000})
        rest = [line for line in [line async for line in lines] if line.startswith("data")]
    error = json.loads(rest[0][6:])["error"]
    wanted = "call_cancelled" if fault == "producer" else "context_length_exceeded"
    assert error["code"] == wanted
    assert rest[1:] == ["data: [DONE]"]


async def test_values_may_come_with_the_request(http: Http) -> None:
    parrot = {"inputs": {"x": {"value": "{{y}} [[parrot:]]"}}}
    response = await http.call(COMPLETIONS, "{{x}}!", parrot=parrot)
    assert response.json()["choices"][0]["text"] == "<{{y}} [[parrot:]]!>"


async def test_json_in_prompts_stays_json(http: Http, engine: ScriptedRemoteEngine) -> None:
    value = 'he said "hi"\n'
    source = (await http.post("/v1/variables", json={"session": "s", "value": value})).json()
    prompt = json.dumps({"text": source["reference"]})
    response = await http.call(COMPLETIONS, prompt)
    said = response.json()["choices"][0]["text"][1:-1]
    assert json.loads(said) == {"text": value}


@pytest.mark.parametrize("path", PATHS)
async def test_the_body_wins_over_headers(http: Http, path: str) -> None:
    body = body_of(path, "x", parrot={"output": "from-body"})
    headers = {"X-Parrot-Output": "from-header", "X-Parrot-Session": "s"}
    await http.post(path, json=body, headers=headers)
    listed = (await http.get("/v1/variables", params={"session": "s"})).json()["data"]
    assert [variable["name"] for variable in listed] == ["from-body"]


async def test_other_sources_name_the_session(http: Http) -> None:
    for _ in range(2):
        await http.post(
            COMPLETIONS,
            json=body_of(COMPLETIONS, "x"),
            headers={"x-session-id": "abc", "X-Parrot-Priority": "3"},
        )
    sessions = (await http.get("/v1/sessions")).json()["data"]
    assert [(s["name"], s["calls"]["finished"]) for s in sessions] == [("x-session-id:abc", 2)]


@pytest.mark.parametrize("strangers", [0, 300])
async def test_headers_seen_before_hide_no_session(http: Http, strangers: int) -> None:
    """Headers that mean nothing are remembered as such, up to a bound."""

    async def session_of(headers: dict[str, str]) -> str | None:
        answer = await http.post(COMPLETIONS, json=body_of(COMPLETIONS, "x"), headers=headers)
        assert answer.status_code == 200
        return answer.headers.get("x-parrot-session")

    seen = {f"x-stranger-{number}": "s" for number in range(strangers)}
    assert await session_of(seen) is None
    for headers in ({"x-session-id": "abc"}, {"x-acme-session-id": "12345678"}):
        assert await session_of(seen | headers) is not None
        assert await session_of(seen) is None
    unknown = await http.post(
        COMPLETIONS, json=body_of(COMPLETIONS, "x"), headers={"X-Parrot-Defered": "true"}
    )
    assert unknown.json()["error"]["code"] == "unknown_header"
