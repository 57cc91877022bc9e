"""An engine whose answers differ with the prompt, as a model's do at some temperature.

It calls the tools that it is offered as `CleverEngine` does, and else tells what nobody else tells:
so that who wrote a text can be told from the text.
"""

from __future__ import annotations

import json
import random
from typing import Any

from parrot_engine.protocol import SamplingParams

from harness.clever_engine import CleverEngine, answer
from harness.schema_document import document_of

_WORDS = (
    "heron fox duck reed pond barge quay slate barley harbour ferry lantern orchard miller bridge "
    "copper saddle thimble velvet walnut beacon candle drift ember furrow granite hollow island"
)
_NUM_WORDS = 24


def invented(seed: str) -> str:
    """A text, always the same of a seed."""
    return " ".join(random.Random(seed).choices(_WORDS.split(), k=_NUM_WORDS)).capitalize() + "."


class InventiveEngine(CleverEngine):
    """See above."""

    def _script(self, prompt: list[int], sampling: SamplingParams) -> list[int]:
        text = self.tokenizer.decode(prompt, skip_special_tokens=True)
        chat = json.loads(text)
        messages, tools = chat["messages"], chat["tools"] or []
        said = answer(messages, tools, sampling.grammar)
        if not said.startswith("<tool_call>"):
            return self.text(invented(text))
        name = json.loads(said.split("\n")[1])["name"]
        function = next(tool["function"] for tool in tools if tool["function"]["name"] == name)

        def value(kind: str, field: str) -> Any:
            return "Paris" if field == "city" else invented(text)

        arguments = document_of(function["parameters"], value)
        call = json.dumps({"name": name, "arguments": arguments})
        return self.text(f"<tool_call>\n{call}\n</tool_call>")
