"""`/v1/conversations`: kept, one call at a time, each with whoever made it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from harness.gateway.responding import prompt_of, strict
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service
from harness.scripted_upstream import ScriptedUpstream, document
from harness.waiting import until
from parrot_engine.protocol import Failed

from parrot_gateway.backends.upstreams.client import Upstream
from parrot_gateway.settings.model import UpstreamSettings


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
