"""Answers of a chat that may call tools: the text of each choice, read into content and calls."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Any

from parrot_gateway.api.openai.answers import encode
from parrot_gateway.generation.tools.parsing import (
    ArgumentsPiece,
    CallBegin,
    ContentPiece,
    ToolCallReader,
    ToolFormat,
    ToolPiece,
)


def mint_tool_call_id() -> str:
    """An unguessable id of a tool call."""
    return "call_" + secrets.token_hex(12)


class ToolChoiceText:
    """One choice.

    Args:
        format: how the model writes calls.
        names: the tools that it may call.
        calls_only: it holds nothing but calls; what looks like content is one that was cut off.
    """

    __slots__ = ("_arguments", "_calls", "_calls_only", "_content", "_reader")

    def __init__(
        self, format: ToolFormat, names: Collection[str], *, calls_only: bool = False
    ) -> None:
        self._calls_only = calls_only
        self._reader = ToolCallReader(format, names)
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []

    def deltas(self, text: str, finish_reason: str | None) -> list[bytes]:
        """More of its text, as the `delta` of one chunk each; empty for what is held back."""
        pieces = self._read(text, ends=finish_reason is not None)
        return [encode(self._delta(piece)) for piece in pieces]

    def finish_reason(self, reason: str) -> str:
        """Why it ended, calls considered."""
        return "tool_calls" if self._calls and reason == "stop" else reason

    def message(self, text: str) -> dict[str, Any]:
        """The whole message, of all its text."""
        for piece in self._read(text, ends=True):
            self._delta(piece)
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if not content.strip() and (self._calls or self._calls_only):
            message["content"] = None
        if self._calls:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": "".join(arguments)}}
                for call, arguments in zip(self._calls, self._arguments, strict=True)
            ]
        return message

    def _read(self, text: str, *, ends: bool) -> list[ToolPiece]:
        pieces = self._reader.push(text)
        if ends:
            pieces += self._reader.finish()
        if self._calls_only:
            pieces = [piece for piece in pieces if not isinstance(piece, ContentPiece)]
        return pieces

    def _delta(self, piece: ToolPiece) -> dict[str, Any]:
        if isinstance(piece, ContentPiece):
            self._content.append(piece.text)
            return {"content": piece.text}
        if isinstance(piece, CallBegin):
            call = {
                "id": mint_tool_call_id(),
                "type": "function",
                "function": {"name": piece.name, "arguments": ""},
            }
            self._calls.append(call)
            self._arguments.append([])
            return {"tool_calls": [{"index": piece.call, **call}]}
        assert isinstance(piece, ArgumentsPiece)
        self._arguments[piece.call].append(piece.text)
        return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}
