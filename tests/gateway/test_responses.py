"""`/v1/responses` and `/v1/conversations` on an engine of our own, through a socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from harness.scripted_upstream import ScriptedUpstream, document
from parrot_engine.protocol import Failed, Fill, Generate
from scripted_remote import ScriptedRemoteEngine
from serving import Service, read_answer, until

from parrot_gateway.engines.upstream import Upstream
from parrot_gateway.settings import UpstreamSettings

STRICT = {"_strict_response_validation": True, "max_retries": 0, "api_key": "none"}


def strict(service: Service) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{service.root}/v1", **STRICT)  # type: ignore[arg-type]


def prompt_of(engine: ScriptedRemoteEngine) -> str:
    fills = [item for item in engine.submitted if isinstance(item, Fill)]
    return engine.tokenizer.decode(fills[-1].token_ids, skip_special_tokens=False)


def sampling_of(engine: ScriptedRemoteEngine) -> Any:
    return [item for item in engine.submitted if isinstance(item, Generate)][-1].sampling


async def ask(service: Service, **body: Any) -> dict[str, Any]:
    status, _, answer = await service.post("/v1/responses", {"model": "m", "input": "Hi", **body})
    assert status == 200, answer
    decoded: dict[str, Any] = json.loads(answer)
    return decoded


async def refused(service: Service, **body: Any) -> dict[str, Any]:
    status, _, answer = await service.post("/v1/responses", {"model": "m", "input": "Hi", **body})
    error: dict[str, Any] = json.loads(answer)["error"]
    return {"status": status, "param": error["param"], "code": error["code"]}


async def get(service: Service, path: str, method: str = "GET") -> tuple[int, bytes]:
    reader, writer = await service.connect()
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
    try:
        async with asyncio.timeout(20):
            status, _, body = await read_answer(reader)
    finally:
        writer.close()
    return status, body


def events_of(body: bytes) -> list[dict[str, Any]]:
    events = []
    for block in body.decode().removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_shape_of_an_answer(service: Service) -> None:
    async with strict(service) as client:
        raw = await client.responses.with_raw_response.create(
            model="any", input="Hi", instructions="Be brief.", metadata={"run": "7"},
            temperature=0.5, top_p=0.9, max_output_tokens=16, user="u",
        )  # fmt: skip
    answer = raw.parse()
    assert answer.output_text == "Hello world"
    shown = json.loads(raw.content)
    assert shown["id"].startswith("resp_")
    assert shown["output"][0]["id"].startswith("msg_")
    assert shown | {"id": "", "created_at": 0, "completed_at": 0, "output": []} == {
        "id": "", "object": "response", "created_at": 0, "status": "completed",
        "background": False, "completed_at": 0, "conversation": None, "error": None,
        "incomplete_details": None, "instructions": "Be brief.", "max_output_tokens": 16,
        "max_tool_calls": None, "metadata": {"run": "7"}, "model": "any", "output": [],
        "parallel_tool_calls": True, "previous_response_id": None, "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None}, "safety_identifier": None,
        "service_tier": "default", "store": True, "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "tool_choice": "auto",
        "tools": [], "top_logprobs": 0, "top_p": 0.9, "truncation": "disabled", "user": "u",
        "usage": shown["usage"],
    }  # fmt: skip
    assert shown["output"][0] | {"id": ""} == {
        "id": "", "type": "message", "status": "completed", "role": "assistant",
        "content": [
            {"type": "output_text", "annotations": [], "logprobs": [], "text": "Hello world"}
        ],
    }  # fmt: skip
    tokens = shown["usage"]["input_tokens"]
    assert shown["usage"] == {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens + 3,
    }


async def test_prompt_is_the_chat(service: Service, engine: ScriptedRemoteEngine) -> None:
    await ask(
        service,
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [
                {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "c", "annotations": []}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "user", "content": "e"},
        ],
    )  # fmt: skip
    assert prompt_of(engine) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>system\nd<|im_end|>\n"
        "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>assistant\nNo.<|im_end|>\n<|im_start|>user\ne<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_output_of_one_is_input_of_the_next(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    """The client's own way of keeping state: it appends `response.output`."""
    async with strict(service) as client:
        items: list[Any] = [{"role": "user", "content": "One"}]
        first = await client.responses.create(model="m", input=items)
        items += [item.model_dump() for item in first.output]
        items.append({"role": "user", "content": "Two"})
        await client.responses.create(model="m", input=items)
    assert prompt_of(engine).count("Hello world<|im_end|>") == 1


