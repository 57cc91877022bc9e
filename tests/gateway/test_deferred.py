"""Semantic calls over the ordinary routes, on a real server with the real client."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parrot_engine.protocol import Failed, TokenLogprobs
from scripted_remote import ScriptedRemoteEngine
from semantic_tools import (
    CHAT,
    COMPLETIONS,
    PATHS,
    Http,
    answer_to,
    body_of,
    echo,
    http_of,
    text_of,
)
from serving import serving, until

from parrot_gateway.core.reference import find_references, reference_of

#: Has the form of an id.
UNKNOWN = "v" + "a" * 26


@pytest_asyncio.fixture
async def http(engine: ScriptedRemoteEngine) -> AsyncIterator[Http]:
    """A client of a served engine that echoes."""
    async with http_of(engine) as client:
        yield client


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must end properly."""
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(e.removeprefix("data: ")) for e in events if e.startswith("data: ")]


# -- deferred calls -------------------------------------------------------------------------


async def test_two_deferred_calls_feed_a_third(http: Http, engine: ScriptedRemoteEngine) -> None:
    async with http.service.client() as client:
        story = {"X-Parrot-Session": "story", "X-Parrot-Defer": "true"}
        await client.completions.create(
            model="m", prompt="a", extra_headers=story | {"X-Parrot-Output": "first"}
        )
        second = await client.completions.create(model="m", prompt="b", extra_headers=story)
        third = await client.completions.create(
            model="m",
            prompt="{{one}} and " + second.choices[0].text,
            max_tokens=100,
            extra_headers={"X-Parrot-Session": "story", "X-Parrot-Input": "one=first"},
        )
    assert third.choices[0].text == "<<a> and <b>>"


@pytest.mark.parametrize("path", PATHS)
async def test_deferred_answers_have_the_ordinary_shape(http: Http, path: str) -> None:
    response = await http.call(path, "x", parrot={"session": "s", "defer": True})
    answer = response.json()
    (found,) = find_references(text_of(path, answer))
    assert found.variable_id == response.headers["x-parrot-variable"]
    assert response.headers["x-parrot-session"].startswith("s")
    assert response.headers["x-parrot-call"].startswith("call_")
    assert answer["model"] == "m"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 0
    value = (await http.value(found.variable_id)).json()
    assert (value["state"], value["value"]) == ("ready", answer_to(path, "x"))


@pytest.mark.parametrize("path", PATHS)
async def test_deferred_streams_are_short(http: Http, path: str) -> None:
    async with http.service.client() as client:
        body: dict[str, Any] = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_headers": {"X-Parrot-Defer": "1"},
        }
        if path == CHAT:
            chat = [{"role": "user", "content": "x"}]
            stream = await client.chat.completions.create(model="m", messages=chat, **body)  # type: ignore[arg-type]
            chunks = [chunk async for chunk in stream]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert chunks[0].choices[0].delta.role == "assistant"
        else:
            stream = await client.completions.create(model="m", prompt="x", **body)
            chunks = [chunk async for chunk in stream]
            text = "".join(c.choices[0].text for c in chunks if c.choices)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 0
    (found,) = find_references(text)
    assert (await http.value(found.variable_id)).json()["value"] == answer_to(path, "x")


async def test_a_deferred_call_is_answered_before_it_runs(engine: ScriptedRemoteEngine) -> None:
    engine.automatic = False
    async with http_of(engine) as http:
        response = await http.call(COMPLETIONS, "x", parrot={"session": "s", "defer": True})
        variable = response.headers["x-parrot-variable"]
        state = (await http.get(f"/v1/variables/{variable}", params={"timeout": 0})).json()
        assert state["state"] == "running"
        assert state["value"] is None
        engine.automatic = True
        engine.step()
        assert (await http.value(variable)).json()["value"] == "<x>"


