"""Reasoning of own models: apart from the content, whole and streamed, before any grammar."""

from __future__ import annotations

from typing import Any

import pytest
from harness.gateway.responding import prompt_of
from harness.gateway.serving import HI, Service, serving
from harness.gateway.thinker import TEMPLATE, thinker
from parrot_engine.engine.grammar import GrammarCompiler
from parrot_engine.protocol import Generate

from parrot_gateway.calls.reasoning import ReasoningText
from parrot_gateway.settings.model import ModelSettings

PREFILLS = {"opened": "<think>\n", "closed": "<think>\n\n</think>\n\n"}


async def ask(service: Service, prefill: str = "", **body: Any) -> dict[str, Any]:
    if prefill:
        body["chat_template_kwargs"] = {"prefill": PREFILLS[prefill]}
    return await service.chat(**body)


@pytest.mark.parametrize(
    ("text", "prefill", "reasoning", "content"),
    [
        ("<think>\nWhy?\n</think>\n\nSo.", "", "\nWhy?\n", "So."),
        ("Why?</think>So.", "opened", "Why?", "So."),
        ("Why? I never", "opened", "Why? I never", ""),
        ("So.", "closed", None, "So."),
        ("So <think> not.", "", None, "So <think> not."),
        ("<thin", "", None, "<thin"),
    ],
)
async def test_reasoning_is_apart(
    text: str, prefill: str, reasoning: str | None, content: str
) -> None:
    async with serving(thinker(text)) as service:
        answer = await ask(service, prefill)
        message = answer["choices"][0]["message"]
        assert message.get("reasoning_content") == message.get("reasoning") == reasoning
        assert message["content"] == content
        used = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert (used > 0) == (reasoning is not None)
        assert used <= answer["usage"]["completion_tokens"]
        async with service.client() as client:
            extra = {"chat_template_kwargs": {"prefill": PREFILLS[prefill]}} if prefill else {}
            stream = await client.chat.completions.create(
                model="m",
                messages=HI,  # type: ignore[arg-type]
                stream=True,
                extra_body=extra,
            )
            deltas = [chunk.choices[0].delta async for chunk in stream]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == (reasoning or "")
    assert "".join(delta.content or "" for delta in deltas) == content


async def test_it_can_be_left_in_the_content() -> None:
    text = "<think>a</think>b"
    async with serving(thinker(text)) as service:
        message = (await ask(service, separate_reasoning=False))["choices"][0]["message"]
    assert message["content"] == text
    assert "reasoning_content" not in message


@pytest.mark.parametrize("parser", ["auto", "off"])
async def test_a_model_s_setting(parser: Any) -> None:
    text = "<think>a</think>b"
    engine = thinker(text)
    model = ModelSettings(model="x", name=engine.info.model, reasoning_parser=parser)
    async with serving(engine, models=[model]) as service:
        message = (await ask(service))["choices"][0]["message"]
    assert message["content"] == (text if parser == "off" else "b")


@pytest.mark.parametrize(
    ("prefill", "end"),
    [
        ("", "assistant\n<think>\n\n</think>\n\n"),
        ("opened", "assistant\n<think>\n\n</think>\n\n"),
        ("closed", "assistant\n<think>\n\n</think>\n\n"),
    ],
)
async def test_no_effort_is_none(prefill: str, end: str) -> None:
    engine = thinker("So.")
    async with serving(engine) as service:
        message = (await ask(service, prefill, reasoning_effort="none"))["choices"][0]["message"]
        assert prompt_of(engine).endswith(end)
        assert (message["content"], "reasoning_content" in message) == ("So.", False)
        await ask(service, prefill, reasoning_effort="low")
        assert not prompt_of(engine).endswith(end) or prefill == "closed"


async def test_models_that_know_no_markers_keep_them() -> None:
    engine = thinker("<think>a</think>b", TEMPLATE.replace("{# <think></think> #}", ""))
    async with serving(engine) as service:
        message = (await ask(service))["choices"][0]["message"]
    assert message["content"] == "<think>a</think>b"


async def test_tools_are_called_behind_it() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "f"}}
    async with serving(thinker(f"<think>{call}</think>{call}")) as service:
        message = (await ask(service, tools=[tool]))["choices"][0]["message"]
    assert message["reasoning_content"] == call
    assert len(message["tool_calls"]) == 1


@pytest.mark.parametrize("prefill", ["", "opened", "closed"])
@pytest.mark.parametrize(
    ("fields", "good"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}'),
        ({"guided_choice": ["yes", "no"]}, "yes"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
         '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    ],
)  # fmt: skip
async def test_grammars_begin_behind_it(prefill: str, fields: dict[str, Any], good: str) -> None:
    engine = thinker("x")
    async with serving(engine) as service:
        await ask(service, prefill, **fields)
    grammar = [i for i in engine.submitted if isinstance(i, Generate)][-1].sampling.grammar
    assert grammar is not None
    compiler = GrammarCompiler(
        engine.tokenizer.assets.tokenizer_json,
        vocab_size=engine.info.vocab_size,
        eos_token_ids=engine.info.eos_token_ids,
    )
    template = compiler.compile(grammar).result(20)._template
    compiler.close()

    def allows(text: str) -> bool:
        matcher = template.deep_copy()
        ids = engine.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert allows(good) == (prefill != "opened")
    assert allows(f"<think>so {{</think>\n\n{good}") == (prefill != "closed")
    assert allows(f"so {{</think>\n{good}") == (prefill == "opened")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_pieces_of_any_size(size: int) -> None:
    text = " <think>a < b </thin </think>\n\nc </think> d"
    reader, reasoning, content = ReasoningText("may_open"), "", ""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for number, piece in enumerate(pieces):
        split = reader.push(piece, ends=number == len(pieces) - 1)
        reasoning, content = reasoning + split.reasoning, content + split.content
    assert (reasoning, content) == ("a < b </thin ", "c </think> d")
