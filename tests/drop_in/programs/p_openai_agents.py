"""OpenAI Agents SDK, on Responses as by default."""

# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents>=0.24"]
# ///

from __future__ import annotations

from agents import Agent, Runner, function_tool, set_tracing_disabled
from common import MODEL, ONLY_STRUCTURED, QUESTION, get_weather, report
from weather import Weather


def main() -> None:
    set_tracing_disabled(True)
    text = ""
    if not ONLY_STRUCTURED:
        agent = Agent(name="a", model=MODEL, tools=[function_tool(get_weather)])
        text = Runner.run_sync(agent, QUESTION).final_output
    form = Agent(name="b", model=MODEL, output_type=Weather)
    report("openai-agents", text, Runner.run_sync(form, QUESTION).final_output)


main()
