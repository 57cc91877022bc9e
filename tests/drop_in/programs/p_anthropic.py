"""anthropic: messages, a tool loop, streamed; a forced tool as structured output."""

# /// script
# requires-python = ">=3.11"
# dependencies = ["anthropic>=2.12"]
# ///

from __future__ import annotations

from typing import Any

import anthropic
from common import BASE_URL, MODEL, ONLY_STRUCTURED, QUESTION, get_weather, report
from weather import Weather

TOOL: Any = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
FORM: Any = {"name": "weather", "input_schema": Weather.model_json_schema()}


def main() -> None:
    client = anthropic.Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key="none")
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    text = ""
    while not ONLY_STRUCTURED:
        with client.messages.stream(
            model=MODEL, max_tokens=500, messages=messages, tools=[TOOL]
        ) as stream:
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": get_weather(**block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        if not results:
            text = "".join(block.text for block in message.content if block.type == "text")
            break
        messages.append({"role": "user", "content": results})
    forced = client.messages.create(
        model=MODEL,
        max_tokens=500,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[FORM],
        tool_choice={"type": "tool", "name": "weather"},
    )
    (block,) = [block for block in forced.content if block.type == "tool_use"]
    report("anthropic", text, Weather.model_validate(block.input))


main()
