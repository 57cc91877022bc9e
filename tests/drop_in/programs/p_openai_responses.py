"""openai: Responses, a tool loop on stored responses, `parse`."""

# /// script
# requires-python = ">=3.11"
# dependencies = ["openai>=3.54"]
# ///

from __future__ import annotations

import json
from typing import Any

import openai
from common import MODEL, ONLY_STRUCTURED, QUESTION, get_weather, report
from weather import Weather

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def main() -> None:
    client = openai.OpenAI()
    text = ""
    if not ONLY_STRUCTURED:
        answer = client.responses.create(model=MODEL, input=QUESTION, tools=[TOOL])
        calls = [item for item in answer.output if item.type == "function_call"]
        while calls:
            outputs: list[Any] = [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": get_weather(**json.loads(call.arguments)),
                }
                for call in calls
            ]
            answer = client.responses.create(
                model=MODEL, input=outputs, tools=[TOOL], previous_response_id=answer.id
            )
            calls = [item for item in answer.output if item.type == "function_call"]
        text = answer.output_text
    parsed = client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather)
    report("openai", text, parsed.output_parsed)


main()
