"""Calls on named contexts of a session, through a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
from harness.gateway.responding import get
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import CHAT, COMPLETIONS, http_of, prompt_of
from harness.gateway.serving import Service
from harness.waiting import until
from parrot_engine.protocol import Failed, Fill


def prompts_of(engine: ScriptedRemoteEngine) -> Iterator[str]:
    for item in engine.submitted:
        if isinstance(item, Fill):
            yield engine.tokenizer.decode(item.token_ids, skip_special_tokens=False)


def request(text: str, **parrot: Any) -> dict[str, Any]:
    return {"model": "m", **prompt_of(CHAT, text), "parrot": {"session": "app", **parrot}}


async def call(service: Service, text: str, **parrot: Any) -> tuple[int, Any]:
    status, _, answer = await service.post(CHAT, request(text, **parrot))
    return status, json.loads(answer)


async def ask(service: Service, path: str, method: str = "GET") -> tuple[int, Any]:
    status, body = await get(service, path, method)
    return status, json.loads(body)


ONE = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nHello world<|im_end|>\n"


async def say(client: openai.AsyncOpenAI, text: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return await client.chat.completions.create(model="m", messages=messages, **fields)


async def test_a_chat_goes_on(service: Service, engine: ScriptedRemoteEngine) -> None:
    async with service.client() as client:
        for text in ("one", "two"):
            headers = {"X-Parrot-Session": "app", "X-Parrot-Context": "chat"}
            answer = await say(client, text, extra_headers=headers)
            assert answer.choices[0].message.content == "Hello world"
    assert list(prompts_of(engine))[-1] == (
        ONE + "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )
    status, shown = await ask(service, "/v1/sessions/app/contexts/chat")
    assert status == 200
    assert [message["content"] for message in shown["messages"]] == [
        "one", "Hello world", "two", "Hello world"]  # fmt: skip
    status, listed = await ask(service, "/v1/sessions/app/contexts")
    assert [item["name"] for item in listed["data"]] == ["chat"]
    assert await ask(service, "/v1/sessions/app/contexts/chat", "DELETE") == (
        200,
        {"name": "chat", "object": "context", "deleted": True},
    )
    assert (await ask(service, "/v1/sessions/app/contexts/chat"))[0] == 404
    await call(service, "three", context="chat")
    assert list(prompts_of(engine))[-1] == (
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_streams_go_on_too(service: Service, engine: ScriptedRemoteEngine) -> None:
    async with service.client() as client:
        for text in ("one", "two"):
            body = {"parrot": {"session": "app", "context": "chat"}}
            stream = await say(client, text, stream=True, extra_body=body)
            assert [chunk async for chunk in stream]
    assert list(prompts_of(engine))[-1].startswith(ONE)


async def test_completions_go_on(service: Service, engine: ScriptedRemoteEngine) -> None:
    for text in ("one ", " two"):
        await service.post(
            COMPLETIONS, {"model": "m", "prompt": text, "parrot": {"session": "a", "context": "t"}}
        )
    assert list(prompts_of(engine))[-1] == "one Hello world two"
    # Tokenized whole, as any text.
    fill = next(item for item in reversed(engine.submitted) if isinstance(item, Fill))
    assert fill.token_ids == engine.tokenizer.encode("one Hello world two")


async def test_deferred_calls_run_in_their_order(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    engine.automatic = False
    for number in range(4):
        status, _ = await call(
            service, f"q{number}", context="chat", defer=True, output=f"o{number}"
        )
        assert status == 200
    await engine.wait_for(lambda: len(engine.contexts) == 1)
    engine.automatic = True
    engine.step()
    variables = (await ask(service, "/v1/variables?session=app"))[1]["data"]
    ids = {item["name"]: item["id"] for item in variables}
    status, value = await ask(service, f"/v1/variables/{ids['o3']}?timeout=10")
    assert (status, value.get("value")) == (200, "Hello world"), value
    last = list(prompts_of(engine))[-1]
    assert [last.index(f"q{number}") for number in range(4)] == sorted(
        last.index(f"q{number}") for number in range(4)
    )
    assert len(list(prompts_of(engine))) == 4
    assert engine.most_contexts == 1


async def test_equal_calls_on_two_contexts_are_two(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    for name in ("left", "right"):
        body = {**request("same", context=name, defer=True, output=name), "temperature": 0}
        assert (await service.post(CHAT, body))[0] == 200
    await call(service, "next", context="right")
    assert list(prompts_of(engine))[-1].count("Hello world") == 1
    assert len(list(prompts_of(engine))) == 3


async def test_forks(service: Service, engine: ScriptedRemoteEngine) -> None:
    await call(service, "one", context="main")
    await asyncio.gather(*(call(service, f"b{n}", context=f"branch{n}<main") for n in range(3)))
    branches = list(prompts_of(engine))[1:]
    assert all(prompt.startswith(ONE) for prompt in branches)
    assert sorted(prompt[len(ONE) :] for prompt in branches) == [
        f"<|im_start|>user\nb{n}<|im_end|>\n<|im_start|>assistant\n" for n in range(3)
    ]
    status, answer = await call(service, "x", context="branch0<main")
    assert (status, answer["error"]["code"]) == (409, "context_exists")


async def test_failures_change_nothing(service: Service, engine: ScriptedRemoteEngine) -> None:
    await call(service, "one", context="chat")
    script = engine.script
    engine.script = lambda prompt, sampling: [65, Failed(0, "engine_error", "x")]
    assert (await call(service, "bad", context="chat"))[0] == 500
    engine.script = script
    status, answer = await call(service, "x" * 600, context="chat")
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    await call(service, "two", context="chat")
    assert list(prompts_of(engine))[-1] == (
        ONE + "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_client_that_leaves_changes_nothing(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    await call(service, "one", context="chat")
    engine.automatic = False
    body = json.dumps(request("lost", context="chat")).encode()
    _, writer = await service.send(CHAT, body)
    await engine.wait_for(lambda: bool(engine.contexts))
    waiting = asyncio.create_task(call(service, "two", context="chat"))
    writer.close()
    await engine.wait_for(lambda: "two" in list(prompts_of(engine))[-1])
    engine.automatic = True
    engine.step()
    assert (await waiting)[0] == 200
    assert list(prompts_of(engine))[-1].startswith(ONE + "<|im_start|>user\ntwo")


async def test_a_context_needs_a_session(service: Service, engine: ScriptedRemoteEngine) -> None:
    status, answer = await call(service, "one", session=None, context="chat")
    assert (status, answer["error"]["param"]) == (400, "session")
    status, answer = await call(service, "one", context="new<nothing")
    assert (status, answer["error"]["code"]) == (404, "context_not_found")
    assert engine.submitted == []


async def test_ended_sessions_keep_nothing(service: Service) -> None:
    await call(service, "one", context="chat")
    store = service.gateway.semantic.sessions
    assert store.statistics().value_bytes > 0
    assert (await ask(service, "/v1/sessions/app", "DELETE"))[0] == 200
    assert store.statistics().value_bytes == 0


async def test_calls_keep_their_order_while_inputs_are_missing(
    engine: ScriptedRemoteEngine,
) -> None:
    async with http_of(engine) as http:
        first = await http.call(
            CHAT, "{{x}}", parrot={"session": "app", "context": "c", "defer": True,
                                   "inputs": "x=x", "transform": "upper"},
        )  # fmt: skip
        assert first.status_code == 200
        second = asyncio.create_task(
            http.call(CHAT, "two", parrot={"session": "app", "context": "c"})
        )
        await until(lambda: http.service.gateway.semantic.executor.statistics().submitted == 2)
        busy = await http.delete("/v1/sessions/app/contexts/c")
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "context_in_use")
        assert list(prompts_of(engine)) == []
        variables = (await http.get("/v1/variables?session=app")).json()["data"]
        (found,) = [item["id"] for item in variables if item["name"] == "x"]
        assert (await http.put(f"/v1/variables/{found}", json={"value": "one"})).is_success
        assert (await second).status_code == 200
        output = first.headers["x-parrot-variable"]
        assert (await http.value(output)).json()["value"] == "<USER\nONE\nASSISTANT\n>"
        # What the model wrote is kept, not what a transform made of it.
        held = (await http.get("/v1/sessions/app/contexts/c")).json()["messages"]
        assert [message["content"] for message in held[:3]] == [
            "one", "<user\none\nassistant\n>", "two"]  # fmt: skip


async def test_nobody_waits_for_ever_for_a_context(engine: ScriptedRemoteEngine) -> None:
    async with http_of(engine, call_timeout_s=0.2) as http:
        stuck = await http.call(
            CHAT, "{{x}}",
            parrot={"session": "app", "context": "c", "defer": True, "inputs": "x=x"},
        )  # fmt: skip
        answer = await http.call(CHAT, "two", parrot={"session": "app", "context": "c"})
        assert answer.status_code == 504
        assert "context 'c', which other calls hold" in answer.json()["error"]["message"]
        assert (await http.delete(f"/v1/calls/{stuck.headers['x-parrot-call']}")).is_success
        answer = await http.call(CHAT, "three", parrot={"session": "app", "context": "c"})
        assert answer.status_code == 200
        assert list(prompts_of(engine)) == ["<|im_start|>user\nthree<|im_end|>\n"
                                            "<|im_start|>assistant\n"]  # fmt: skip


async def test_ending_a_session_ends_its_lines(engine: ScriptedRemoteEngine) -> None:
    async with http_of(engine) as http:
        engine.automatic = False
        calls = [
            asyncio.create_task(http.call(CHAT, "x", parrot={"session": "app", "context": name}))
            for name in ("a", "a", "b<a", "b")
        ]
        await until(lambda: http.service.gateway.semantic.executor.statistics().submitted == 4)
        assert (await http.delete("/v1/sessions/app")).is_success
        answers = await asyncio.gather(*calls)
        assert {answer.status_code for answer in answers} == {409}
        engine.automatic = True
        assert http.service.gateway.semantic.sessions.statistics().value_bytes == 0


async def test_refused_calls_take_no_place(engine: ScriptedRemoteEngine) -> None:
    """A call that cannot be submitted leaves neither a context nor a place in a line."""
    async with http_of(engine) as http:
        await http.call(CHAT, "one", parrot={"session": "app", "output": "o"})
        answer = await http.call(
            CHAT, "two", parrot={"session": "app", "context": "c", "output": "o"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "output_taken")
        assert (await http.get("/v1/sessions/app/contexts")).json()["data"] == []


async def test_waiting_for_a_call_behind_in_line_is_a_cycle(engine: ScriptedRemoteEngine) -> None:
    async with http_of(engine) as http:
        first = {"context": "c", "defer": True, "inputs": "y=y", "name": "first"}
        await http.call(CHAT, "{{y}}", parrot={"session": "app", **first})
        await http.call(CHAT, "{{x}}", parrot={"session": "app", "defer": True, "inputs": "x=x",
                                               "output": "y"})  # fmt: skip
        second = {"context": "c", "output": "x", "name": "second"}
        answer = await http.call(CHAT, "two", parrot={"session": "app", **second})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "dependency_cycle")
        assert "context c" in answer.json()["error"]["message"]
        assert (await http.delete("/v1/sessions/app")).is_success
