"""Items of the Responses API as the messages of a chat, which templates render.

An assistant's reasoning, text and calls are one message there; what each tool returned is another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from parrot_gateway.calls.requests.types import Message
from parrot_gateway.calls.responses.items import (
    CompactionItem,
    Item,
    MessageItem,
    ReasoningItem,
    ToolCallItem,
    ToolOutputItem,
)
from parrot_gateway.calls.tools.definitions import qualified_name


def messages_of(items: Iterable[Item]) -> list[Message]:
    """The messages of a chat that holds these items."""
    messages: list[Message] = []
    #: The assistant's message that calls may still be added to; not yet in `messages`.
    step = _Step()
    for item in items:
        if isinstance(item, ReasoningItem):
            if not step.is_reasoning_only:
                step = step.closed(messages)
            step.reasoning.append(item.text)
        elif isinstance(item, ToolCallItem):
            step.calls.append(_call(item))
        elif isinstance(item, MessageItem) and item.role == "assistant":
            if not step.is_reasoning_only:
                step = step.closed(messages)
            step.text = item.text
        else:
            step = step.closed(messages)
            if isinstance(item, ToolOutputItem):
                messages.append(Message("tool", item.text, tool_call_id=item.call_id))
            elif isinstance(item, CompactionItem):
                messages.append(Message("user", item.text))
            else:
                messages.append(Message(item.role, item.text))
    step.closed(messages)
    return messages


class _Step:
    """An assistant's reasoning, text and calls up to the next message of somebody else."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.text: str | None = None
        self.calls: list[dict[str, Any]] = []

    @property
    def is_reasoning_only(self) -> bool:
        return self.text is None and not self.calls

    def closed(self, messages: list[Message]) -> _Step:
        """Add it to the messages, if there is anything of it; returns the next."""
        if not self.is_reasoning_only:
            messages.append(
                Message(
                    "assistant",
                    self.text,
                    reasoning_content="\n".join(self.reasoning) or None,
                    tool_calls=self.calls or None,
                )
            )
        return _Step()


def _call(item: ToolCallItem) -> dict[str, Any]:
    arguments = item.text
    if item.is_custom:
        arguments = json.dumps({"input": item.text}, ensure_ascii=False)
    function = {"name": qualified_name(item.namespace, item.name), "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}
