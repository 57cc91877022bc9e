"""OpenAI Agents SDK: a handoff, or with the argument `tool` an agent that is another one's tool."""

from __future__ import annotations

import os
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"It is 21 degrees and sunny in {city}."


def main() -> None:
    set_tracing_disabled(True)
    model = os.environ["DROP_IN_MODEL"]
    knows = Agent(name="Meteorologist", instructions="You know.", model=model, tools=[get_weather])
    if sys.argv[1:] == ["tool"]:
        tool = knows.as_tool("ask_meteorologist", "Knows the weather.")
        first = Agent(name="Editor", instructions="You write.", model=model, tools=[tool])
    else:
        first = Agent(name="Triage", instructions="You hand over.", model=model, handoffs=[knows])
    Runner.run_sync(first, "How is Paris now?")


main()
