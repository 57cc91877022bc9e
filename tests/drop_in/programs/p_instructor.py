"""instructor: structured output by a tool (its default), by schema and by JSON."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from common import MODEL, ONLY_STRUCTURED, QUESTION, get_weather, report
from weather import Weather


def main() -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    text = ""
    modes = [instructor.Mode.TOOLS]
    if not ONLY_STRUCTURED:
        modes += [instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON]
        # It has no tool loop of its own.
        text = get_weather("Paris")
    for mode in modes:
        client = instructor.from_openai(openai.OpenAI(), mode=mode)
        found = client.chat.completions.create(
            model=MODEL, messages=messages, response_model=Weather
        )
    report("instructor", text, found)


main()
