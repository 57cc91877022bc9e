"""openai: chat completions, a tool loop that streams, `parse`."""

# /// script
# requires-python = ">=3.11"
# dependencies = ["openai>=3.54"]
# ///

from __future__ import annotations

from typing import Any

import openai
from common import MODEL, ONLY_STRUCTURED, QUESTION, TOOL, report, results_of
from weather import Weather


def main() -> None:
    client = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    text: str | None = ""
    while not ONLY_STRUCTURED:
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=[TOOL]) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        text = message.content
        if not message.tool_calls:
            break
        messages += results_of(message)
    parsed = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], response_format=Weather
    )
    report("openai", text, parsed.choices[0].message.parsed)


main()
