"""`Parrot` as a LlamaIndex model, on the demo model behind a real gateway."""

from __future__ import annotations

import asyncio
import gc
import inspect
import subprocess
import sys
from typing import Any

import openai
import pytest
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess, closed_port
from harness.scripted_upstream import ScriptedUpstream, document
from llama_index.core import Settings
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms import LLM, ChatMessage
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.parrot import Parrot
from pydantic import BaseModel, Field


class Pet(BaseModel):
    """Something that lives in a house."""

    name: str = Field(max_length=8)
    legs: int = Field(ge=0, le=8)


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("PARROT_BASE_URL", "OPENAI_API_BASE", "OPENAI_BASE_URL", "PARROT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return monkeypatch


def model(gateway: GatewayProcess, **settings: Any) -> Parrot:
    settings = {"model": DEMO_MODEL, "max_tokens": 16, "api_key": API_KEY, **settings}
    return Parrot(base_url=gateway.base_url, **settings)


def test_it_is_what_llamaindex_takes_for_a_model() -> None:
    names = [base.__name__ for base in Parrot.__mro__]
    assert {BaseLLM.__name__, LLM.__name__, FunctionCallingLLM.__name__} <= set(names)
    assert not inspect.isabstract(Parrot)
    assert Parrot.class_name() == "parrot_llm"


def test_the_four_ways_to_ask_agree(demo: GatewayProcess) -> None:
    llm = model(demo, temperature=0.0)
    messages = [ChatMessage(role="user", content="Tell me of a ship.")]
    whole = llm.chat(messages)
    *_, streamed = llm.stream_chat(messages)
    text = whole.message.content
    assert text
    assert streamed.message.content == text
    assert llm.complete("Tell me of a ship.").text == text
    pieces = list(llm.stream_complete("Tell me of a ship."))
    assert "".join(piece.delta or "" for piece in pieces) == pieces[-1].text == text


async def test_the_async_ways_give_the_same(demo: GatewayProcess) -> None:
    llm = model(demo, temperature=0.0)
    messages = [ChatMessage(role="user", content="Tell me of a ship.")]
    text = (await llm.achat(messages)).message.content
    assert text
    assert (await llm.acomplete("Tell me of a ship.")).text == text
    chat = [piece async for piece in await llm.astream_chat(messages)]
    assert chat[-1].message.content == text
    completion = [piece async for piece in await llm.astream_complete("Tell me of a ship.")]
    assert completion[-1].text == text


def test_completions_go_on_with_the_text(demo: GatewayProcess) -> None:
    llm = model(demo, is_chat_model=False, temperature=0.0)
    assert llm.metadata.is_chat_model is False
    response = llm.complete("Once upon a time", echo=True)
    assert response.text.startswith("Once upon a time")
    *_, streamed = llm.stream_complete("Once upon a time")
    assert response.text == "Once upon a time" + streamed.text
    assert llm.chat([ChatMessage(content="Once upon a time")]).message.content


def test_usage_is_told_whole_and_streamed(demo: GatewayProcess) -> None:
    llm = model(demo, temperature=0.0)
    whole = llm.complete("Tell me of a ship.")
    assert whole.raw is not None
    assert whole.additional_kwargs["prompt_tokens"] == whole.raw.usage.prompt_tokens > 0
    assert 0 < whole.additional_kwargs["completion_tokens"] <= 16
    *_, last = llm.stream_complete("Tell me of a ship.")
    for name in ("prompt_tokens", "completion_tokens", "total_tokens", "finish_reason"):
        assert last.additional_kwargs[name] == whole.additional_kwargs[name]


def test_callbacks_see_calls(demo: GatewayProcess) -> None:
    counter = TokenCountingHandler()
    llm = model(demo, callback_manager=CallbackManager([counter]))
    llm.complete("Tell me of a ship.")
    assert counter.total_llm_token_count > 0
    assert len(counter.llm_token_counts) == 1


def test_metadata_is_asked_once_and_not_before(demo: GatewayProcess) -> None:
    llm = model(demo)
    window = llm.metadata.context_window
    longest = demo.get("/v1/models")["data"][0]["max_model_len"]
    assert longest / 2 < window < longest
    assert (llm.metadata.num_output, llm.metadata.model_name) == (16, DEMO_MODEL)
    assert llm.metadata.is_function_calling_model
    llm.base_url = f"http://127.0.0.1:{closed_port()}/v1"
    with pytest.raises(openai.APIConnectionError):
        _ = llm.metadata
    llm.base_url = demo.base_url
    with demo.frozen_engines():
        # Nobody could count tokens now.
        assert llm.metadata.context_window == window


def test_a_full_window_of_llamaindex_tokens_fits(demo: GatewayProcess) -> None:
    """A full window by LlamaIndex's count is no more than the model takes."""
    from llama_index.core.utils import get_tokenizer
    from parrot_bench.apps import book

    llm = model(demo)
    words, count = book.text().split(" "), get_tokenizer()
    room = llm.metadata.context_window - 16
    end = next(n for n in range(100, 5000, 10) if len(count(" ".join(words[:n]))) > room) - 10
    assert llm.complete(" ".join(words[:end])).text


def test_an_alias_has_the_window_of_its_model(demo: GatewayProcess) -> None:
    windows = [model(demo, model=name).metadata.context_window for name in ("gpt-4o", DEMO_MODEL)]
    assert windows[0] == windows[1] < DEFAULT_CONTEXT_WINDOW


def test_models_that_tell_no_window_get_a_usual_one(relay: GatewayProcess) -> None:
    llm = Parrot(model="some-model-of-an-upstream", base_url=relay.base_url)
    assert llm.metadata.context_window == DEFAULT_CONTEXT_WINDOW
    assert Parrot(model="any", context_window=777, base_url="http://nowhere").metadata.model_name


def test_extras_and_more_fields_reach_the_gateway(demo: GatewayProcess) -> None:
    llm = model(demo, session="extras", temperature=0.0, additional_kwargs={"min_tokens": 3})
    response = llm.complete("Tell me of a ship.", output="ship", max_tokens=4)
    place = response.additional_kwargs["parrot"]
    assert response.additional_kwargs["completion_tokens"] <= 4
    value = demo.get(f"/v1/variables/{place['variable']}")
    assert (value["name"], value["value"]) == ("ship", response.text)
    again = llm.complete("{{it}} Go on.", inputs={"it": "ship"}, name="sequel", max_tokens=3)
    calls = demo.get("/v1/sessions/extras/graph?format=json")["calls"]
    assert [call["name"] for call in calls] == ["ship", "sequel"]
    assert again.additional_kwargs["parrot"]["session"] == place["session"]


def test_a_lone_call_is_an_ordinary_call(demo: GatewayProcess) -> None:
    assert "parrot" not in model(demo).complete("Tell me of a ship.").additional_kwargs


def test_structured_output_is_valid_whatever_the_model(demo: GatewayProcess) -> None:
    llm = model(demo, max_tokens=200)
    prompt = PromptTemplate("Name a {kind}.")
    assert isinstance(llm.structured_predict(Pet, prompt, kind="pet"), Pet)
    response = llm.as_structured_llm(Pet).complete("Name a pet.")
    assert isinstance(response.raw, Pet)
    *_, last = llm.stream_structured_predict(Pet, prompt, kind="pet")
    assert Pet.model_validate(last.model_dump())


async def test_structured_output_async(demo: GatewayProcess) -> None:
    llm = model(demo, max_tokens=200)
    prompt = PromptTemplate("Name a {kind}.")
    assert isinstance(await llm.astructured_predict(Pet, prompt, kind="pet"), Pet)
    stream = await llm.astream_structured_predict(Pet, prompt, kind="pet")
    last = [item async for item in stream][-1]
    assert Pet.model_validate(last.model_dump())


def test_structured_output_that_is_cut_says_so(demo: GatewayProcess) -> None:
    with pytest.raises(ValueError, match="cut off at max_tokens"):
        model(demo, max_tokens=3).structured_predict(Pet, PromptTemplate("Name a pet."))


def test_one_model_serves_several_event_loops(demo: GatewayProcess) -> None:
    llm = model(demo)
    for _ in range(3):
        assert asyncio.run(llm.acomplete("Tell me of a ship.")).text


def test_clients_of_ended_loops_leave_quietly(demo: GatewayProcess) -> None:
    # What other tests left may complain as it goes: outside of a loop nobody hears of it.
    gc.collect()
    llm = model(demo, max_tokens=2)
    asyncio.run(llm.acomplete("Hello."))

    async def once() -> None:
        await model(demo, max_tokens=2).acomplete("Hello.")

    asyncio.run(once())
    complaints: list[dict[str, Any]] = []

    async def later() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        await llm.acomplete("Hello.")
        for _ in range(3):
            gc.collect()
            await asyncio.sleep(0)

    asyncio.run(later())
    assert complaints == []
    assert llm._clients.num_loops == 1


@pytest.mark.parametrize("name", ["PARROT_BASE_URL", "OPENAI_API_BASE", "OPENAI_BASE_URL"])
def test_the_environment_says_where_and_with_which_key(
    demo: GatewayProcess, no_environment: pytest.MonkeyPatch, name: str
) -> None:
    no_environment.setenv(name, demo.base_url)
    no_environment.setenv("PARROT_API_KEY", API_KEY)
    assert Parrot(model=DEMO_MODEL, max_tokens=4).complete("Hello").text


def test_api_base_is_base_url(demo: GatewayProcess) -> None:
    llm = Parrot(model=DEMO_MODEL, api_base=demo.base_url, api_key=API_KEY)
    assert llm.base_url == demo.base_url


def test_the_key_is_nowhere_in_what_is_shown(demo: GatewayProcess) -> None:
    llm = model(demo, default_headers={"X-Secret": "hidden-header"})
    shown = repr(llm) + str(llm.to_dict()) + str(llm.to_payload()) + llm.to_json()
    assert API_KEY not in shown
    assert "hidden-header" not in shown
    assert Parrot.from_dict(llm.to_dict()).model == DEMO_MODEL


def test_no_gateway(no_environment: pytest.MonkeyPatch) -> None:
    llm = Parrot(model=DEMO_MODEL, base_url=f"http://127.0.0.1:{closed_port()}/v1", max_retries=0)
    with pytest.raises(openai.APIConnectionError, match=r"parrot-gateway serve.*PARROT_BASE_URL"):
        llm.complete("Hello")
    with pytest.raises(openai.APIConnectionError, match="parrot-gateway serve"):
        list(llm.stream_complete("Hello"))
    with pytest.raises(openai.APIConnectionError, match="parrot-gateway serve"):
        _ = llm.metadata


def test_wrong_key_and_unknown_model(demo: GatewayProcess) -> None:
    with pytest.raises(openai.AuthenticationError, match="PARROT_API_KEY"):
        model(demo, api_key="wrong").complete("Hello")
    with pytest.raises(openai.NotFoundError, match=f"{DEMO_MODEL}.*Set model="):
        model(demo, model="nobody").complete("Hello")
    with pytest.raises(openai.BadRequestError, match=r"Settings\.tokenizer"):
        model(demo).complete("word " * 3000)


async def test_async_errors_have_advice_too(demo: GatewayProcess) -> None:
    llm = model(demo, api_key="wrong")
    with pytest.raises(openai.AuthenticationError, match="PARROT_API_KEY"):
        await llm.achat([ChatMessage(content="Hello")])
    with pytest.raises(openai.AuthenticationError, match="PARROT_API_KEY"):
        _ = [piece async for piece in await llm.astream_complete("Hello")]


def test_a_gateway_that_is_too_old_for_a_field(upstream: ScriptedUpstream) -> None:
    refusal = {
        "message": "Unknown field 'parrot.run'.",
        "type": "invalid_request_error",
        "param": "parrot.run",
        "code": "unknown_parameter",
    }
    name = upstream.script(document({"error": refusal}, 400))
    llm = Parrot(model=name, base_url=upstream.base_url, name="shown")
    with pytest.raises(openai.BadRequestError, match=r"too old for the field 'run'.*linking=False"):
        llm.complete("Hello")


def test_importing_it_imports_no_client_and_no_server() -> None:
    code = (
        "import sys, llama_index.llms.parrot as p; p.Parrot(model='m');"
        "print(*[m for m in ('openai', 'torch', 'parrot_gateway') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.stdout.strip(), ran.returncode) == ("", 0), ran.stderr


def test_settings_take_it(demo: GatewayProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = model(demo)
    monkeypatch.setattr(Settings, "_llm", None)
    Settings.llm = llm
    assert Settings.llm is llm
