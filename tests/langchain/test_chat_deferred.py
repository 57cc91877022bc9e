"""Both models with texts that are submitted: prompts, inputs, batches, runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from harness.processes import DEMO_MODEL, GatewayProcess
from harness.scripted_model import MODEL, ScriptedModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_parrot import ChatParrot, ParrotLLM, submit


def chat(gateway: GatewayProcess, kind: Any = ChatParrot, **arguments: Any) -> Any:
    """A deferring model of either kind."""
    connection = {"base_url": gateway.base_url, "api_key": gateway.api_key, "defer": True}
    return kind(**{"model": MODEL, **connection, **arguments})


def test_a_submitted_answer_in_the_next_messages_goes_as_a_reference(
    gateway: GatewayProcess, scripted: ScriptedModel
) -> None:
    model = chat(gateway, session="history")
    answer = submit(model, "hello")
    second = submit(model, [("user", "hello"), ("ai", answer), ("user", "and?")])
    assert not answer.is_resolved
    assert second == "You said: and?"
    assert scripted.bodies[-1]["messages"][1]["content"] == "You said: hello"


def test_values_of_inputs_may_be_deferred(gateway: GatewayProcess) -> None:
    model = chat(gateway, session="inputs")
    word = submit(model, "x")
    answer = model.invoke("A poem of {{what}}", inputs={"what": word})
    assert not word.is_resolved
    assert answer.content == "You said: A poem of You said: x"
    assert word == "You said: x"
    assert model.invoke("Of {{what}}", inputs={"what": word}).content == "You said: Of You said: x"


@pytest.mark.parametrize("how", ["sync", "async"])
async def test_prompts_of_a_batch_that_feeds_others_are_a_call_each(
    gateway: GatewayProcess, scripted: ScriptedModel, how: str
) -> None:
    model, prompts = chat(gateway, ParrotLLM), [f"a-{how}", f"b-{how}"]
    chain = model | {"x": RunnablePassthrough()} | PromptTemplate.from_template("of {x}") | model
    texts = (
        await asyncio.to_thread(chain.batch, prompts)
        if how == "sync"
        else await chain.abatch(prompts)
    )
    assert len(texts) == 2
    first = [body["prompt"] for body in scripted.bodies if body.get("prompt") in prompts]
    assert sorted(first) == prompts


def test_the_run_of_a_batch_is_its_first_call(gateway: GatewayProcess) -> None:
    model = chat(gateway, ParrotLLM, session="one-run")
    chain = model | {"x": RunnablePassthrough()} | PromptTemplate.from_template("of {x}") | model
    chain.batch(["a", "b", "c"])
    calls = gateway.get("/v1/sessions/one-run/graph?format=json")["calls"]
    assert [call["run"] is None for call in calls[:3]] == [False, True, True]


def test_a_submitted_call_of_the_demo_model(demo: GatewayProcess) -> None:
    model = chat(demo, model=DEMO_MODEL, max_tokens=8, temperature=0)
    chain = PromptTemplate.from_template("Tell me of {x}.") | model | StrOutputParser()
    text = submit(chain, {"x": submit(chain, {"x": "a ship"})})
    assert len(str(text)) > 5


def test_a_model_without_defer_submits_too(gateway: GatewayProcess) -> None:
    model = chat(gateway, defer=False)
    text = submit(model, "hello", output="greeting", session="submits")
    assert not text.is_resolved
    assert text == "You said: hello"
    graph = gateway.get("/v1/sessions/submits/graph?format=json")
    assert [call["output"] is not None for call in graph["calls"]] == [True]
