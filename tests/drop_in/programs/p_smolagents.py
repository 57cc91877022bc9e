"""smolagents: a tool-calling agent, whose last call is the answer; a response format."""

# /// script
# requires-python = ">=3.11"
# dependencies = ["smolagents[openai]>=1.26"]
# ///

from __future__ import annotations

import json

from common import BASE_URL, MODEL, ONLY_STRUCTURED, QUESTION, get_weather, report
from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from weather import Weather


def main() -> None:
    model = OpenAIServerModel(MODEL, api_base=BASE_URL, api_key="none")
    text: object = ""
    if not ONLY_STRUCTURED:
        agent = ToolCallingAgent(tools=[tool(get_weather)], model=model, verbosity_level=0)
        text = agent.run(QUESTION)
    schema = {"name": "weather", "schema": Weather.model_json_schema(), "strict": True}
    answer = model.generate(
        [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
        response_format={"type": "json_schema", "json_schema": schema},
    )
    report("smolagents", text, Weather(**json.loads(str(answer.content))))


main()
