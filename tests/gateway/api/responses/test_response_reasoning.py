"""Reasoning of own models in `/v1/responses`: an item, streamed, stored, brought back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from harness.gateway.responding import events_of, get, prompt_of, refused, strict
from harness.gateway.serving import Service, serving
from harness.gateway.thinker import thinker

THOUGHT = "<think>\nWhy? €\n</think>\n\nSo."
PACKED = "reasoning.encrypted_content"


async def stream(service: Service, **body: Any) -> list[dict[str, Any]]:
    status, _, answer = await service.post(
        "/v1/responses", {"model": "m", "input": "Hi", "stream": True, **body}
    )
    assert status == 200, answer
    return events_of(answer)


async def test_it_is_an_item_before_the_message() -> None:
    async with serving(thinker(THOUGHT)) as service:
        answer = await service.respond()
    thought, message = answer["output"]
    assert thought.pop("id").startswith("rs_")
    assert thought == {
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "\nWhy? €\n"}],
    }
    assert message["content"][0]["text"] == "So."
    usage = answer["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"]


async def test_events() -> None:
    async with serving(thinker(THOUGHT)) as service:
        events = await stream(service, include=["message.output_text.logprobs"])
        of_thought = [event for event in events if event.get("output_index") == 0]
        names = [event["type"] for event in of_thought]
        deltas = [e for e in of_thought if e["type"] == "response.reasoning_text.delta"]
        assert names == [
            "response.output_item.added",
            "response.content_part.added",
            *["response.reasoning_text.delta"] * len(deltas),
            "response.reasoning_text.done",
            "response.content_part.done",
            "response.output_item.done",
        ]
        assert len(deltas) > 1
        assert "".join(delta["delta"] for delta in deltas) == of_thought[-3]["text"] == "\nWhy? €\n"
        assert (
            len({event.get("item_id", event.get("item", {}).get("id")) for event in of_thought})
            == 1
        )
        answer = events[-1]["response"]
        assert answer["output"][0] == of_thought[-1]["item"]
        logprobs = answer["output"][1]["content"][0]["logprobs"]
        assert "".join(entry["token"] for entry in logprobs) == "So."
        # The stored response gives the same stream once more.
        status, again = await get(service, f"/v1/responses/{answer['id']}?stream=true")
        assert status == 200
        replayed = events_of(again)
    assert replayed[2:] == events[2:]


async def test_one_that_is_cut() -> None:
    async with serving(thinker("<think>Why? I never")) as service:
        answer = await service.respond(max_output_tokens=12)
        last = (await stream(service, max_output_tokens=12))[-1]
    (thought,) = answer["output"]
    assert (answer["status"], thought["status"]) == ("incomplete", "incomplete")
    assert "Why? I never".startswith(thought["content"][0]["text"])
    assert (last["type"], len(last["response"]["output"])) == ("response.incomplete", 1)


async def test_calls_and_schemas_come_behind_it() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    async with serving(thinker(f"<think>{call}</think>{call}")) as service:
        answer = await service.respond(tools=[{"type": "function", "name": "f"}])
        assert [item["type"] for item in answer["output"]] == ["reasoning", "function_call"]
    async with serving(thinker('<think>Hm</think>{"a": 1}')) as service:
        answer = await service.respond(text={"format": {"type": "json_object"}})
        assert answer["output"][1]["content"][0]["text"] == '{"a": 1}'


@pytest.mark.parametrize("packs", [False, True])
async def test_it_comes_back(packs: bool) -> None:
    """By the history that is kept, by the item, and by what is packed of it."""
    engine = thinker(THOUGHT)
    async with serving(engine) as service:
        first = await service.respond(include=[PACKED] if packs else [])
        await service.respond(previous_response_id=first["id"])
        assert "[\nWhy? €\n]So." in prompt_of(engine)
        thought, message = first["output"]
        assert ("encrypted_content" in thought) == packs
        if packs:
            # As stateless clients send it, which leave texts of reasoning out.
            del thought["content"]
        items = [{"role": "user", "content": "Hi"}, thought, message]
        await service.respond(store=False, input=[*items, {"role": "user", "content": "Go on"}])
        assert "[\nWhy? €\n]So." in prompt_of(engine)
        current = {"context": "current_turn"}
        await service.respond(previous_response_id=first["id"], reasoning=current)
        assert "[" not in prompt_of(engine)
        calls = [{"role": "user", "content": "Hi"}, thought, message]
        await service.respond(input=calls, reasoning=current)
        assert "[\nWhy? €\n]So." in prompt_of(engine)


async def test_no_effort_is_none() -> None:
    engine = thinker("So.")
    async with serving(engine) as service:
        answer = await service.respond(reasoning={"effort": "none"})
        assert prompt_of(engine).endswith("<think>\n\n</think>\n\n")
        assert [item["type"] for item in answer["output"]] == ["message"]
        await service.respond(reasoning={"effort": "high"})
        assert prompt_of(engine).endswith("ON")


async def test_compacting_does_without() -> None:
    engine = thinker("A summary.")
    async with serving(engine) as service:
        body = {"model": "m", "input": "Hi"}
        status, _, answer = await service.post("/v1/responses/compact", body)
        assert status == 200, answer
    assert prompt_of(engine).endswith("<think>\n\n</think>\n\n")


async def test_background() -> None:
    async with serving(thinker(THOUGHT)) as service:
        made = await service.respond(background=True)
        async with asyncio.timeout(60):
            while made["status"] in ("queued", "in_progress"):
                _, answer = await get(service, f"/v1/responses/{made['id']}?stream=true")
                made = events_of(answer)[-1]["response"]
    assert [item["type"] for item in made["output"]] == ["reasoning", "message"]


@pytest.mark.parametrize(
    ("reasoning", "param", "code"),
    [
        ({"summary": "detailed"}, "reasoning.summary", "unsupported_value"),
        ({"generate_summary": "concise"}, "reasoning.generate_summary", "unsupported_value"),
        ({"summary": "loud"}, "reasoning.summary", "invalid_value"),
        ({"context": "all_turns"}, "reasoning.context", "unsupported_value"),
        ({"mode": "pro"}, "reasoning.mode", "unsupported_value"),
        ({"mode": 5}, "reasoning.mode", "invalid_type"),
        ({"budget": 5}, "reasoning.budget", "unknown_parameter"),
    ],
)
async def test_fields_without_effect_are_refused(
    service: Service, reasoning: dict[str, Any], param: str, code: str
) -> None:
    found = await refused(service, reasoning=reasoning)
    assert found == {"status": 400, "param": param, "code": code}


async def test_the_client_reads_it() -> None:
    async with serving(thinker(THOUGHT)) as service, strict(service) as client:
        fields: Any = {"model": "m", "input": "Hi", "include": [PACKED]}
        async with client.responses.stream(**fields) as events:
            kinds = [event.type async for event in events]
            response = await events.get_final_response()
        assert "response.reasoning_text.delta" in kinds
        assert response.output_text == "So."
        thought = response.output[0]
        assert isinstance(thought, openai.types.responses.ResponseReasoningItem)
        assert json.loads(thought.to_json())["content"][0]["text"] == "\nWhy? €\n"
        items: Any = [item.model_dump(exclude_none=True) for item in response.output]
        again = await client.responses.create(model="m", input=[*items, *_user("Go on")])
        assert again.output_text == "So."


def _user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]
