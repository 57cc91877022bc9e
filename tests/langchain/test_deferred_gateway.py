"""Deferred texts of a real gateway: values, and what is said when there is none."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from harness.processes import GatewayProcess, closed_port
from harness.scripted_upstream import ScriptedUpstream, chat_document, document, error
from harness.scripted_upstream import error as scripted_error
from langchain_core.prompts import PromptTemplate
from langchain_parrot import ChatParrot, asubmit, submit
from langchain_parrot import exceptions as errors
from langchain_parrot.deferred import DeferredText, GatewayResolver
from parrot_client.connection import Connection, OpenAIClients


def _resolver(base_url: str, api_key: str = "none") -> GatewayResolver:
    return GatewayResolver(OpenAIClients(Connection(base_url, api_key, max_retries=0)))


def _chat(relay: GatewayProcess, model: str, **arguments: Any) -> ChatParrot:
    return ChatParrot(model=model, base_url=relay.base_url, max_retries=0, **arguments)


async def _look(text: DeferredText, how: str, timeout: float = 20.0) -> str:
    if how == "aget":
        return await text.aget(timeout)
    return await asyncio.to_thread(text.get, timeout)


HOW = pytest.mark.parametrize("how", ["get", "aget"])


@HOW
async def test_a_value_arrives(relay: GatewayProcess, upstream: ScriptedUpstream, how: str) -> None:
    chat = _chat(relay, upstream.script(document(chat_document("Hello there."))))
    text = await asubmit(chat, "Hi") if how == "aget" else await asyncio.to_thread(submit, chat, "")
    assert text.reference is not None
    assert text.reference.startswith("[[parrot:")
    assert await _look(text, how) == "Hello there."
    assert text == "Hello there."


@HOW
async def test_a_failed_call(relay: GatewayProcess, upstream: ScriptedUpstream, how: str) -> None:
    text = submit(_chat(relay, upstream.script(scripted_error(400))), "Hi")
    with pytest.raises(errors.DeferredFailedError, match="scripted 400") as caught:
        await _look(text, how)
    assert caught.value.code == "dependency_failed"
    assert caught.value.reference == text.reference


def test_a_call_that_needs_a_failed_one_says_so(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    text = submit(_chat(relay, upstream.script(scripted_error(400))), "Hi")
    good = _chat(relay, upstream.script(document(chat_document())))
    chain = PromptTemplate.from_template("and {x}?") | good
    with pytest.raises(
        errors.DeferredFailedError, match=r"scripted 400.*run the deferred call again"
    ) as caught:
        chain.invoke({"x": text})
    assert caught.value.code == "dependency_failed"


@HOW
async def test_an_unfinished_call(
    relay: GatewayProcess, upstream: ScriptedUpstream, how: str
) -> None:
    gate = upstream.gate()
    text = submit(
        _chat(relay, upstream.script(document(chat_document("At last."), before=gate))), "Hi"
    )
    with pytest.raises(errors.DeferredTimeoutError, match="Its call goes on") as caught:
        await _look(text, how, 0.05)
    # It is the gateway that ends the wait: a client that does repeats its request.
    assert not isinstance(caught.value.__cause__, openai.APITimeoutError)
    gate.open()
    assert await _look(text, how) == "At last."


@HOW
async def test_a_deleted_session(
    relay: GatewayProcess, upstream: ScriptedUpstream, how: str
) -> None:
    chat = _chat(relay, upstream.script(document(chat_document())), session=f"deleted-{how}")
    text = submit(chat, "Hi")
    text_known = await _look(text, how)
    chat._clients.sync().delete(f"/sessions/deleted-{how}", cast_to=object)
    with pytest.raises(errors.DeferredExpiredError, match=r"Run the deferred call again"):
        await _look(DeferredText(text.reference, _resolver(relay.base_url)), how)
    with pytest.raises(errors.DeferredExpiredError, match=r"ttl_s"):
        await _look(DeferredText(text.reference, _resolver(relay.base_url)), how)
    assert text == text_known


@HOW
async def test_nobody_there(how: str) -> None:
    text = DeferredText("[[parrot:x]]", _resolver(f"http://127.0.0.1:{closed_port()}/v1"))
    with pytest.raises(errors.DeferredUnreachableError, match="Is it running"):
        await _look(text, how)


async def test_another_server() -> None:
    with ScriptedUpstream() as other:
        other.answer_all(document({"object": "list", "data": []}), error(404))
        resolver = _resolver(other.base_url)
        with pytest.raises(errors.DeferredError, match="not one of Parrot Gateway"):
            await _look(DeferredText("[[parrot:x]]", resolver), "get")
        with pytest.raises(errors.DeferredError):
            resolver.get_all(["[[parrot:x]]", "[[parrot:y]]"], 1.0)


async def test_a_wrong_key(demo: GatewayProcess) -> None:
    with pytest.raises(errors.DeferredError, match="api_key"):
        await _look(DeferredText("[[parrot:x]]", _resolver(demo.base_url, "wrong")), "get")


def test_a_server_that_is_no_gateway_is_named(upstream: ScriptedUpstream) -> None:
    model = upstream.script(document(chat_document()))
    chat = ChatParrot(model=model, base_url=upstream.base_url, max_retries=0)
    with pytest.raises(errors.ParrotFeatureError, match="no Parrot Gateway"):
        submit(chat, "Hi")
