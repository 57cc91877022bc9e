"""defer=True: both models answer with texts whose value comes when it is looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness.processes import DEMO_MODEL, GatewayProcess
from harness.scripted_upstream import ScriptedUpstream, chat_document, document
from harness.scripted_upstream import error as scripted_error
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_parrot import ChatParrot, DeferredExpiredError, DeferredFailedError, ParrotLLM
from langchain_parrot.deferred import DeferredText
from scripted_model import MODEL, ScriptedModel


def chat(gateway: GatewayProcess, kind: Any = ChatParrot, **arguments: Any) -> Any:
    """A deferring model of either kind."""
    connection = {"base_url": gateway.base_url, "api_key": gateway.api_key, "defer": True}
    return kind(**{"model": MODEL, **connection, **arguments})


KIND = pytest.mark.parametrize(
    ("kind", "says"),
    [
        (ChatParrot, "You said: {}".format),
        (ParrotLLM, lambda prompt: f" after {prompt.split()[-1]} (0)"),
    ],
    ids=["chat", "text"],
)
HOW = pytest.mark.parametrize("how", ["sync", "async"])


def is_waiting(text: Any) -> bool:
    """Whether it is a deferred text that nobody has looked at."""
    return type(text) is DeferredText and not text.is_resolved


@KIND
@HOW
async def test_a_chain_is_submitted_ahead(
    gateway: GatewayProcess, kind: Any, says: Callable[[str], str], how: str
) -> None:
    model = chat(gateway, kind, session=f"ahead-{kind.__name__}-{how}")
    ask = PromptTemplate.from_template("tell of {thing}") | model | StrOutputParser()
    if how == "sync":
        first = ask.invoke({"thing": "rain"})
        second = ask.invoke({"thing": first})
    else:
        first = await ask.ainvoke({"thing": "rain"})
        second = await ask.ainvoke({"thing": first})
    assert is_waiting(first)
    assert is_waiting(second)
    expected = says(f"tell of {says('tell of rain')}")
    assert (second.get() if how == "sync" else await second.aget()) == expected
    assert second == expected


def test_a_deferred_answer_in_the_next_messages_goes_as_a_reference(
    gateway: GatewayProcess, scripted: ScriptedModel
) -> None:
    model = chat(gateway, session="history")
    answer = model.invoke("hello")
    assert isinstance(answer, AIMessage)
    assert answer.response_metadata["parrot"]["session"]
    second = model.invoke([HumanMessage("hello"), answer, HumanMessage("and?")])
    assert is_waiting(answer.content)
    assert second.content == "You said: and?"
    assert scripted.bodies[-1]["messages"][1]["content"] == "You said: hello"


def test_values_of_inputs_may_be_deferred(gateway: GatewayProcess) -> None:
    model = chat(gateway, session="inputs")
    word = model.invoke("x").content
    answer = model.invoke("A poem of {{what}}", inputs={"what": word})
    assert is_waiting(word)
    assert answer.content == "You said: A poem of You said: x"


@KIND
@HOW
async def test_a_stream_of_a_deferred_call_is_one_chunk(
    gateway: GatewayProcess, kind: Any, says: Callable[[str], str], how: str
) -> None:
    model = chat(gateway, kind)
    if how == "sync":
        (chunk,) = model.stream("hello")
    else:
        (chunk,) = [chunk async for chunk in model.astream("hello")]
    if kind is ChatParrot:
        assert chunk.chunk_position == "last"
        chunk = chunk.content
    assert is_waiting(chunk)
    assert (chunk.get() if how == "sync" else await chunk.aget()) == says("hello")


@HOW
async def test_each_prompt_of_a_deferred_batch_is_a_call(
    gateway: GatewayProcess, scripted: ScriptedModel, how: str
) -> None:
    model, prompts = chat(gateway, ParrotLLM), [f"a-{how}", f"b-{how}"]
    texts = model.batch(prompts) if how == "sync" else await model.abatch(prompts)
    assert all(map(is_waiting, texts))
    assert [await text.aget() for text in texts] == [f" after {prompt} (0)" for prompt in prompts]
    assert sorted(body["prompt"] for body in scripted.bodies[-2:]) == prompts


def test_the_run_of_a_deferred_batch_is_its_first_call(gateway: GatewayProcess) -> None:
    texts = chat(gateway, ParrotLLM, session="one-run").generate(["a", "b", "c"]).generations
    assert len(texts) == 3
    calls = gateway.get("/v1/sessions/one-run/graph?format=json")["calls"]
    assert [call["run"] is None for call in calls] == [False, True, True]


def test_a_deferred_call_of_the_demo_model(demo: GatewayProcess) -> None:
    model = chat(demo, model=DEMO_MODEL, max_tokens=8, temperature=0)
    assert len(str(model.invoke("Tell me of a ship.").content)) > 5


def test_what_a_failed_value_says(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    good = upstream.script(document(chat_document()))
    bad = upstream.script(scripted_error(400))
    answer = chat(relay, model=bad).invoke("hello")
    with pytest.raises(DeferredFailedError, match="scripted 400"):
        str(answer.content)
    # So says a call that needs the value.
    waiting = chat(relay, model=good, defer=False)
    with pytest.raises(
        DeferredFailedError, match=r"scripted 400.*run the deferred call again"
    ) as caught:
        waiting.invoke([HumanMessage("and?"), answer])
    assert caught.value.code == "dependency_failed"


def test_what_an_expired_value_says(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    good = upstream.script(document(chat_document()))
    model = chat(relay, model=good, session="expires")
    answer = model.invoke("hello")
    model._clients.sync().delete("/sessions/expires", cast_to=object)
    with pytest.raises(DeferredExpiredError, match=r"ttl_s"):
        str(answer.content)
    with pytest.raises(DeferredExpiredError, match=r"Run the deferred call again"):
        chat(relay, model=good, defer=False).invoke([answer])
