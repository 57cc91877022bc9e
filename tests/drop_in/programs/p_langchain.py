"""LangChain: `create_agent`, on chat completions; an agent with a response format."""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "langchain>=1.4",
#   "langchain-openai>=1.7",
# ]
# ///

from __future__ import annotations

from common import MODEL, ONLY_STRUCTURED, QUESTION, get_weather, report
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_openai import ChatOpenAI
from weather import Weather


def main() -> None:
    model = ChatOpenAI(model=MODEL)
    asked = {"messages": [{"role": "user", "content": QUESTION}]}
    text = ""
    if not ONLY_STRUCTURED:
        answer = create_agent(model, [get_weather]).invoke(asked)
        text = answer["messages"][-1].text
    form = create_agent(model, response_format=ProviderStrategy(Weather)).invoke(asked)
    report("langchain", text, form["structured_response"])


main()
