"""`POST /v1/chat/completions` on an engine of our own, through a socket and the real client."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pydantic
import pytest
from harness.gateway.responding import prompt_of, sampling_of
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import HI, Service, serving
from parrot_engine.protocol import Fill


async def test_template_is_rendered_and_tokenized_whole(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "name": "x"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "function", "content": "43", "name": "f"},
    ]  # fmt: skip
    await service.chat(messages=messages)
    assert prompt_of(engine) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\nNo.<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>tool\n42<|im_end|>\n<|im_start|>tool\n43<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    fill = next(item for item in engine.submitted if isinstance(item, Fill))
    whole = engine.tokenizer.encode(prompt_of(engine), add_special_tokens=False)
    assert fill.token_ids == whole


async def test_final_message_can_be_continued(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    messages = [*HI, {"role": "assistant", "content": "I say"}]
    await service.chat(messages=messages, continue_final_message=True)
    assert prompt_of(engine).endswith("<|im_start|>assistant\nI say")


async def test_default_length_is_the_rest_of_the_context(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    engine.script = lambda prompt, sampling: [65] * 10_000
    answer = await service.chat()
    usage = answer["usage"]
    assert usage["total_tokens"] == engine.info.max_context_tokens
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_default_length_is_what_the_checkpoint_recommends() -> None:
    engine = ScriptedRemoteEngine()
    engine.info = replace(engine.info, default_sampling={"max_new_tokens": 100})
    async with serving(engine) as service:
        await service.chat()
        assert sampling_of(engine).max_tokens == 100
        await service.chat(max_tokens=200)
        assert sampling_of(engine).max_tokens == 200
        await service.chat(messages=[{"role": "user", "content": "x" * 450}])
        assert 0 < sampling_of(engine).max_tokens < 100
        status, _, _ = await service.post("/v1/responses", {"model": "m", "input": "Hi"})
        assert (status, sampling_of(engine).max_tokens) == (200, 100)


@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_usage_in_every_chunk(service: Service, kind: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with service.client() as client:
        if kind == "chat":
            stream: Any = await client.chat.completions.create(
                model="m",
                messages=HI,
                stream=True,
                stream_options=options,  # type: ignore[call-overload]
            )
        else:
            stream = await client.completions.create(
                model="m",
                prompt="Hi",
                stream=True,
                stream_options=options,  # type: ignore[call-overload]
            )
        usages = [chunk.usage async for chunk in stream]
    assert None not in usages
    completion = [usage.completion_tokens for usage in usages]
    assert completion == sorted(completion)
    assert completion[-1] == completion[-2] == 3
    assert len({usage.prompt_tokens for usage in usages}) == 1


async def test_tokens_named_by_their_ids(service: Service, engine: ScriptedRemoteEngine) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    content = (await service.chat(**fields, return_token_ids=True))["choices"][0]
    wanted = [f"token_id:{number}" for number in content["token_ids"][:-1]]
    entries = content["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == wanted
    assert all(top["token"].startswith("token_id:") for top in entries[0]["top_logprobs"])
    status, _, answer = await service.post(
        "/v1/completions",
        {"model": "m", "prompt": "Hi", "logprobs": 1, "echo": True,
         "return_tokens_as_token_ids": True},
    )  # fmt: skip
    tokens = json.loads(answer)["choices"][0]["logprobs"]["tokens"]
    assert status == 200
    assert all(token.startswith("token_id:") for token in tokens)


async def test_max_completion_tokens_wins(service: Service, engine: ScriptedRemoteEngine) -> None:
    await service.chat(max_tokens=9, max_completion_tokens=2)
    assert sampling_of(engine).max_tokens == 2
    await service.chat(max_tokens=9)
    assert sampling_of(engine).max_tokens == 9


async def test_context_overflow(service: Service, engine: ScriptedRemoteEngine) -> None:
    async with service.client() as client:
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x" * 600}]
            )
        with pytest.raises(openai.BadRequestError) as too_much:
            await client.chat.completions.create(model="m", messages=HI, max_tokens=500)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError) as newer:
            await client.chat.completions.create(
                model="m",
                messages=HI,  # type: ignore[arg-type]
                max_completion_tokens=500,
            )
    for caught, field in (
        (too_long, "messages"),
        (too_much, "max_tokens"),
        (newer, "max_completion_tokens"),
    ):
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", field)
        assert "This model's maximum context length is 512 tokens. However," in str(caught.value)
    assert "you requested 521 tokens (21 in the messages, 500 in the completion)" in str(
        too_much.value
    )
    assert engine.submitted == []


async def test_logprobs(service: Service, engine: ScriptedRemoteEngine) -> None:
    engine.script = lambda prompt, sampling: engine.text("é!")
    async with service.client() as client:
        answer = await client.chat.completions.create(
            model="m",
            messages=HI,  # type: ignore[arg-type]
            logprobs=True,
            top_logprobs=3,
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    # The end-of-text token is not part of the text.
    assert b"".join(bytes(item.bytes or []) for item in logprobs.content).decode() == "é!"
    assert [item.token for item in logprobs.content] == ["\ufffd", "\ufffd", "!"]
    assert all(len(item.top_logprobs) == 3 for item in logprobs.content)
    plain = await service.chat(logprobs=True)
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


class Answer(pydantic.BaseModel):
    """A structured answer."""

    value: int


async def test_parse_fails_by_name(service: Service, engine: ScriptedRemoteEngine) -> None:
    async with service.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.parse(
                model="m",
                messages=HI,  # type: ignore[arg-type]
                response_format=Answer,
            )
    assert (caught.value.param, caught.value.code) == ("response_format", "unsupported_value")
    assert engine.submitted == []


async def test_harmless_fields_are_accepted(service: Service) -> None:
    answer = await service.chat(
        tools=[],
        tool_choice="none",
        functions=None,
        function_call="none",
        response_format={"type": "text"},
        parallel_tool_calls=True,
        store=False,
        metadata={"run": "1"},
        user="u",
        service_tier="auto",
        reasoning_effort="low",
        modalities=["text"],
        verbosity="medium",
        prompt_cache_key="k",
        safety_identifier="s" * 128,
        audio=None,
        prediction=None,
        stream_options=None,
        logit_bias={},
        stop=[],
        something_new={"a": [1, None]},
    )
    assert answer["service_tier"] == "default"
    assert answer["choices"][0]["message"]["content"] == "Hello world"


async def test_tools_that_may_not_be_called(service: Service) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    answer = await service.chat(tools=[tool], tool_choice="none")
    assert answer["choices"][0]["message"]["content"] == "Hello world"


async def test_variables_of_the_template(service: Service, engine: ScriptedRemoteEngine) -> None:
    from parrot_engine.text import ChatTemplate

    engine.tokenizer.chat = ChatTemplate(
        "{{ messages[0].content }}|{{ reasoning_effort }}|{{ enable_thinking }}"
    )
    await service.chat(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
    assert prompt_of(engine) == "Hi|high|False"


async def test_a_template_that_refuses(service: Service, engine: ScriptedRemoteEngine) -> None:
    from parrot_engine.text import ChatTemplate

    engine.tokenizer.chat = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    status, _, body = await service.post("/v1/chat/completions", {"model": "m", "messages": HI})
    assert status == 400
    error = json.loads(body)["error"]
    assert error["param"] == "messages"
    assert "roles must alternate" in error["message"]
    engine.tokenizer.chat = ChatTemplate(None)
    status, _, body = await service.post("/v1/chat/completions", {"model": "m", "messages": HI})
    assert status == 400
    assert b"no chat template" in body


async def test_arguments_of_tool_calls_reach_the_template_as_objects(
    service: Service, engine: ScriptedRemoteEngine
) -> None:
    from parrot_engine.text import ChatTemplate

    engine.tokenizer.chat = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.city }}")
    call = {"id": "1", "type": "function",
            "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}  # fmt: skip
    await service.chat(messages=[{"role": "assistant", "tool_calls": [call]}])
    assert prompt_of(engine) == "Oslo"


async def test_token_ids_on_request(service: Service, engine: ScriptedRemoteEngine) -> None:
    answer = await service.chat(return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == engine.text("Hello world")
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
