"""pydantic-ai: `openai:` models, which are Responses; output by its own tool."""

# /// script
# requires-python = ">=3.11"
# dependencies = ["pydantic-ai-slim[openai]>=2.68"]
# ///

from __future__ import annotations

from common import MODEL, ONLY_STRUCTURED, QUESTION, get_weather, report
from pydantic_ai import Agent
from weather import Weather


def main() -> None:
    name = f"openai:{MODEL}"
    text = ""
    if not ONLY_STRUCTURED:
        text = Agent(name, tools=[get_weather]).run_sync(QUESTION).output
    form = Agent(name, output_type=Weather).run_sync(QUESTION).output
    report("pydantic-ai-slim", text, form)


main()
