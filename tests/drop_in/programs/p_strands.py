"""Strands Agents: an agent with a tool, and a structured output."""

# /// script
# requires-python = ">=3.11"
# dependencies = ["strands-agents[openai]>=1.62"]
# ///

from __future__ import annotations

from common import BASE_URL, MODEL, ONLY_STRUCTURED, QUESTION, get_weather, report
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from weather import Weather


def main() -> None:
    model = OpenAIModel(
        client_args={"base_url": BASE_URL, "api_key": "none"}, model_id=MODEL, params={}
    )
    text = ""
    if not ONLY_STRUCTURED:
        agent = Agent(model=model, tools=[tool(get_weather)], callback_handler=None)
        text = str(agent(QUESTION))
    form = Agent(model=model, callback_handler=None)
    if ONLY_STRUCTURED:
        # The newer way asks the model freely first, and only then for the form.
        found = form.structured_output(Weather, QUESTION)
    else:
        found = form(QUESTION, structured_output_model=Weather).structured_output
    report("strands-agents", text, found)


main()