async def test_text_of_a_deferred_call_is_readable_while_it_is_written(
    engine: ScriptedRemoteEngine,
) -> None:
    engine.automatic = False
    async with http_of(engine) as http:
        response = await http.call(CHAT, "x", parrot={"session": "s", "defer": True})
        variable = response.headers["x-parrot-variable"]
        await engine.wait_for(lambda: bool(engine.contexts))
        engine.step()
        url, accept = f"/v1/variables/{variable}", {"accept": "text/event-stream"}
        async with http.stream("GET", url, headers=accept) as stream:
            lines = stream.aiter_lines()
            for expected in "<us":
                engine.step()
                while not (line := await anext(lines)).startswith("data: "):
                    pass
                assert json.loads(line.removeprefix("data: "))["text"] == expected
            engine.automatic = True
            engine.step()
            rest = [line async for line in lines if line.startswith("data: {")]
        texts = [json.loads(line.removeprefix("data: ")).get("text", "") for line in rest]
        assert "<us" + "".join(texts) == answer_to(CHAT, "x")


@pytest.mark.parametrize("fields", [{"echo": True}, {"echo": True, "stream": True}])
async def test_deferred_calls_echo(http: Http, fields: dict[str, Any]) -> None:
    response = await http.call(COMPLETIONS, "x", parrot={"session": "s", "defer": True}, **fields)
    value = (await http.value(response.headers["x-parrot-variable"])).json()["value"]
    assert value == "x<x>"


async def test_a_deferred_call_takes_the_best_of_its_candidates(
    http: Http, engine: ScriptedRemoteEngine
) -> None:
    answers = iter("ab")
    engine.script = lambda prompt, sampling: engine.text(next(answers))
    likely = {engine.text("a")[0]: -3.0, engine.text("b")[0]: -1.0, engine.im_end: 0.0}
    engine._logprobs = lambda i, top: TokenLogprobs(i, likely[i])  # type: ignore[method-assign]
    parrot = {"session": "s", "output": "best", "defer": True}
    response = await http.call(COMPLETIONS, "x", parrot=parrot, best_of=2)
    assert (await http.value(response.headers["x-parrot-variable"])).json()["value"] == "b"
    graph = (await http.get("/v1/sessions/s/graph")).json()
    assert graph["calls"][0]["tokens"] == 4


async def test_an_engines_failure_amid_the_text_fails_the_variable(
    http: Http, engine: ScriptedRemoteEngine
) -> None:
    failure = Failed(0, "numerical_error", "not a number")
    engine.script = lambda prompt, sampling: [*engine.text("so far", end=False), failure]
    response = await http.call(CHAT, "x", parrot={"session": "s", "defer": True})
    error = (await http.value(response.headers["x-parrot-variable"])).json()
    assert error["variable"]["failure"]["code"] == "numerical_error"
    assert error["error"]["code"] == "dependency_failed"


async def test_the_graph_tells_what_ran(http: Http) -> None:
    first = await http.call(
        COMPLETIONS, "a", parrot={"session": "s", "output": "one", "defer": True, "name": "first"}
    )
    last = await http.call(
        COMPLETIONS, "{{one}}", parrot={"session": "s", "inputs": {"one": "one"}, "output": "two"}
    )
    assert last.json()["choices"][0]["text"] == "<<a>>"
    graph = (await http.get("/v1/sessions/s/graph")).json()
    calls = {call["name"]: call for call in graph["calls"]}
    assert {name: call["state"] for name, call in calls.items()} == {"first": "done", "two": "done"}
    assert calls["first"]["id"] == first.headers["x-parrot-call"]
    assert calls["first"]["tokens"] == 4
    assert calls["two"]["tokens"] == 6
    assert calls["two"]["engine"] == "scripted"
    for picture, start in (("mermaid", "flowchart"), ("svg", "<svg")):
        response = await http.get("/v1/sessions/s/graph", params={"format": picture})
        assert response.text.startswith(start)
    response = await http.get("/v1/sessions/s/graph", headers={"accept": "image/svg+xml"})
    assert response.headers["content-type"] == "image/svg+xml"


