"""Messages as Anthropic's clients read them: whole, or as events. Pure: deltas in, JSON out.

Answers of own engines and of upstreams come as the same deltas.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from parrot_gateway.backends.own.generate import Candidate
from parrot_gateway.calls.generation_request import CLOSED, ChoiceDelta
from parrot_gateway.calls.opaque_text import pack_reasoning
from parrot_gateway.calls.tools.parsing import ArgumentsPiece, ContentPiece, ToolCallBegin
from parrot_gateway.calls.usage import Usage

#: Whether an answer has blocks of reasoning: none, without its text, or with it.
ThinkingDisplay: TypeAlias = Literal["hidden", "omitted", "shown"]

#: What a block is, where it is no call: see `MessageWriter`.
_TEXT, _THINKING = -1, -2

encode = msgspec.json.Encoder().encode

_STOP_REASONS: Mapping[str, str] = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}


def event(type: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (type.encode(), encode({"type": type, **fields}))


def usage_dict(usage: Usage) -> dict[str, Any]:
    """Tokens as Anthropic counts them: those read from the cache apart from `input_tokens`."""
    counts = {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "service_tier": "standard",
    }
    if usage.reasoning_tokens:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts


def _stop_of(last: ChoiceDelta | Candidate | None, *, has_calls: bool) -> dict[str, Any]:
    """The fields that tell why a message ended.

    Args:
        last: of its deltas, or all of them; None where it has none.
        has_calls: whether it calls tools.
    """
    reason = "length" if last is None else last.finish_reason
    matched = None if last is None or reason != "stop" else last.stop_string
    if matched is not None:
        stop_reason = "stop_sequence"
    elif reason == "stop" and has_calls:
        stop_reason = "tool_use"
    else:
        stop_reason = _STOP_REASONS.get(reason or "", "end_turn")
    closed = CLOSED if last is not None and last.is_closed else {}
    return {"stop_reason": stop_reason, "stop_sequence": matched, **closed}


class MessageWriter:
    """One message, as events or whole.

    Args:
        model: as the request names it.
        id: of the message; minted by default.
        thinking: how reasoning is shown.
    """

    def __init__(
        self, model: str, id: str | None = None, *, thinking: ThinkingDisplay = "hidden"
    ) -> None:
        self._thinking = thinking
        #: Reasoning of the open block.
        self._thoughts: list[str] = []
        self._message: dict[str, Any] = {
            "id": id or f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._is_started = False
        self._first_usage = Usage(0, 0, 0)
        #: Number of the open block, or of the next one, and what it is: None for none, `_TEXT`,
        #: `_THINKING`, or the number of a call.
        self._index = 0
        self._open: int | None = None
        #: Calls that have a block.
        self._calls: set[int] = set()
        self._last: ChoiceDelta | None = None

    def prompt_filled(self, usage: Usage) -> None:
        """The usage that the first event reports; without it, nothing."""
        self._first_usage = usage

    def _start(self) -> bytes:
        self._is_started = True
        message = {**self._message, "usage": usage_dict(self._first_usage)}
        return event("message_start", {"message": message}) + event("ping", {})

    def delta(self, delta: ChoiceDelta) -> bytes:
        """Reasoning, text and pieces of calls."""
        events = b"" if self._is_started else self._start()
        if delta.reasoning:
            events += self._thought(delta.reasoning)
        if delta.pieces is None:
            if delta.text:
                events += self._text(delta.text)
        else:
            for piece in delta.pieces:
                if isinstance(piece, ContentPiece):
                    # Blanks around calls are no text.
                    if self._open == _TEXT or piece.text.strip():
                        events += self._text(piece.text)
                elif isinstance(piece, ToolCallBegin):
                    events += self._begin_call(piece)
                elif isinstance(piece, ArgumentsPiece) and piece.call == self._open:
                    change = {"type": "input_json_delta", "partial_json": piece.text}
                    events += self._delta(change)
        if delta.finish_reason is not None:
            self._last = delta
        return events

    def end(self, usage: Usage) -> bytes:
        """The last events."""
        events = b"" if self._is_started else self._start()
        events += self._close()
        delta = _stop_of(self._last, has_calls=bool(self._calls))
        counts = usage_dict(usage)
        del counts["service_tier"]
        events += event("message_delta", {"delta": delta, "usage": counts})
        return events + event("message_stop", {})

    def whole(self, candidate: Candidate, usage: Usage) -> bytes:
        """The message as one JSON object."""
        content: list[dict[str, Any]] = []
        if candidate.reasoning and self._thinking != "hidden":
            thought = "".join(candidate.reasoning)
            shown = thought if self._thinking == "shown" else ""
            content.append(_thinking_block(shown, self._signature(thought)))
        text = candidate.text
        if text.strip() or (text and not candidate.calls):
            content.append({"type": "text", "text": text})
        content += (
            _tool_use(call.id, call.name, _input(call.arguments)) for call in candidate.calls
        )
        stop = _stop_of(candidate, has_calls=bool(candidate.calls))
        message = {**self._message, "content": content, **stop}
        return encode(message | {"usage": usage_dict(usage)})

    def _thought(self, text: str) -> bytes:
        if self._thinking == "hidden":
            return b""
        events = b""
        if self._open != _THINKING:
            events = self._begin(_THINKING, _thinking_block("", ""))
        self._thoughts.append(text)
        if self._thinking == "shown":
            events += self._delta({"type": "thinking_delta", "thinking": text})
        return events

    def _signature(self, thought: str) -> str:
        """Return the signature that marks our blocks and holds the text that is left out."""
        return pack_reasoning(thought if self._thinking == "omitted" else "")

    def _text(self, text: str) -> bytes:
        events = b""
        if self._open != _TEXT:
            events = self._begin(_TEXT, {"type": "text", "text": ""})
        return events + self._delta({"type": "text_delta", "text": text})

    def _begin_call(self, call: ToolCallBegin) -> bytes:
        if call.call in self._calls:
            # Some servers repeat the name with every piece.
            return b""
        self._calls.add(call.call)
        return self._begin(call.call, _tool_use(call.id, call.name, {}))

    def _begin(self, kind: int, block: dict[str, Any]) -> bytes:
        events = self._close()
        self._open = kind
        fields = {"index": self._index, "content_block": block}
        return events + event("content_block_start", fields)

    def _delta(self, change: dict[str, Any]) -> bytes:
        return event("content_block_delta", {"index": self._index, "delta": change})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        events = b""
        if self._open == _THINKING:
            signature = self._signature("".join(self._thoughts))
            events = self._delta({"type": "signature_delta", "signature": signature})
            self._thoughts = []
        self._open = None
        self._index += 1
        return events + event("content_block_stop", {"index": self._index - 1})


def _thinking_block(thinking: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": thinking, "signature": signature}


def _tool_use(id: str, name: str, input: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": input}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object; none of those that were cut short."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
