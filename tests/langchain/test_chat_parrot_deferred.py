"""defer=True: both models answer with texts whose value comes when it is looked at."""

from __future__ import annotations

from typing import Any

import pytest
from harness.processes import DEMO_MODEL, GatewayProcess
from harness.scripted_upstream import ScriptedUpstream, chat_document, document
from harness.scripted_upstream import error as scripted_error
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_parrot import ChatParrot, DeferredExpiredError, DeferredFailedError, ParrotLLM
from langchain_parrot.deferred import DeferredText
from scripted_model import MODEL, ScriptedModel


def chat(gateway: GatewayProcess, **arguments: Any) -> ChatParrot:
    connection = {"base_url": gateway.base_url, "api_key": gateway.api_key, "defer": True}
    return ChatParrot(**{"model": MODEL, **connection, **arguments})


def text_model(gateway: GatewayProcess, **arguments: Any) -> ParrotLLM:
    connection = {"base_url": gateway.base_url, "api_key": gateway.api_key, "defer": True}
    return ParrotLLM(**{"model": MODEL, **connection, **arguments})


def is_waiting(text: Any) -> bool:
    """Whether it is a deferred text that nobody has looked at."""
    return type(text) is DeferredText and not text.is_resolved


def test_a_chain_of_chat_calls_is_submitted_ahead(gateway: GatewayProcess) -> None:
    model = chat(gateway, session="ahead")
    ask = ChatPromptTemplate.from_template("tell of {thing}") | model | StrOutputParser()
    first = ask.invoke({"thing": "rain"})
    second = ask.invoke({"thing": first})
    assert is_waiting(first)
    assert is_waiting(second)
    assert second == "You said: tell of You said: tell of rain"


async def test_a_chain_of_text_calls_is_submitted_ahead(gateway: GatewayProcess) -> None:
    ask = PromptTemplate.from_template("tell of {thing}") | text_model(gateway) | StrOutputParser()
    first = await ask.ainvoke({"thing": "rain"})
    second = await ask.ainvoke({"thing": first})
    assert is_waiting(first)
    assert is_waiting(second)
    assert await second.aget() == " after (0) (0)"


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


def test_a_stream_of_a_deferred_call_is_one_chunk(gateway: GatewayProcess) -> None:
    (chunk,) = chat(gateway).stream("hello")
    assert is_waiting(chunk.content)
    assert chunk.chunk_position == "last"
    assert chunk.content == "You said: hello"
    (piece,) = text_model(gateway).stream("at sea")
    assert is_waiting(piece)
    assert piece == " after sea (0)"


async def test_an_asynchronous_stream_of_a_deferred_call_is_one_chunk(
    gateway: GatewayProcess,
) -> None:
    chunks = [chunk async for chunk in chat(gateway).astream("hello")]
    assert [await chunk.content.aget() for chunk in chunks] == ["You said: hello"]  # type: ignore[union-attr]
    pieces: list[Any] = [piece async for piece in text_model(gateway).astream("at sea")]
    assert [await piece.aget() for piece in pieces] == [" after sea (0)"]


async def test_each_prompt_of_a_deferred_batch_is_a_call(
    gateway: GatewayProcess, scripted: ScriptedModel
) -> None:
    texts = text_model(gateway).batch(["a", "b"])
    assert all(map(is_waiting, texts))
    assert texts == [" after a (0)", " after b (0)"]
    others: list[Any] = await text_model(gateway).abatch(["c", "d"])
    assert [await text.aget() for text in others] == [" after c (0)", " after d (0)"]
    assert [body["prompt"] for body in scripted.bodies[-4:-2]] == ["a", "b"]


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