async def test_the_graph_shows_what_comes_from_other_sessions(http: Http) -> None:
    first = await http.call(
        COMPLETIONS, "a", parrot={"session": "one", "output": "theirs", "defer": True}
    )
    reference = text_of(COMPLETIONS, first.json())
    parrot = {"session": "two", "inputs": {"own": "own"}, "output": "end", "defer": True}
    await http.call(COMPLETIONS, f"{{{{own}}}} {reference} {{{{own}}}}", parrot=parrot)
    graph = (await http.get("/v1/sessions/two/graph")).json()
    names = {variable["id"]: variable["name"] for variable in graph["variables"]}
    (call,) = graph["calls"]
    assert [names[variable_id] for variable_id in call["inputs"]] == ["own", "theirs"]
    (theirs,) = [v for v in graph["variables"] if v["name"] == "theirs"]
    assert (theirs["session"], theirs["consumers"]) == ("one", [call["id"]])
    assert {v["session"] for v in graph["variables"] if v["name"] != "theirs"} == {None}
    for picture in ("mermaid", "svg"):
        response = await http.get("/v1/sessions/two/graph", params={"format": picture})
        assert "one/theirs" in response.text
    await http.delete("/v1/sessions/two")


# -- attended calls -------------------------------------------------------------------------


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
    assert int(response.headers["x-parrot-queue-ms"]) >= 0
    assert response.headers["x-parrot-session"] == late["session"]
    variable = (await http.value(response.headers["x-parrot-variable"])).json()
    assert (variable["name"], variable["value"]) == ("o", answer_to(path, "so: v"))


