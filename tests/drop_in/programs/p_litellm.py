"""litellm: chat with a tool, and a response format."""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "litellm>=1.106",
#   "mcp>=1",  # it imports that as soon as there are tools
# ]
# ///

from __future__ import annotations

import json
from typing import Any

import litellm
from common import BASE_URL, MODEL, ONLY_STRUCTURED, QUESTION, TOOL, get_weather, report
from weather import Weather


def main() -> None:
    options: Any = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": "none"}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    text = ""
    while not ONLY_STRUCTURED:
        answer: Any = litellm.completion(messages=messages, tools=[TOOL], **options)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        text = message.content
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    messages = messages[:1]
    form: Any = litellm.completion(messages=messages, response_format=Weather, **options)
    report("litellm", text, Weather.model_validate_json(form.choices[0].message.content))


main()
