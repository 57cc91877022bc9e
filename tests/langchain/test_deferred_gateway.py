"""Deferred texts of a real gateway: values, and what is told when there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from deferring import DeferringChat, Wire
from harness.processes import GatewayProcess, free_port
from harness.scripted_upstream import ScriptedUpstream, chat_document, document
from harness.scripted_upstream import error as scripted_error
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_parrot import exceptions as errors
from langchain_parrot.deferred import DeferredText


@pytest.fixture
def wire(relay: GatewayProcess) -> Iterator[Wire]:
    """Clients of the gateway in front of the scripted upstream."""
    made = Wire(relay.base_url)
    yield made
    made.sync.close()


async def _look(text: DeferredText, how: str, timeout: float = 20.0) -> str:
    if how == "aget":
        return await text.aget(timeout)
    return await asyncio.to_thread(text.get, timeout)


HOW = pytest.mark.parametrize("how", ["get", "aget"])


def _ask(wire: Wire, model: str, session: str | None = None) -> DeferredText:
    fields = {} if session is None else {"session": session}
    content = DeferringChat(wire=wire, model=model, parrot=fields).invoke("Hi").content
    assert isinstance(content, DeferredText)
    return content


@HOW
async def test_a_value_arrives(wire: Wire, upstream: ScriptedUpstream, how: str) -> None:
    text = _ask(wire, upstream.script(document(chat_document("Hello there."))))
    assert text.reference.startswith("[[parrot:")
    assert await _look(text, how) == "Hello there."
    assert text == "Hello there."


@HOW
async def test_a_failed_call(wire: Wire, upstream: ScriptedUpstream, how: str) -> None:
    text = _ask(wire, upstream.script(scripted_error(400)))
    with pytest.raises(errors.DeferredFailedError, match="scripted 400") as caught:
        await _look(text, how)
    assert caught.value.code == "dependency_failed"
    assert caught.value.reference == text.reference


@HOW
async def test_an_unfinished_call(wire: Wire, upstream: ScriptedUpstream, how: str) -> None:
    gate = upstream.gate()
    text = _ask(wire, upstream.script(document(chat_document("At last."), before=gate)))
    with pytest.raises(errors.DeferredTimeoutError, match="Its call goes on") as caught:
        await _look(text, how, 0.05)
    # It is the gateway that ends the wait: a client that does repeats its request.
    assert not isinstance(caught.value.__cause__, openai.APITimeoutError)
    gate.open()
    assert await _look(text, how) == "At last."


@HOW
async def test_a_deleted_session(
    wire: Wire, relay: GatewayProcess, upstream: ScriptedUpstream, how: str
) -> None:
    text = _ask(wire, upstream.script(document(chat_document())), f"deleted-{how}")
    text_known = await _look(text, how)
    wire.sync.delete(f"/sessions/deleted-{how}", cast_to=object)
    with pytest.raises(errors.DeferredExpiredError, match="Run the deferred call again"):
        await _look(DeferredText(text.reference, wire.resolver), how)
    assert text == text_known


@HOW
async def test_nobody_there(how: str) -> None:
    nowhere = Wire(f"http://127.0.0.1:{free_port()}/v1")
    text = DeferredText("[[parrot:x]]", nowhere.resolver)
    with pytest.raises(errors.DeferredUnreachableError, match="Is it running"):
        await _look(text, how)


async def test_another_server(upstream: ScriptedUpstream) -> None:
    text = DeferredText("[[parrot:x]]", Wire(upstream.base_url).resolver)
    with pytest.raises(errors.DeferredError, match="not one of Parrot Gateway"):
        await _look(text, "get")


async def test_a_wrong_key(demo: GatewayProcess) -> None:
    text = DeferredText("[[parrot:x]]", Wire(demo.base_url, "wrong").resolver)
    with pytest.raises(errors.DeferredError, match="api_key"):
        await _look(text, "get")


def test_a_chain_sends_references_and_the_upstream_gets_values(
    wire: Wire, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(
        document(chat_document('a "small" town')), document(chat_document("The end."))
    )
    chat: Any = DeferringChat(wire=wire, model=model)
    chain = (
        ChatPromptTemplate.from_template("Name a {what}")
        | chat
        | StrOutputParser()
        | {"place": lambda text: text}
        | ChatPromptTemplate.from_messages([("user", "Tell of {place}."), ("ai", "{place}")])
        | chat
        | StrOutputParser()
    )
    assert chain.invoke({"what": "place"}) == "The end."
    first, second = upstream.calls(model)
    assert first.json["messages"][0]["content"] == "Name a place"
    assert [message["content"] for message in second.json["messages"]] == [
        'Tell of a "small" town.',
        'a "small" town',
    ]


def test_a_message_of_before_goes_on_as_a_reference(wire: Wire, upstream: ScriptedUpstream) -> None:
    gate = upstream.gate()
    model = upstream.script(
        document(chat_document("Hello."), before=gate), document(chat_document("Bye."))
    )
    chat = DeferringChat(wire=wire, model=model)
    first = chat.invoke("Hi")
    # Nobody waits for the first answer: it has not been given yet.
    second = chat.invoke([("user", "Hi"), first, ("user", "Go")])
    gate.open()
    assert isinstance(second, AIMessage)
    assert second.content == "Bye."
    assert upstream.calls(model)[1].json["messages"][1]["content"] == "Hello."
