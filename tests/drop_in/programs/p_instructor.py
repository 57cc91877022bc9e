"""instructor: structured output by a tool (its default), by schema and by JSON."""

# /// script
# requires-python = ">=3.11"
# dependencies = ["instructor>=1.17"]
# ///

from __future__ import annotations

from typing import Any

import instructor
import openai
from common import MODEL, ONLY_STRUCTURED, QUESTION, report
from weather import Weather


def main() -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    # It has no agent.
    text = None
    modes = [instructor.Mode.TOOLS]
    if not ONLY_STRUCTURED:
        modes += [instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON]
    for mode in modes:
        client = instructor.from_openai(openai.OpenAI(), mode=mode)
        found = client.chat.completions.create(
            model=MODEL, messages=messages, response_model=Weather
        )
    report("instructor", text, found)


main()