async def test_streams_are_kept_alive_while_they_wait(engine: ScriptedRemoteEngine) -> None:
    async with http_of(engine, keep_alive_s=0.02) as http:
        late = (await http.post("/v1/variables", json={"session": "s"})).json()
        body = body_of(COMPLETIONS, late["reference"], stream=True)
        async with http.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            assert response.headers["x-parrot-call"]
            await http.put(f"/v1/variables/{late['id']}", json={"value": "v"})
            rest = [line async for line in lines]
        texts = [json.loads(t[6:])["choices"][0]["text"] for t in rest if t.startswith("data: {")]
        assert "".join(texts) == "<v>"
        assert [line for line in rest if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("fault", ["producer", "prompt"])
async def test_failures_after_a_comment_go_in_band(
    engine: ScriptedRemoteEngine, fault: str
) -> None:
    async with http_of(engine, keep_alive_s=0.02) as http:
        late = (await http.post("/v1/variables", json={"session": "s"})).json()
        body = body_of(COMPLETIONS, late["reference"], stream=True)
        async with http.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            if fault == "producer":
                await http.delete("/v1/sessions/s")
            else:
                await http.put(f"/v1/variables/{late['id']}", json={"value": "x" * 1000})
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


# -- refusals -------------------------------------------------------------------------------


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


# -- failures -------------------------------------------------------------------------------


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


async def test_tokens_are_counted_by_the_models_tokenizer(http: Http) -> None:
    parrot = {"session": "s", "defer": True, "transform": "truncate(tokens=3)"}
    answer = await http.call(COMPLETIONS, "the quick fox", parrot=parrot)
    read = await http.value(answer.headers["x-parrot-variable"])
    assert read.json()["value"] == "<the quick"


# -- identical calls, priorities ------------------------------------------------------------


async def test_identical_deterministic_calls_run_once(
    http: Http, engine: ScriptedRemoteEngine
) -> None:
    parrot = {"session": "s", "defer": True}
    answers = [
        await http.call(COMPLETIONS, "x", temperature=0, parrot=parrot | more)
        for more in ({}, {}, {"dedupe": False})
    ]
    values = [(await http.value(a.headers["x-parrot-variable"])).json() for a in answers]
    assert [value["value"] for value in values] == ["<x>"] * 3
    generated = [item for item in engine.submitted if type(item).__name__ == "Generate"]
    assert len(generated) == 2


async def test_priorities_reach_the_engine(http: Http, engine: ScriptedRemoteEngine) -> None:
    for priority, objective in ((0, "throughput"), (0, "latency"), (5, "throughput")):
        parrot = {"session": "s", "priority": priority, "objective": objective, "defer": True}
        answer = await http.call(COMPLETIONS, f"{priority}{objective}", parrot=parrot)
        await http.value(answer.headers["x-parrot-variable"])
    await http.call(COMPLETIONS, "attended", parrot={"session": "s", "priority": 5})
    await http.call(COMPLETIONS, "ordinary")
    priorities = [i.priority for i in engine.submitted if type(i).__name__ == "Generate"]
    throughput, latency, urgent, attended, ordinary = priorities
    assert attended < urgent < latency < throughput
    assert ordinary == latency == 0


# -- many -----------------------------------------------------------------------------------


async def run_many(
    graph: dict[int, list[int]], failing: set[int], leaving: set[int], deferred: set[int]
) -> None:
    """A graph over HTTP: deferred and attended calls, streams, clients that leave."""
    engine = ScriptedRemoteEngine(max_context_tokens=4096, tokens_per_step=64)
    async with http_of(engine) as http:
        names = {node: f"v{node}" for node in graph}

        def submission(node: int) -> dict[str, Any]:
            inputs = {f"i{i}": names[i] for i in graph[node]}
            prompt = f"{node}" + "".join(f"{{{{{name}}}}}" for name in inputs)
            parrot: dict[str, Any] = {"session": "s", "output": names[node], "inputs": inputs}
            if node in deferred:
                parrot["defer"] = True
            if node in failing:
                parrot["transform"] = "json(/no)"
            # Tokens that are cut off keep the values short.
            return body_of(COMPLETIONS, prompt, max_tokens=6, stream=node % 3 == 0, parrot=parrot)

        async def attend(node: int) -> None:
            body = submission(node)
            if node in leaving:
                _, writer = await http.service.send(COMPLETIONS, json.dumps(body).encode())
                await until(lambda: names[node] in known(http))
                writer.transport.abort()
                return
            response = await http.post(COMPLETIONS, json=body, timeout=60)
            assert response.status_code in (200, 424), response.text

        tasks = []
        for node in graph:
            if node in deferred:
                assert (await http.post(COMPLETIONS, json=submission(node))).status_code == 200
            else:
                tasks.append(asyncio.create_task(attend(node)))
        await asyncio.gather(*tasks)
        await http.settled()
        session = http.service.gateway.semantic.sessions.find("default", "s")
        values: dict[int, str] = {}
        for node, inputs in graph.items():
            variable = session.find(names[node])
            assert variable is not None
            bad = [i for i in inputs if i not in values]
            if variable.value is not None:
                prompt = f"{node}" + "".join(values[i] for i in inputs)
                assert variable.value == f"<{prompt}>"[: len(variable.value)]
                assert len(variable.value) >= min(6, len(prompt))
                assert not bad
                assert node not in failing
                values[node] = variable.value
            else:
                assert bad or node in failing | leaving
                assert variable.is_final


def known(http: Http) -> set[str]:
    """Names of the variables that have a producer."""
    sessions = http.service.gateway.semantic.sessions.of_tenant("default")
    return {v.name for session in sessions for v in session if v.producer is not None}


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_random_graphs_over_http(size: int, seed: int) -> None:
    chance = random.Random(seed)
    graph = {n: sorted(chance.sample(range(n), min(n, chance.randrange(4)))) for n in range(size)}
    nodes = range(size)
    failing = set(chance.sample(nodes, min(size, chance.randrange(3))))
    leaving = set(chance.sample(nodes, min(size, chance.randrange(4))))
    deferred = {n for n in nodes if chance.random() < 0.7} - leaving
    asyncio.run(run_many(graph, failing, leaving, deferred))


def test_a_thousand_calls_over_http() -> None:
    chance = random.Random(3)
    graph = {n: sorted(chance.sample(range(n), min(n, chance.randrange(4)))) for n in range(1000)}
    leaving = set(chance.sample(range(500, 1000), 10))
    deferred = {n for n in range(1000) if n % 20} - leaving
    asyncio.run(run_many(graph, {900}, leaving, deferred))


async def test_ordinary_calls_leave_no_trace(engine: ScriptedRemoteEngine) -> None:
    echo(engine)
    async with serving(engine) as service, Http(service) as http:
        response = await http.call(COMPLETIONS, 'the word "parrot" and [[parrot:x]]')
        assert response.status_code == 200
        assert (await http.get("/v1/sessions")).json()["data"] == []
        assert not [name for name in response.headers if name.startswith("x-parrot")]
