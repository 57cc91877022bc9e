"""litellm: chat with a tool, and a response format."""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "litellm>=1.106",
#   "mcp>=1",  # it imports that as soon as there are tools
# ]
# ///

from __future__ import annotations

from typing import Any

import litellm
from common import BASE_URL, MODEL, ONLY_STRUCTURED, QUESTION, TOOL, report, results_of
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
        messages += results_of(message)
    messages = messages[:1]
    form: Any = litellm.completion(messages=messages, response_format=Weather, **options)
    report("litellm", text, Weather.model_validate_json(form.choices[0].message.content))


main()
