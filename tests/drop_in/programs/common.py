"""Common parts of all programs: one question, one tool, one form of answer, one report.

Standard library only. A program finds the gateway as any other does, by `OPENAI_BASE_URL`; the
model's name is in `DROP_IN_MODEL`.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from typing import Any

MODEL = os.environ["DROP_IN_MODEL"]
#: With a model that cannot follow instructions, only what grammars enforce is asked for.
ONLY_STRUCTURED = os.environ.get("DROP_IN_ONLY_STRUCTURED") == "1"
BASE_URL = os.environ["OPENAI_BASE_URL"]
QUESTION = "What is the weather in Paris? Look it up with get_weather."
REPORT = "It is 21 degrees and sunny in Paris."
#: `get_weather` as chats of OpenAI's API have it.
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
called: list[str] = []


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: its name.
    """
    called.append(city)
    return REPORT


def results_of(message: Any) -> list[dict[str, Any]]:
    """Return the tool's results for the calls of an answer, as messages of OpenAI's API."""
    return [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": get_weather(**json.loads(call.function.arguments)),
        }
        for call in message.tool_calls
    ]


def report(package: str, text: object, structured: Any) -> None:
    """Tell what was seen: the answer of the agent, None where there is none, and the structured one
    as a mapping."""
    if hasattr(structured, "model_dump"):
        structured = structured.model_dump()
    seen = {
        "version": version(package),
        "called": called,
        "text": None if text is None else str(text),
        "structured": structured,
    }
    print("DROP_IN " + json.dumps(seen))
