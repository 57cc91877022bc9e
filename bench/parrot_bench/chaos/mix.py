"""The calls of `bench chaos`: one of each kind in turn, with what their answers must keep to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from parrot_bench.apps import book

#: Schema of answers, short enough to be whole within the tokens of a call.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 16},
        "tags": {"type": "array", "items": {"enum": ["old", "new", "odd"]}, "maxItems": 3},
        "pages": {"type": "integer", "minimum": 1, "maximum": 999},
    },
    "required": ["title", "tags", "pages"],
    "additionalProperties": False,
}
#: Schema of the arguments of the only tool.
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = "weather"
_TOOLS = [{"type": "function", "function": {"name": TOOL, "strict": True, "parameters": ARGUMENTS}}]
_FORM = {"type": "json_schema", "json_schema": {"name": "e", "strict": True, "schema": SCHEMA}}

#: By kind, the fields of its body; a kind with `temperature` 0 or a seed is repeatable.
_DRAWN = {"temperature": 0.9, "top_p": 0.95, "ignore_eos": True}
_FIELDS: dict[str, dict[str, Any]] = {
    "chat": _DRAWN,
    "n=4": _DRAWN | {"n": 4, "seed": 1},
    "schema": {"temperature": 0.9, "seed": 2, "response_format": _FORM},
    "tools": {
        "temperature": 0.9,
        "seed": 3,
        "tools": _TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    "penalties": _DRAWN
    | {"seed": 4, "frequency_penalty": 0.6, "presence_penalty": 0.4, "stop": ["zebra", " quite "]},
    "seeded": _DRAWN | {"seed": 5},
    "greedy": {"temperature": 0, "ignore_eos": True},
    "logprobs": _DRAWN | {"seed": 6, "logprobs": True, "top_logprobs": 2},
    "whole": {"temperature": 0, "ignore_eos": True, "stream": False},
}
KINDS = tuple(_FIELDS)
#: Those with which another server of an upstream can go on: plain text of one candidate.
PLAIN = ("chat", "penalties", "seeded", "greedy", "whole")


@dataclass(frozen=True, slots=True)
class Request:
    """One call, which is sent many times.

    Attributes:
        kind: one of `KINDS`.
        body: what is sent.
        is_repeatable: with equal arithmetic every answer is the same.
    """

    kind: str
    number: int
    body: dict[str, Any] = field(repr=False)
    is_repeatable: bool

    @property
    def choices(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def is_streamed(self) -> bool:
        return bool(self.body["stream"])


def requests(model: str, count: int, tokens: int, kinds: Sequence[str] = KINDS) -> list[Request]:
    """`count` different calls of up to `tokens` tokens each, the kinds in turn."""
    return [_request(model, kinds[number % len(kinds)], number, tokens) for number in range(count)]


def _request(model: str, kind: str, number: int, tokens: int) -> Request:
    # Few prompts share a beginning, so that a prefix cache hides no refill.
    text = f"{number}. Go on with this story: {book.passage(200, 700 * number)}"
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "stream": True,
        **_FIELDS[kind],
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if "seed" in body:
        body["seed"] += 100 * number
    return Request(kind, number, body, "seed" in body or body["temperature"] == 0)
