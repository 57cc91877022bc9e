"""Deferred calls over the ordinary routes, on a real server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import (
    CHAT,
    COMPLETIONS,
    PATHS,
    Http,
    answer_to,
    echo,
    http_of,
    text_of,
)
from harness.gateway.serving import serving
from parrot_engine.protocol import Failed, TokenLogprobs

from parrot_gateway.semantic.templates.reference import find_references


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
    drawn = await http.get("/v1/sessions/s/graph", params={"format": "mermaid"})
    assert drawn.text.startswith("flowchart")
    accepted = await http.get("/v1/sessions/s/graph", headers={"accept": "text/vnd.mermaid"})
    assert accepted.content == drawn.content
    assert accepted.headers["content-type"] == "text/vnd.mermaid; charset=utf-8"


@pytest.mark.parametrize(
    "asked",
    [{"params": {"format": "svg"}}, {"headers": {"accept": "image/svg+xml"}}],
    ids=["by-format", "by-accept"],
)
async def test_a_graph_in_a_format_that_is_not_drawn_is_refused(
    http: Http, asked: dict[str, Any]
) -> None:
    parrot = {"session": "s", "output": "one", "defer": True}
    await http.call(COMPLETIONS, "a", parrot=parrot)
    response = await http.get("/v1/sessions/s/graph", **asked)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "Invalid value for 'format': 'svg'. Supported values are: 'json', 'mermaid'.",
        "type": "invalid_request_error",
        "param": "format",
        "code": "invalid_value",
    }


async def test_a_browser_gets_the_graph_as_json(http: Http) -> None:
    parrot = {"session": "s", "output": "one", "defer": True}
    await http.call(COMPLETIONS, "a", parrot=parrot)
    accept = {"accept": "image/avif,image/svg+xml,image/*,*/*;q=0.8"}
    response = await http.get("/v1/sessions/s/graph", headers=accept)
    assert response.json()["session"]["name"] == "s"


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
    response = await http.get("/v1/sessions/two/graph", params={"format": "mermaid"})
    assert "one/theirs" in response.text
    await http.delete("/v1/sessions/two")


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


async def test_ordinary_calls_leave_no_trace(engine: ScriptedRemoteEngine) -> None:
    echo(engine)
    async with serving(engine) as service, Http(service) as http:
        response = await http.call(COMPLETIONS, 'the word "parrot" and [[parrot:x]]')
        assert response.status_code == 200
        assert (await http.get("/v1/sessions")).json()["data"] == []
        assert not [name for name in response.headers if name.startswith("x-parrot")]
