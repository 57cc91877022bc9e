"""Answers of the four APIs, whole or streamed, as messages in OpenTelemetry's shape."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec

from parrot_gateway.telemetry.content.parts import Message, Part, Room, parts_of, tool_call_part
from parrot_gateway.telemetry.content.requests import message_parts, reasoning_of

_GZIP = b"\x1f\x8b"
_MAX_UNPACKED = 64 * 1024 * 1024
#: Finish reasons in the conventions' words.
_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "completed": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "incomplete": "length",
    "tool_use": "tool_call",
    "tool_calls": "tool_call",
    "function_call": "tool_call",
    "failed": "error",
    "cancelled": "error",
}
#: Events that end a response's stream and contain all of it.
_WHOLE = ("response.completed", "response.incomplete", "response.failed")
_event_decoder = msgspec.json.Decoder(dict[str, Any])
_decoder = msgspec.json.Decoder(list[dict[str, Any]])
#: Finish reason of a broken-off answer.
_BROKEN = "error"


def answer_of(body: bytes, room: Room) -> list[Message]:
    """Return the candidates of an answer as far as it came; empty if it has none.

    Args:
        body: the answer as sent: JSON or server-sent events, possibly gzipped.
    """
    if body.startswith(_GZIP):
        try:
            body = zlib.decompressobj(wbits=31).decompress(body, _MAX_UNPACKED)
        except zlib.error:
            return []
    try:
        if body.lstrip()[:1] == b"{":
            return _whole(msgspec.json.decode(body), room)
        return _streamed(body, room)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    except (ValueError, TypeError, AttributeError):
        # A part has an unexpected type.
        return []


def text_answer(text: str, finish_reason: str, room: Room) -> list[Message]:
    """Build the answer of a call whose text alone is known."""
    return [_message([{"type": "text", "content": room.take(text)}], finish_reason)]


def _message(parts: list[Part], reason: Any) -> Message:
    finish_reason = _REASONS.get(reason, reason) if isinstance(reason, str) else _BROKEN
    return {"role": "assistant", "parts": parts, "finish_reason": finish_reason}


def _whole(answer: dict[str, Any], room: Room) -> list[Message]:
    if isinstance(answer.get("output"), list):
        return [_of_response(answer, room)]
    if isinstance(answer.get("choices"), list):
        return [
            _message(_of_choice(choice, room), choice.get("finish_reason"))
            for choice in answer["choices"]
        ]
    if isinstance(answer.get("content"), list):
        return [_message(list(parts_of(answer["content"], room)), answer.get("stop_reason"))]
    return []


def _of_choice(choice: dict[str, Any], room: Room) -> list[Part]:
    message = choice.get("message")
    if isinstance(message, dict):
        return list(message_parts(message, room))
    return list(parts_of(choice.get("text"), room))


def _of_response(answer: dict[str, Any], room: Room) -> Message:
    parts: list[Part] = []
    for item in answer["output"]:
        kind = item.get("type")
        if kind == "message":
            parts += parts_of(item.get("content"), room)
        elif kind in ("function_call", "custom_tool_call"):
            arguments = item.get("arguments", item.get("input"))
            parts.append(tool_call_part(item.get("call_id"), item.get("name"), arguments, room))
        elif kind == "reasoning":
            parts += reasoning_of(item, room)
        else:
            parts.append({"type": str(kind)})
    reason = (answer.get("incomplete_details") or {}).get("reason") or answer.get("status")
    if reason == "completed" and any(part["type"] == "tool_call" for part in parts):
        reason = "tool_call"
    return _message(parts, reason)


class _Choice:
    """One candidate of a stream while it is assembled."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.text: list[str] = []
        #: By the call's index: id, name and pieces of the arguments.
        self.calls: dict[Any, tuple[list[str], list[str], list[str]]] = {}
        self.reason: Any = None

    def call(self, index: Any, id_: Any, name: Any, arguments: Any) -> None:
        pieces = self.calls.setdefault(index, ([], [], []))
        for piece, value in zip(pieces, (id_, name, arguments), strict=True):
            if isinstance(value, str) and value:
                piece.append(value)

    def message(self, room: Room) -> Message:
        parts: list[Part] = []
        if self.reasoning:
            parts.append({"type": "reasoning", "content": room.take("".join(self.reasoning))})
        if self.text:
            parts.append({"type": "text", "content": room.take("".join(self.text))})
        for ids, names, arguments in self.calls.values():
            parts.append(tool_call_part("".join(ids), "".join(names), "".join(arguments), room))
        return _message(parts, self.reason)


def _streamed(body: bytes, room: Room) -> list[Message]:
    choices: defaultdict[int, _Choice] = defaultdict(_Choice)
    for event in _events(body):
        kind = event.get("type")
        if kind in _WHOLE:
            return [_of_response(event["response"], room)]
        if isinstance(kind, str):
            _take_event(kind, event, choices[0])
        for choice in event.get("choices") or ():
            _take_choice(choice, choices[choice.get("index", 0)])
    return [choices[index].message(room) for index in sorted(choices)]


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    found = [
        line[5:]
        for line in body.splitlines()
        if line.startswith(b"data:") and not line.endswith(b"[DONE]")
    ]
    try:
        yield from _decoder.decode(b"[" + b",".join(found) + b"]")
        return
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    for data in found:
        try:
            yield _event_decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # The stream broke off here.
            return


def _take_choice(choice: dict[str, Any], found: _Choice) -> None:
    found.reason = choice.get("finish_reason") or found.reason
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        _add(found.text, choice.get("text"))
        return
    _add(found.reasoning, delta.get("reasoning_content") or delta.get("reasoning"))
    _add(found.text, delta.get("content") or delta.get("refusal"))
    for number, call in enumerate(delta.get("tool_calls") or ()):
        function = call.get("function") or {}
        index = call.get("index", number)
        found.call(index, call.get("id"), function.get("name"), function.get("arguments"))


def _take_event(kind: str, event: dict[str, Any], found: _Choice) -> None:
    """Apply an event of a message's stream, or of a response's stream that broke off."""
    delta = event.get("delta")
    if kind == "response.output_text.delta":
        _add(found.text, delta)
    elif kind == "response.reasoning_text.delta":
        _add(found.reasoning, delta)
    elif kind == "content_block_start":
        block = event.get("content_block") or {}
        if block.get("type") == "tool_use":
            found.call(event.get("index"), block.get("id"), block.get("name"), None)
    elif isinstance(delta, dict):
        if kind == "message_delta":
            found.reason = delta.get("stop_reason") or found.reason
        _add(found.text, delta.get("text"))
        _add(found.reasoning, delta.get("thinking"))
        if delta.get("partial_json"):
            found.call(event.get("index"), None, None, delta["partial_json"])


def _add(texts: list[str], text: Any) -> None:
    if isinstance(text, str) and text:
        texts.append(text)
