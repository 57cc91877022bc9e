"""AutoGen: an assistant with a tool, and one with an output type."""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "autogen-agentchat>=0.7.5",
#   "autogen-ext[openai]>=0.7.5",
# ]
# ///

from __future__ import annotations

import asyncio
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from common import MODEL, ONLY_STRUCTURED, QUESTION, get_weather, report
from weather import Weather

INFO: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": True,
}


async def main() -> None:
    client = OpenAIChatCompletionClient(model=MODEL, model_info=INFO)
    text: Any = ""
    if not ONLY_STRUCTURED:
        agent = AssistantAgent("a", client, tools=[get_weather], reflect_on_tool_use=True)
        text = (await agent.run(task=QUESTION)).messages[-1].content  # type: ignore[union-attr]
    form = AssistantAgent("b", client, output_content_type=Weather)
    found: Any = (await form.run(task=QUESTION)).messages[-1]
    report("autogen-agentchat", text, found.content)


asyncio.run(main())
