"""LangGraph: `create_react_agent` with two tools."""

from __future__ import annotations

import os

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"It is 21 degrees and sunny in {city}."


def get_time(city: str) -> str:
    """Get the time in a city."""
    return f"It is half past nine in {city}."


def main() -> None:
    agent = create_react_agent(
        ChatOpenAI(model=os.environ["DROP_IN_MODEL"]), [get_weather, get_time]
    )
    agent.invoke({"messages": [("user", "How is Paris now?")]})


main()
