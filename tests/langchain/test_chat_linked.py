"""Headers that the models make of LangChain's run tree; a program's own words win."""

from __future__ import annotations

from typing import Any

import pytest
from harness.processes import GatewayProcess
from harness.scripted_model import MODEL
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableParallel
from langchain_parrot import ChatParrot, ParrotLLM


def chat_chain(gateway: GatewayProcess, **arguments: Any) -> Runnable[Any, str]:
    connection = {"base_url": gateway.base_url, "api_key": gateway.api_key}
    model = ChatParrot(**{"model": MODEL, **connection, **arguments})
    return ChatPromptTemplate.from_template("tell of {thing}") | model | StrOutputParser()


def text_chain(gateway: GatewayProcess, **arguments: Any) -> Runnable[Any, str]:
    connection = {"base_url": gateway.base_url, "api_key": gateway.api_key}
    model = ParrotLLM(**{"model": MODEL, **connection, **arguments})
    return PromptTemplate.from_template("tell of {thing}") | model


def calls_of(gateway: GatewayProcess, session: str) -> list[dict[str, Any]]:
    """The calls that a session's graph shows."""
    graph = gateway.get(f"/v1/sessions/{session}/graph?format=json")
    calls: list[dict[str, Any]] = graph["calls"]
    return calls


@pytest.mark.parametrize("chain_of", [chat_chain, text_chain])
@pytest.mark.parametrize("how", ["invoke", "stream", "ainvoke", "astream"])
async def test_a_run_of_a_thread_is_a_session(
    gateway: GatewayProcess, chain_of: Any, how: str
) -> None:
    thread = f"thread-{chain_of.__name__}-{how}"
    chain, config = chain_of(gateway), {"configurable": {"thread_id": thread}}
    if how == "invoke":
        chain.invoke({"thing": "x"}, config)
    elif how == "ainvoke":
        await chain.ainvoke({"thing": "x"}, config)
    elif how == "stream":
        list(chain.stream({"thing": "x"}, config))
    else:
        [piece async for piece in chain.astream({"thing": "x"}, config)]
    (call,) = calls_of(gateway, thread)
    assert call["run"]
    assert call["parent"]


@pytest.mark.parametrize("chain_of", [chat_chain, text_chain])
def test_branches_are_a_task_group(gateway: GatewayProcess, chain_of: Any) -> None:
    chain = chain_of(gateway)
    session = f"branches-{chain_of.__name__}"
    config = {"configurable": {"thread_id": session}}
    RunnableParallel(a=chain, b=chain).invoke({"thing": "x"}, config)
    first, second = calls_of(gateway, session)
    assert first["group"] == second["group"] != ""
    assert first["run"] != second["run"]


def test_what_a_program_says_wins(gateway: GatewayProcess) -> None:
    chain = chat_chain(gateway, session="my-own", name="teller", group="g")
    chain.invoke({"thing": "x"}, {"configurable": {"thread_id": "not-this-one"}})
    (call,) = calls_of(gateway, "my-own")
    assert (call["name"], call["group"]) == ("teller", "g")
    assert call["run"]


def test_without_linking_a_chain_is_an_ordinary_call(gateway: GatewayProcess) -> None:
    def named() -> list[str]:
        listed = gateway.get("/v1/sessions")["data"]
        return [session["name"] for session in listed if not session["inferred"]]

    sessions = named()
    assert chat_chain(gateway, linking=False).invoke({"thing": "x"}) == "You said: tell of x"
    assert sorted(named()) == sorted(sessions)
