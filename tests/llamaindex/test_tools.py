"""Tool calls with scripted answers behind a real gateway: whole, streamed, and by an agent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.processes import GatewayProcess
from harness.scripted_upstream import (
    Answer,
    ScriptedUpstream,
    chat_document,
    chat_events,
    chunk,
    data,
    document,
    event_stream,
)
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.parrot import Parrot


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


TOOL = FunctionTool.from_defaults(add)


def call(identity: str, arguments: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": "add", "arguments": arguments}}


def answer_of(*calls: dict[str, Any]) -> Answer:
    answer = chat_document("")
    choice = answer["choices"][0]
    choice["message"] |= {"content": None, "tool_calls": list(calls)}
    choice["finish_reason"] = "tool_calls"
    return document(answer)


def stream_of(*calls: dict[str, Any]) -> Answer:
    """Each call's id and name first, its arguments in two pieces."""
    events = [data(chunk("scripted", {"role": "assistant", "content": ""}))]
    for index, made in enumerate(calls):
        arguments = made["function"]["arguments"]
        begun = {**made, "function": {"name": "add", "arguments": ""}, "index": index}
        events.append(data(chunk("scripted", {"tool_calls": [begun]})))
        for piece in (arguments[:4], arguments[4:]):
            delta = {"index": index, "function": {"arguments": piece}}
            events.append(data(chunk("scripted", {"tool_calls": [delta]})))
    events.append(data(chunk("scripted", {}, "tool_calls")))
    return event_stream(*events, b"data: [DONE]\n\n")


TWO = (call("call_a", '{"a": 2, "b": 3}'), call("call_b", '{"a": 4, "b": 5}'))


def test_tools_are_sent_and_calls_come_back(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    name = upstream.script(answer_of(*TWO))
    llm = Parrot(model=name, base_url=relay.base_url)
    history = [ChatMessage(role="system", content="Be exact.")]
    response = llm.chat_with_tools(
        [TOOL], "2+3 and 4+5?", history, allow_parallel_tool_calls=True, tool_required=True
    )
    sent = upstream.calls(name)[0].json
    assert [message["role"] for message in sent["messages"]] == ["system", "user"]
    assert len(history) == 1
    assert sent["tools"][0]["function"]["name"] == "add"
    assert (sent["tool_choice"], sent["parallel_tool_calls"]) == ("required", True)
    selected = llm.get_tool_calls_from_response(response)
    assert [(each.tool_id, each.tool_kwargs) for each in selected] == [
        ("call_a", {"a": 2, "b": 3}),
        ("call_b", {"a": 4, "b": 5}),
    ]


def test_one_call_where_one_was_asked_for(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    name = upstream.script(answer_of(*TWO))
    llm = Parrot(model=name, base_url=relay.base_url, strict=True)
    response = llm.chat_with_tools([TOOL], "2+3?", tool_choice="add")
    assert [each.tool_id for each in llm.get_tool_calls_from_response(response)] == ["call_a"]
    sent = upstream.calls(name)[0].json
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert sent["parallel_tool_calls"] is False
    function = sent["tools"][0]["function"]
    assert function["strict"] is True
    assert function["parameters"]["additionalProperties"] is False


def test_no_call_is_an_error_only_if_wanted(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    llm = Parrot(model=upstream.script(document(chat_document("No."))), base_url=relay.base_url)
    response = llm.chat_with_tools([TOOL], "2+3?")
    with pytest.raises(ValueError, match=r"called no tool.*No\."):
        llm.get_tool_calls_from_response(response)
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []


async def test_streamed_calls_grow(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    llm = Parrot(model=upstream.script(stream_of(*TWO)), base_url=relay.base_url)
    chunks = list(
        llm.stream_chat_with_tools([TOOL], "2+3 and 4+5?", allow_parallel_tool_calls=True)
    )
    stream = await llm.astream_chat_with_tools([TOOL], "2+3 and 4+5?")
    for pieces in (chunks, [piece async for piece in stream]):
        selected = llm.get_tool_calls_from_response(pieces[-1])
        assert [each.tool_kwargs for each in selected] == [{"a": 2, "b": 3}, {"a": 4, "b": 5}]
        # The first call is there, with what is known of its arguments, before the second one.
        early = llm.get_tool_calls_from_response(pieces[2])
        assert [(each.tool_id, each.tool_name) for each in early] == [("call_a", "add")]


def test_calling_goes_to_the_end(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    llm = Parrot(model=upstream.script(answer_of(TWO[0])), base_url=relay.base_url)
    assert llm.predict_and_call([TOOL], "2+3?").response == "5"


async def test_an_agent_calls_a_tool_and_answers(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    name = upstream.script(stream_of(TWO[0]), event_stream(*chat_events(["It ", "is 5."])))
    llm = Parrot(model=name, base_url=relay.base_url)
    agent = FunctionAgent(tools=[add], llm=llm, system_prompt="Be exact.")
    assert str(await agent.run("What is 2+3?")) == "It is 5."
    first, second = (received.json for received in upstream.calls(name))
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    asked, told = second["messages"][2:]
    assert asked["content"] is None
    assert json.loads(asked["tool_calls"][0]["function"]["arguments"]) == {"a": 2, "b": 3}
    assert told == {"role": "tool", "content": "5", "tool_call_id": "call_a"}
    assert "parrot" not in first
    # Both calls of the agent are in one session, named after its run.
    sessions = [
        session
        for session in relay.get("/v1/sessions")["data"]
        if session["name"].startswith("FunctionAgent.run-")
    ]
    assert [session["calls"]["finished"] for session in sessions] == [2]
    graph = relay.get(f"/v1/sessions/{sessions[0]['id']}/graph?format=json")
    assert all("run_agent_step" in made["parent"] for made in graph["calls"])
    assert all(made["run"].startswith("Parrot.astream_chat-") for made in graph["calls"])
    assert [made["group"] for made in graph["calls"]] == [None, None]


def test_tools_are_never_deferred_by_default(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    llm = Parrot(model=upstream.script(answer_of(TWO[0])), base_url=relay.base_url, defer=True)
    response = llm.chat_with_tools([TOOL], "2+3?")
    assert llm.get_tool_calls_from_response(response)[0].tool_kwargs == {"a": 2, "b": 3}


def test_pictures_are_sent_as_parts(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    name = upstream.script(document(chat_document("A cat.")))
    llm = Parrot(model=name, base_url=relay.base_url)
    picture = ImageBlock(url="http://example.org/cat.png", detail="low")
    llm.chat([ChatMessage(role="user", blocks=[TextBlock(text="What is it?"), picture])])
    assert upstream.calls(name)[0].json["messages"][0]["content"] == [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": "http://example.org/cat.png", "detail": "low"}},
    ]
