"""`/v1/responses` on an engine of our own, through a socket."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from harness.gateway.responding import events_of, get, prompt_of, refused, sampling_of, strict
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service


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
    await service.respond(instructions="Be brief.",
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
    answer = await service.respond(max_output_tokens=1)
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
    assert (await service.respond())["usage"]["input_tokens_details"]["cached_tokens"] == 7


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
    answer = await service.respond(store=False)
    assert answer["store"] is False
    status, body = await get(service, f"/v1/responses/{answer['id']}")
    assert (status, json.loads(body)["error"]["code"]) == (404, "response_not_found")


async def test_retrieve_and_delete(service: Service) -> None:
    answer = await service.respond()
    path = f"/v1/responses/{answer['id']}"
    assert json.loads((await get(service, path))[1]) == answer
    status, body = await get(service, f"{path}/cancel", "POST")
    assert (status, "background" in json.loads(body)["error"]["message"]) == (400, True)
    assert (await get(service, f"{path}/nothing"))[0] == 404
    assert (await get(service, path, "PUT"))[0] == 405
    status, body = await get(service, path, "DELETE")
    assert json.loads(body) == {"id": answer["id"], "object": "response", "deleted": True}
    assert (await get(service, path))[0] == 404


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


async def test_truncation_drops_the_oldest(service: Service, engine: ScriptedRemoteEngine) -> None:
    roles = ("user", "assistant")
    turns = [{"role": r, "content": f"{n} " + "x" * 60} for n in range(6) for r in roles]
    turns.append({"role": "user", "content": "Now?"})
    found = await refused(service, input=turns)
    assert found["code"] == "context_length_exceeded"
    await service.respond(
        input=turns, truncation="auto", instructions="Brief.", max_output_tokens=50
    )
    prompt = prompt_of(engine)
    assert prompt.startswith("<|im_start|>system\nBrief.<|im_end|>\n<|im_start|>user\n")
    assert "user\n0 " not in prompt
    assert "assistant\n5 " in prompt
    assert "Now?" in prompt
    found = await refused(service, input="x" * 600, truncation="auto")
    assert found["code"] == "context_length_exceeded"


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
