"""LangChain's ChatOpenAI and OpenAI against the gateway, by OPENAI_BASE_URL alone."""

from __future__ import annotations

from typing import Any

import pytest
from harness.processes import DEMO_MODEL, GatewayProcess
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

TELL = ChatPromptTemplate.from_template("Tell me of {thing}.")


@pytest.fixture(autouse=True)
def environment(demo: GatewayProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a LangChain program has to change."""
    monkeypatch.setenv("OPENAI_BASE_URL", demo.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", demo.api_key or "")


def chat(**arguments: Any) -> ChatOpenAI:
    return ChatOpenAI(**{"model": DEMO_MODEL, "max_tokens": 12, "temperature": 0, **arguments})


def test_a_chain_and_its_batch() -> None:
    chain = TELL | chat() | StrOutputParser()
    one = chain.invoke({"thing": "a ship"})
    assert one
    assert chain.batch([{"thing": "a ship"}, {"thing": "a ship"}]) == [one, one]


async def test_an_asynchronous_stream_with_usage() -> None:
    chunks = [chunk async for chunk in chat(stream_usage=True).astream("Tell me of a ship.")]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.text == chat().invoke("Tell me of a ship.").text
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 12


class Ship(BaseModel):
    """A ship."""

    name: str = Field(max_length=8)
    masts: int = Field(ge=1, le=3)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_of_the_demo_model(method: Any) -> None:
    # An open schema is filled until the answer is cut; a strict one has no more than its fields.
    structured = chat(max_tokens=200).with_structured_output(Ship, method=method, strict=True)
    ship = structured.invoke("A ship?")
    assert isinstance(ship, Ship)


def test_a_forced_tool_call_of_the_demo_model() -> None:
    model = chat(max_tokens=200).bind_tools([Ship], tool_choice="Ship", strict=True)
    answer = model.invoke("A ship?")
    (call,) = answer.tool_calls
    assert call["name"] == "Ship"
    assert Ship(**call["args"])


def test_fields_of_parrot_travel_in_the_extra_body(demo: GatewayProcess) -> None:
    model = chat(extra_body={"parrot": {"session": "chat-openai", "output": "ship"}})
    text = model.invoke("Tell me of a ship.").text
    (variable,) = demo.get("/v1/variables?session=chat-openai")["data"]
    assert variable["name"] == "ship"
    assert demo.get(f"/v1/variables/{variable['id']}")["value"] == text


async def test_a_text_model() -> None:
    model = OpenAI(model=DEMO_MODEL, max_tokens=8, temperature=0)
    one = model.invoke("Once upon a time")
    assert model.batch(["Once upon a time", "The sea"])[0] == one
    assert "".join([piece async for piece in model.astream("Once upon a time")]) == one