async def test_length_makes_it_incomplete(service: Service, engine: ScriptedRemoteEngine) -> None:
    answer = await ask(service, max_output_tokens=1)
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["completed_at"] is None
    assert answer["output"][0]["content"][0]["text"] == "Hello"
    status, _, body = await service.post(
        "/v1/responses", {"model": "m", "input": "Hi", "max_output_tokens": 1, "stream": True}
    )
    assert status == 200
    assert events_of(body)[-1]["type"] == "response.incomplete"


async def test_logprobs(service: Service, engine: ScriptedRemoteEngine) -> None:
    async with strict(service) as client:
        answer = await client.responses.create(
            model="m", input="Hi", top_logprobs=2, include=["message.output_text.logprobs"]
        )
        part: Any = answer.output[0].content[0]  # type: ignore[union-attr, index]
        assert [entry.token for entry in part.logprobs] == ["Hello", " world"]
        assert [len(entry.top_logprobs) for entry in part.logprobs] == [2, 2]
        assert sampling_of(engine).logprobs == 2
        async with client.responses.stream(model="m", input="Hi", top_logprobs=1) as stream:
            deltas = [e async for e in stream if e.type == "response.output_text.delta"]
        assert [delta.logprobs[0].token for delta in deltas] == ["Hello", " world"]
        bare = await client.responses.create(
            model="m", input="Hi", include=["message.output_text.logprobs"]
        )
        part = bare.output[0].content[0]  # type: ignore[union-attr, index]
        assert [entry.top_logprobs for entry in part.logprobs] == [[], []]


async def test_order_of_events(service: Service) -> None:
    status, headers, body = await service.post(
        "/v1/responses", {"model": "m", "input": "Hi", "stream": True}
    )
    assert status == 200
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"[DONE]" not in body
    events = events_of(body)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    created, _, added, part, *deltas, done, part_done, item_done, completed = events
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    assert created["response"]["usage"] is None
    final = completed["response"]
    assert final["id"] == created["response"]["id"]
    assert added["item"]["status"] == "in_progress"
    assert {added["item"]["id"], part["item_id"], done["item_id"], item_done["item"]["id"]} == {
        final["output"][0]["id"]
    }
    assert [delta["delta"] for delta in deltas] == ["Hello", " world"]
    assert done["text"] == part_done["part"]["text"] == "Hello world"
    assert final["output"] == [item_done["item"]]
    assert final["usage"]["output_tokens"] == 3


