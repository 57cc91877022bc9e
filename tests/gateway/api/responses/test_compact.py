"""`POST /v1/responses/compact`: a history in fewer tokens, and how it is gone on from."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from harness.gateway.responding import prompt_of, refused, sampling_of, strict
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving
from harness.gateway.tool_calling import TEXTS, tool_engine

HISTORY: list[Any] = [
    {"role": "user", "content": "I am Tom."},
    {"role": "assistant", "content": "Hello Tom."},
    {"role": "user", "content": "Add one."},
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "42"},
]


async def test_compacting_and_going_on() -> None:
    engine = tool_engine("Tom wants sums.")
    async with serving(engine) as service, strict(service) as client:
        made = await client.responses.compact(model="m", input=HISTORY, instructions="Be brief.")
        assert made.object == "response.compaction"
        (item,) = made.output
        assert item.type == "compaction"
        assert (made.usage.output_tokens, made.usage.input_tokens > 20) == (
            len(engine.tokenizer.encode("Tom wants sums.")) + 1, True,
        )  # fmt: skip
        prompt = prompt_of(engine)
        assert prompt.startswith("<|im_start|>system\nBe brief.")
        assert "42" in prompt
        assert "Summarize the conversation" in prompt
        assert sampling_of(engine).temperature == 0
        # In place of the history.
        more: list[Any] = [*made.output, {"role": "user", "content": "And now?"}]
        answer = await client.responses.create(model="m", input=more)
        prompt = prompt_of(engine)
        assert "42" not in prompt
        for text in ("I am Tom.", "Add one.", "Tom wants sums.", "And now?"):
            assert prompt.count(text) == 1
        page = await client.responses.input_items.list(answer.id, order="asc")
        assert [each.type for each in page.data] == ["compaction", "message"]
        # A compacted history that has grown, compacted once more.
        again = await client.responses.compact(model="m", previous_response_id=answer.id)
        await client.responses.create(model="m", input=[*again.output])  # type: ignore[list-item]
        for text in ("I am Tom.", "And now?"):
            assert prompt_of(engine).count(text) == 1


async def test_a_history_longer_than_the_context(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    items = [
        {"role": role, "content": f"{role} {number} " + "x" * 200}
        for number in range(5)
        for role in ("user", "assistant")
    ]
    status, _, body = await service.post("/v1/responses/compact", {"model": "m", "input": items})
    assert status == 200
    (item,) = json.loads(body)["output"]
    await service.respond(input=[item], max_output_tokens=8, truncation="disabled")
    assert "user 4" in prompt_of(engine)
    assert "user 0" not in prompt_of(engine)


async def test_refusals(service: Service) -> None:
    async with strict(service) as client:
        for body in ({"input": []}, {}):
            with pytest.raises(openai.BadRequestError) as empty:
                await client.responses.compact(model="m", **body)  # type: ignore[arg-type]
            assert empty.value.param == "input"
        with pytest.raises(openai.NotFoundError):
            await client.responses.compact(model="m", previous_response_id="resp_1")
    for content in ("gAAAA", "parrot1.", "parrot1.####", "parrot1.AAAA"):
        found = await refused(service, input=[{"type": "compaction", "encrypted_content": content}])
        assert found == {
            "status": 400, "param": "input[0].encrypted_content", "code": "unsupported_value",
        }  # fmt: skip


async def test_truncation_leaves_out_whole_turns() -> None:
    """`truncation: auto` drops the oldest turns, and never a call without its output."""
    engine = tool_engine(TEXTS["hermes"])
    engine.info = replace(engine.info, max_context_tokens=700)
    async with serving(engine) as service:
        items: list[Any] = [{"role": "user", "content": "Begin."}]
        for number in range(8):
            call_id = f"c{number}"
            items += [
                {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": call_id, "output": f"{number} " * 60},
            ]
        await service.respond(input=items, truncation="auto", max_output_tokens=16)
        prompt = prompt_of(engine)
        assert prompt.rindex("7 7") > prompt.index("6 6")
        assert "Begin." not in prompt
        assert "0 0" not in prompt
        assert not prompt.startswith("<|im_start|>tool")
        found = await refused(service, input=items, max_output_tokens=16)
        assert (found["status"], found["code"]) == (400, "context_length_exceeded")
