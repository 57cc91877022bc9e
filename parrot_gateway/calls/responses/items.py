"""Items of the Responses API, and the chains of them that calls leave.

Messages, calls of tools, what tools returned, reasoning and compacted histories: all text. The
shapes are those of the API, because they are also what is kept; bodies and checks are in
`api/responses`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from parrot_gateway.calls.opaque_text import pack_reasoning
from parrot_gateway.calls.responses.compaction import Compaction

Role: TypeAlias = Literal["user", "assistant", "system", "developer"]
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]

#: What an item costs besides its text, in bytes; a rough figure, for limits.
ITEM_OVERHEAD_BYTES = 400


def mint_response_id() -> str:
    return "resp_" + secrets.token_hex(24)


def mint_conversation_id() -> str:
    return "conv_" + secrets.token_hex(24)


def mint_item_id(prefix: str = "msg") -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


class Part(NamedTuple):
    text: str
    is_refusal: bool = False


class _TextItem:
    """Base of all items."""

    __slots__ = ()

    @property
    def text(self) -> str:
        """All of it as one string."""
        raise NotImplementedError

    @property
    def size_bytes(self) -> int:
        """Roughly what it takes to keep it."""
        return len(self.text.encode("utf-8", "replace")) + ITEM_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class MessageItem(_TextItem):
    """One message."""

    id: str
    role: Role
    parts: tuple[Part, ...]
    status: ItemStatus = "completed"

    @property
    def text(self) -> str:
        """All of it as one string; parts are joined by line breaks, as in a chat."""
        return "\n".join(part.text for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "status": self.status,
            "role": self.role,
            "content": [self._content(part) for part in self.parts],
        }

    def _content(self, part: Part) -> dict[str, Any]:
        if part.is_refusal:
            return {"type": "refusal", "refusal": part.text}
        if self.role == "assistant":
            return {"type": "output_text", "text": part.text, "annotations": []}
        return {"type": "input_text", "text": part.text}


@dataclass(frozen=True, slots=True)
class ToolCallItem(_TextItem):
    """A call of a function, whose `text` is the JSON of its arguments, or of a custom tool, whose
    `text` is its input."""

    id: str
    call_id: str
    name: str
    text: str
    is_custom: bool = False
    status: ItemStatus = "completed"
    #: Of the tool.
    namespace: str | None = None

    def to_dict(self) -> dict[str, Any]:
        shown = {
            "id": self.id,
            "type": "custom_tool_call" if self.is_custom else "function_call",
            "status": self.status,
            "call_id": self.call_id,
            "name": self.name,
            "input" if self.is_custom else "arguments": self.text,
        }
        return shown if self.namespace is None else {**shown, "namespace": self.namespace}


@dataclass(frozen=True, slots=True)
class ToolOutputItem(_TextItem):
    """The output of a tool."""

    id: str
    call_id: str
    text: str
    is_custom: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "custom_tool_call_output" if self.is_custom else "function_call_output",
            "status": "completed",
            "call_id": self.call_id,
            "output": self.text,
        }


@dataclass(frozen=True, slots=True)
class ReasoningItem(_TextItem):
    """A model's reasoning before it wrote; the template decides how much of it is shown."""

    id: str
    summary: tuple[str, ...]
    content: tuple[str, ...] = ()
    status: ItemStatus = "completed"
    #: Clients that keep nothing else of it get it as `encrypted_content` too.
    is_packed: bool = False

    @property
    def text(self) -> str:
        """The reasoning itself or, where only that is there, its summary."""
        return "\n".join(self.content or self.summary)

    def to_dict(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "id": self.id,
            "type": "reasoning",
            "status": self.status,
            "summary": [{"type": "summary_text", "text": text} for text in self.summary],
        }
        if self.content:
            shown["content"] = [{"type": "reasoning_text", "text": text} for text in self.content]
        if self.is_packed:
            shown["encrypted_content"] = pack_reasoning(self.text)
        return shown


@dataclass(frozen=True, slots=True)
class CompactionItem(_TextItem):
    """A compacted history."""

    id: str
    #: As clients carry it.
    content: str
    compaction: Compaction

    @property
    def text(self) -> str:
        """The text that a model reads."""
        return self.compaction.text

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "compaction", "encrypted_content": self.content}


Item: TypeAlias = MessageItem | ToolCallItem | ToolOutputItem | ReasoningItem | CompactionItem


class Turn:
    """The input and output that one call added to a history. Never changed.

    Turns form chains, which share their beginnings. `refs` counts the holders of a turn; its bytes
    become free with the last one.
    """

    __slots__ = ("input", "output", "parent", "refs", "size_bytes")

    def __init__(
        self, parent: Turn | None, input: Sequence[Item], output: Sequence[Item] = ()
    ) -> None:
        self.parent = parent
        self.input = tuple(input)
        self.output = tuple(output)
        self.size_bytes = sum(item.size_bytes for item in (*self.input, *self.output))
        self.refs = 0

    @property
    def items(self) -> tuple[Item, ...]:
        return self.input + self.output


def chain_of(turn: Turn | None) -> list[Turn]:
    """A turn and those before it, newest first."""
    turns: list[Turn] = []
    while turn is not None:
        turns.append(turn)
        turn = turn.parent
    return turns


def history_of(turn: Turn | None) -> list[Item]:
    """All items up to and with a turn, oldest first."""
    return [item for each in reversed(chain_of(turn)) for item in each.items]
