"""Where in a request body texts stand that may hold references and placeholders.

A table, by kind of request. Everything it does not name (model, tools, stop strings, images,
unknown fields) is never looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PromptLocation:
    """What a JSON value may hold."""

    #: A string here is such a text.
    is_text: bool = False
    #: The string is itself a JSON document.
    is_json: bool = False
    #: Of an array: what each item may hold.
    items: PromptLocation | None = None
    #: Of an object: what its fields may hold.
    fields: Mapping[str, PromptLocation] = field(default_factory=dict)
    #: Every string below, at any depth.
    is_anything: bool = False

    def item(self) -> PromptLocation | None:
        """What the items of an array here may hold."""
        return self if self.is_anything else self.items

    def field_of(self, name: str) -> PromptLocation | None:
        """What a field of an object here may hold."""
        return self if self.is_anything else self.fields.get(name)


_TEXT = PromptLocation(is_text=True)
_JSON_TEXT = PromptLocation(is_text=True, is_json=True)
_TEXTS = PromptLocation(is_text=True, items=_TEXT)
#: A string, or parts of which some hold text.
_CONTENT = PromptLocation(
    is_text=True, items=PromptLocation(fields={"text": _TEXT, "refusal": _TEXT})
)
_TOOL_CALL = PromptLocation(
    fields={
        "function": PromptLocation(fields={"arguments": _JSON_TEXT}),
        "custom": PromptLocation(fields={"input": _TEXT}),
    }
)
_MESSAGE = PromptLocation(
    fields={
        "content": _CONTENT,
        "refusal": _TEXT,
        "reasoning": _TEXT,
        "reasoning_content": _TEXT,
        "tool_calls": PromptLocation(items=_TOOL_CALL),
        "function_call": PromptLocation(fields={"arguments": _JSON_TEXT}),
    }
)
#: An item of the Responses API: a message, a tool call, or what a tool gave.
_ITEM = PromptLocation(
    is_text=True,
    fields={
        "content": _CONTENT,
        "arguments": _JSON_TEXT,
        "input": _TEXT,
        "output": _CONTENT,
        "summary": _CONTENT,
    },
)

ANYTHING = PromptLocation(is_text=True, is_anything=True)

PROMPT_LOCATIONS: Mapping[str, PromptLocation] = {
    "completions": PromptLocation(fields={"prompt": _TEXTS, "suffix": _TEXT}),
    "chat": PromptLocation(
        fields={
            "messages": PromptLocation(items=_MESSAGE),
            "prediction": PromptLocation(fields={"content": _CONTENT}),
        }
    ),
    "responses": PromptLocation(
        fields={"instructions": _TEXT, "input": PromptLocation(is_text=True, items=_ITEM)}
    ),
    "embeddings": PromptLocation(fields={"input": _TEXTS}),
}
