"""`/v1/messages` with the client library of Anthropic, which validates every field it reads."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic import beta_async_tool
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving
from harness.gateway.tool_calling import tool_engine

CALL: dict[str, Any] = {
    "model": "m",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "Hi"}],
}
SUM = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def client_of(service: Service) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=service.root, api_key="none", max_retries=0, _strict_response_validation=True
    )


async def test_create(service: Service) -> None:
    async with client_of(service) as client:
        message = await client.messages.create(**CALL, stop_sequences=["rld"])
        assert message.content == [anthropic.types.TextBlock(text="Hello wo", type="text")]
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "rld")
        assert message._request_id is not None
        assert message._request_id.startswith("req_")


async def test_streams_add_up_to_the_message(service: Service) -> None:
    async with client_of(service) as client:
        whole = await client.messages.create(**CALL)
        async with client.messages.stream(**CALL) as stream:
            texts = [text async for text in stream.text_stream]
            message = await stream.get_final_message()
    assert "".join(texts) == "Hello world"
    assert message.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert message.usage == whole.usage
    assert message.stop_reason == whole.stop_reason == "end_turn"


async def test_tokens_are_counted(service: Service) -> None:
    fields = {name: CALL[name] for name in ("model", "messages")}
    async with client_of(service) as client:
        counted = await client.messages.count_tokens(**fields)
        of_beta = await client.beta.messages.count_tokens(**fields)
        message = await client.messages.create(**CALL)
    assert counted.input_tokens == of_beta.input_tokens == message.usage.input_tokens


async def test_errors_are_of_its_classes(service: Service, engine: ScriptedRemoteEngine) -> None:
    async with client_of(service) as client:
        with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
            await client.messages.create(**CALL | {"max_tokens": -1})
        assert caught.value.type == "invalid_request_error"
        assert (caught.value.request_id or "").startswith("req_")
    async with anthropic.AsyncAnthropic(
        base_url=f"{service.root}/v1/nothing", api_key="none", max_retries=0
    ) as client:
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**CALL)


async def test_the_tool_runner_comes_to_an_end() -> None:
    engine = tool_engine("")
    call, text = engine.text(SUM), engine.text("Three.")
    engine.script = lambda prompt, sampling: (
        text if "tool_response" in engine.tokenizer.decode(prompt) else call
    )
    added: list[tuple[int, int]] = []

    @beta_async_tool
    async def add(a: int, b: int) -> str:
        """Adds.

        Args:
            a: one number
            b: another
        """
        added.append((a, b))
        return str(a + b)

    async with serving(engine) as service, client_of(service) as client:
        runner = client.beta.messages.tool_runner(**CALL, tools=[add])
        messages = [message async for message in runner]
    assert added == [(1, 2)]
    assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]
    assert messages[-1].content[0].type == "text"


async def test_partial_arguments_add_up() -> None:
    async with serving(tool_engine(SUM)) as service, client_of(service) as client:
        tool: Any = {"name": "add", "input_schema": {"type": "object"}}
        async with client.messages.stream(**CALL, tools=[tool]) as stream:
            partial = [event.partial_json async for event in stream if event.type == "input_json"]
            message = await stream.get_final_message()
    assert len(partial) > 1
    (block,) = message.content
    assert (block.type, block.input) == ("tool_use", {"a": 1, "b": 2})  # type: ignore[union-attr]