async def test_accumulator_of_the_client(service: Service) -> None:
    async with strict(service) as client:
        async with client.responses.stream(model="m", input="Hi") as stream:
            snapshots = [e.snapshot async for e in stream if e.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert snapshots == ["Hello", "Hello world"]
        assert final.output_text == "Hello world"
        kept = await client.responses.retrieve(final.id)
        assert kept.output_text == "Hello world"


async def test_empty_answer(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.script = lambda prompt, sampling: [engine.im_end]
    async with strict(service) as client:
        async with client.responses.stream(model="m", input="Hi") as stream:
            kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == ""
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"


async def test_failure_in_mid_stream(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.script = lambda prompt, sampling: [65, Failed(0, "engine_error", "secret")]
    status, _, body = await service.post(
        "/v1/responses", {"model": "m", "input": "Hi", "stream": True}
    )
    assert status == 200
    assert b"secret" not in body
    events = events_of(body)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["code"] == "engine_error"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert service.gateway.responses.statistics().entries == 0
    engine.script = lambda prompt, sampling: [Failed(0, "engine_error", "secret")]
    status, _, body = await service.post(
        "/v1/responses", {"model": "m", "input": "Hi", "stream": True}
    )
    assert (status, json.loads(body)["error"]["code"]) == (500, "engine_error")


async def test_client_that_leaves_cancels(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.automatic = False
    body = json.dumps({"model": "m", "input": "Hi", "stream": True}).encode()
    _, writer = await service.send("/v1/responses", body)
    await engine.wait_for(lambda: bool(engine.contexts))
    writer.close()
    await engine.wait_for(lambda: not engine.contexts)
    assert service.gateway.responses.statistics().entries == 0


async def test_chain_of_responses(service: Service, engine: ScriptedRemoteEngine) -> None:
    async with strict(service) as client:
        first = await client.responses.create(model="m", input="One", instructions="Brief.")
        second = await client.responses.create(
            model="m", input="Two", previous_response_id=first.id
        )
        assert second.previous_response_id == first.id
        assert prompt_of(engine) == (
            "<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\nHello world<|im_end|>\n"
            "<|im_start|>user\nTwo<|im_end|>\n<|im_start|>assistant\n"
        )
        # Two ways on from one response.
        await client.responses.create(model="m", input="Three", previous_response_id=first.id)
        assert "Two" not in prompt_of(engine)
        # What is forgotten does not cut what builds on it.
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        await client.responses.create(model="m", input="Four", previous_response_id=second.id)
        assert "One" in prompt_of(engine)
        with pytest.raises(openai.NotFoundError) as gone:
            await client.responses.create(model="m", input="x", previous_response_id=first.id)
        assert (gone.value.param, gone.value.code) == (
            "previous_response_id",
            "previous_response_not_found",
        )


async def test_cached_tokens_are_told(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.cached_tokens = 7
    assert (await ask(service))["usage"]["input_tokens_details"]["cached_tokens"] == 7


async def test_input_items(service: Service) -> None:
    async with strict(service) as client:
        first = await client.responses.create(model="m", input="One", instructions="Brief.")
        second = await client.responses.create(
            model="m", input="Two", previous_response_id=first.id
        )
        page = await client.responses.input_items.list(second.id)
        shown = [(item.role, item.content[0].text) for item in page.data]  # type: ignore[union-attr]
        assert shown == [("user", "Two"), ("assistant", "Hello world"), ("user", "One")]
        oldest = await client.responses.input_items.list(second.id, limit=1, order="asc")
        everything = [item.id async for item in oldest]
        assert everything == [item.id for item in reversed(page.data)]
        with pytest.raises(openai.BadRequestError) as unknown:
            await client.responses.input_items.list(second.id, after="msg_x")
        assert unknown.value.param == "after"


async def test_what_is_not_stored_is_not_there(service: Service) -> None:
    answer = await ask(service, store=False)
    assert answer["store"] is False
    status, body = await get(service, f"/v1/responses/{answer['id']}")
    assert (status, json.loads(body)["error"]["code"]) == (404, "response_not_found")


async def test_retrieve_and_delete(service: Service) -> None:
    answer = await ask(service)
    path = f"/v1/responses/{answer['id']}"
    assert json.loads((await get(service, path))[1]) == answer
    status, body = await get(service, f"{path}/cancel", "POST")
    assert (status, "background" in json.loads(body)["error"]["message"]) == (400, True)
    assert (await get(service, f"{path}/nothing"))[0] == 404
    assert (await get(service, path, "PUT"))[0] == 405
    status, body = await get(service, path, "DELETE")
    assert json.loads(body) == {"id": answer["id"], "object": "response", "deleted": True}
    assert (await get(service, path))[0] == 404


async def test_stream_is_told_again(service: Service) -> None:
    _, _, live = await service.post(
        "/v1/responses", {"model": "m", "input": "Hi", "stream": True, "top_logprobs": 1}
    )
    events = events_of(live)
    path = f"/v1/responses/{events[0]['response']['id']}?stream=true"
    assert (await get(service, path))[1] == live
    _, rest = await get(service, f"{path}&starting_after=4")
    assert live.endswith(rest)
    assert json.loads(rest.split(b"data: ")[1].split(b"\n")[0])["sequence_number"] == 5
    status, body = await get(service, f"{path}&starting_after=x")
    assert (status, json.loads(body)["error"]["param"]) == (400, "starting_after")
    async with strict(service) as client:
        again = await client.responses.retrieve(events[0]["response"]["id"], stream=True)
        assert [event.type async for event in again][-1] == "response.completed"


async def test_input_tokens(service: Service, engine: ScriptedRemoteEngine) -> None:
    async with strict(service) as client:
        counted = await client.responses.input_tokens.count(
            model="m", input="Hi", instructions="Be brief."
        )
        answer = await client.responses.create(model="m", input="Hi", instructions="Be brief.")
        assert answer.usage is not None
        assert counted.input_tokens == answer.usage.input_tokens
        more = await client.responses.input_tokens.count(
            model="m", input="More", previous_response_id=answer.id
        )
        assert more.input_tokens > answer.usage.output_tokens
    status, _, body = await service.post("/v1/responses/input_tokens", {"input": "Hi"})
    assert status == 200, body


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "missing_required_parameter"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": [{"content": "x"}]}, "input[0].role", "missing_required_parameter"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
        ({"input": [{"role": "wolf", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content", "empty_array"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "unsupported_value",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
            "missing_required_parameter",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
            "input[0].type",
            "unsupported_value",
        ),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_parameter"),
        ({"tools": 5}, "tools", "invalid_type"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_value"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "unsupported_value"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_value"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
        ({"moderation": {"model": "x"}}, "moderation", "unsupported_parameter"),
        (
            {"context_management": [{"type": "compaction"}]},
            "context_management",
            "unsupported_parameter",
        ),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
        ({"temperature": 3}, "temperature", "decimal_above_max_value"),
        ({"top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
        ({"truncation": "middle"}, "truncation", "invalid_value"),
        ({"include": ["everything"]}, "include[0]", "invalid_value"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "string_above_max_length"),
        ({"metadata": {"a": 1}}, "metadata", "invalid_type"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
        ({"parrot": {"output": "x"}}, "parrot", "unsupported_parameter"),
        ({"input": "x" * 600}, "input", "context_length_exceeded"),
        ({"max_output_tokens": 510}, "input", "context_length_exceeded"),
        (
            {"previous_response_id": "resp_1", "conversation": "conv_1"},
            "previous_response_id",
            "mutually_exclusive_parameters",
        ),
    ],
)
async def test_refusals(
    service: Service, engine: ScriptedRemoteEngine, body: dict[str, Any], param: str, code: str
) -> None:
    found = await refused(service, **body)
    assert found["status"] == 400
    assert found["code"] == code
    assert (found["param"] or "").startswith(param)
    assert engine.submitted == []


async def test_harmless_fields_pass(service: Service) -> None:
    answer = await ask(
        service,
        background=False,
        tools=[{"type": "function", "name": "f", "parameters": {}, "strict": True}],
        tool_choice="none",
        text={"format": {"type": "text"}, "verbosity": "medium"},
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        service_tier="auto",
        stream_options=None,
        truncation="disabled",
    )
    assert answer["tools"][0]["name"] == "f"
    assert answer["reasoning"]["effort"] == "low"


async def test_truncation_drops_the_oldest(service: Service, engine: ScriptedRemoteEngine) -> None:
    roles = ("user", "assistant")
    turns = [{"role": r, "content": f"{n} " + "x" * 60} for n in range(6) for r in roles]
    turns.append({"role": "user", "content": "Now?"})
    found = await refused(service, input=turns)
    assert found["code"] == "context_length_exceeded"
    await ask(service, input=turns, truncation="auto", instructions="Brief.", max_output_tokens=50)
    prompt = prompt_of(engine)
    assert prompt.startswith("<|im_start|>system\nBrief.<|im_end|>\n<|im_start|>user\n")
    assert "user\n0 " not in prompt
    assert "assistant\n5 " in prompt
    assert "Now?" in prompt
    found = await refused(service, input="x" * 600, truncation="auto")
    assert found["code"] == "context_length_exceeded"


async def test_unknown_routes(service: Service) -> None:
    assert (await get(service, "/v1/responses"))[0] == 404
    async with strict(service) as client:
        with pytest.raises(openai.BadRequestError) as compact:
            await client.responses.compact(model="m", input="x")  # type: ignore[arg-type]
        assert compact.value.code == "unsupported_route"
    status, _, body = await service.post("/v1/responses", {"input": "x"})
    assert (status, json.loads(body)["error"]["param"]) == (400, "model")
    status, body = await get(service, "/v1/conversations/conv_1")
    assert (status, json.loads(body)["error"]["code"]) == (404, "conversation_not_found")


async def test_conversation(service: Service, engine: ScriptedRemoteEngine) -> None:
    async with strict(service) as client:
        made = await client.conversations.create(
            items=[{"type": "message", "role": "system", "content": "Brief."}],
            metadata={"topic": "x"},
        )
        assert made.id.startswith("conv_")
        first = await client.responses.create(model="m", input="One", conversation=made.id)
        assert first.conversation is not None
        assert first.conversation.id == made.id
        async with client.responses.stream(
            model="m", input="Two", conversation={"id": made.id}, store=False
        ) as stream:
            await stream.until_done()
        assert prompt_of(engine) == (
            "<|im_start|>system\nBrief.<|im_end|>\n<|im_start|>user\nOne<|im_end|>\n"
            "<|im_start|>assistant\nHello world<|im_end|>\n<|im_start|>user\nTwo<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        items = [item async for item in client.conversations.items.list(made.id, order="asc")]
        texts: list[Any] = [item.content[0].text for item in items]  # type: ignore[union-attr]
        assert texts == ["Brief.", "One", "Hello world", "Two", "Hello world"]
        one = await client.conversations.items.retrieve(items[1].id or "", conversation_id=made.id)
        assert one == items[1]
        await client.conversations.items.delete(items[1].id or "", conversation_id=made.id)
        added = await client.conversations.items.create(
            made.id, items=[{"type": "message", "role": "user", "content": "Three"}]
        )
        assert added.data[0].content[0].text == "Three"  # type: ignore[union-attr]
        await client.responses.create(model="m", conversation=made.id)
        assert "One" not in prompt_of(engine)
        assert prompt_of(engine).endswith("user\nThree<|im_end|>\n<|im_start|>assistant\n")
        # A response keeps what it was given, whatever becomes of the conversation.
        kept = await client.responses.input_items.list(first.id, order="asc")
        assert [item.content[0].text for item in kept.data] == ["Brief.", "One"]  # type: ignore[union-attr]
        changed = await client.conversations.update(made.id, metadata={"topic": "y"})
        assert (await client.conversations.retrieve(made.id)).metadata == changed.metadata
        deleted = await client.conversations.delete(made.id)
        assert deleted.deleted
        with pytest.raises(openai.NotFoundError) as gone:
            await client.responses.create(model="m", input="x", conversation=made.id)
        assert gone.value.param == "conversation"


async def test_calls_on_a_conversation_go_one_after_the_other(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    async with strict(service) as client:
        made = await client.conversations.create()
        engine.automatic = False
        first = asyncio.create_task(
            client.responses.create(model="m", input="One", conversation=made.id)
        )
        await engine.wait_for(lambda: len(engine.contexts) == 1)
        second = asyncio.create_task(
            client.responses.create(model="m", input="Two", conversation=made.id)
        )
        await until(lambda: service.gate.running == 2)
        assert len(engine.contexts) == 1
        engine.automatic = True
        engine.step()
        await asyncio.gather(first, second)
    assert "One<|im_end|>" in prompt_of(engine)
    assert prompt_of(engine).endswith("Two<|im_end|>\n<|im_start|>assistant\n")


async def test_failed_call_leaves_the_conversation_as_it_was(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    async with strict(service) as client:
        made = await client.conversations.create()
        await client.responses.create(model="m", input="One", conversation=made.id)
        engine.script = lambda prompt, sampling: [65, Failed(0, "engine_error", "x")]
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model="m", input="Two", conversation=made.id)
        items = [item async for item in client.conversations.items.list(made.id)]
        assert len(items) == 2


async def test_each_has_its_own(service: Service, engine: ScriptedRemoteEngine) -> None:
    """With an upstream besides, models and ids decide; what is not ours goes on as it came."""
    with ScriptedUpstream() as scripted:
        settings = UpstreamSettings(name="theirs", url=scripted.base_url, models="*")
        theirs = Upstream(settings, gateway_has_key=False)
        service.gateway.upstreams["theirs"] = theirs
        await theirs.start()
        try:
            await check_ownership(service, scripted)
        finally:
            del service.gateway.upstreams["theirs"]
            await theirs.close()


async def check_ownership(service: Service, scripted: ScriptedUpstream) -> None:
    model = scripted.script(document({"id": "resp_theirs"}))
    async with service.client() as client:
        ours = await client.responses.create(model="m", input="Hi")
        assert ours.output_text == "Hello world"
        raw = await client.responses.with_raw_response.create(
            model=f"theirs/{model}", input="Hi", previous_response_id=ours.id
        )
        assert json.loads(raw.content) == {"id": "resp_theirs"}
        assert (await client.responses.retrieve(ours.id)).output_text == "Hello world"
        made = await client.conversations.create(extra_body={"model": "m"})
        await client.responses.create(model="m", input="Hi", conversation=made.id)
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.responses.create(model="m", input="x", previous_response_id="resp_theirs")
        assert unknown.value.param == "previous_response_id"
    # No model and no id of ours: the first upstream's, which here has something for everybody.
    async with httpx.AsyncClient(base_url=f"{service.root}/v1") as http:
        for method, path in (
            ("POST", "/conversations"),
            ("GET", "/conversations/conv_theirs"),
            ("DELETE", "/conversations/conv_theirs"),
            ("GET", "/responses/resp_theirs"),
            ("POST", "/responses/resp_theirs/cancel"),
        ):
            answer = await http.request(method, path)
            assert answer.headers["x-parrot-engine"] == "theirs"


async def test_routes_are_described(service: Service) -> None:
    async with httpx.AsyncClient(base_url=service.root) as http:
        document = (await http.get("/openapi.json")).json()
    paths = document["paths"]
    assert set(paths["/v1/responses/{response_id}"]) == {"get", "delete"}
    assert set(paths["/v1/conversations/{conversation_id}/items"]) == {"get", "post"}
    body = paths["/v1/responses"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = body["$ref"].rpartition("/")[2]
    fields = document["components"]["schemas"][name]["properties"]
    assert {"input", "instructions", "previous_response_id", "conversation"} <= set(fields)
