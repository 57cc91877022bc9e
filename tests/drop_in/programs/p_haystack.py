"""Haystack: an agent, and a generator with a response format."""

# /// script
# requires-python = ">=3.11"
# dependencies = ["haystack-ai>=3.4"]
# ///

from __future__ import annotations

import json

from common import BASE_URL, MODEL, ONLY_STRUCTURED, QUESTION, get_weather, report
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from weather import Weather


def main() -> None:
    message = ChatMessage.from_user(QUESTION)
    text: str | None = ""
    if not ONLY_STRUCTURED:
        generator = OpenAIChatGenerator(model=MODEL, api_base_url=BASE_URL)
        agent = Agent(chat_generator=generator, tools=[create_tool_from_function(get_weather)])
        text = agent.run(messages=[message])["messages"][-1].text
    form = OpenAIChatGenerator(
        model=MODEL, api_base_url=BASE_URL, generation_kwargs={"response_format": Weather}
    )
    found = json.loads(form.run(messages=[message])["replies"][0].text or "")
    report("haystack-ai", text, Weather(**found))


main()
