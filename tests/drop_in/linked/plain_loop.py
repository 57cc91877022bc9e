"""A loop that keeps its history: the openai client, and nothing else."""

from __future__ import annotations

import os
from typing import Any

import openai


def main() -> None:
    client = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": "Tell me of a heron, a fox and a lake."}]
    for _ in range(4):
        reply = client.chat.completions.create(
            model=os.environ["DROP_IN_MODEL"], messages=messages, max_tokens=100, temperature=1.0
        )
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        messages.append({"role": "user", "content": "Go on."})


main()
