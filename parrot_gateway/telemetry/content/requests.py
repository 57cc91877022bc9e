"""Requests of the four APIs as messages in OpenTelemetry's shape.

Reads what it can and never refuses: a request in no API's shape has no messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from parrot_gateway.telemetry.content.parts import (
    Message,
    Part,
    Room,
    parts_of,
    reasoning_part,
    string_of,
    text_part,
    tool_call_part,
    tool_response_part,
)

#: Fields of tools and tool servers that may contain keys.
_SECRETS = frozenset({"headers", "authorization", "authorization_token", "api_key", "env"})
_MAX_ROLE = 64


class Prompt(NamedTuple):
    """A request's separate instructions, and its messages."""

    system: list[Part]
    messages: list[Message]


def prompt_of(request: dict[str, Any], room: Room) -> Prompt:
    """Return the prompt of a request; if it is too long, only its newest messages.

    Args:
        request: the body: `prompt`, `messages` with or without `system`, or `input`.
    """
    if request.get("prompt") is not None:
        given = request["prompt"]
        several = isinstance(given, list) and any(isinstance(each, str | list) for each in given)
        return Prompt([], _newest(given if several else [given], _of_prompt, room))
    first = request.get("instructions")
    system = list(parts_of(request.get("system") if first is None else first, room))
    given = request.get("messages")
    given = request.get("input") if given is None else given
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return Prompt(system, _newest(given if isinstance(given, list) else [], _of_item, room))


def without_secrets(request: dict[str, Any]) -> dict[str, Any]:
    """Return a displayable request, with the keys of tool servers hidden."""
    shown = dict(request)
    for name in ("tools", "mcp_servers"):
        if isinstance(shown.get(name), list):
            shown[name] = [
                {key: "…" if key in _SECRETS else value for key, value in tool.items()}
                if isinstance(tool, dict)
                else tool
                for tool in shown[name]
            ]
    return shown


def _newest(
    items: list[Any], read: Callable[[Any, Room], Message | None], room: Room
) -> list[Message]:
    """Read the items from the last one back while there is room."""
    found: list[Message] = []
    for at in range(len(items) - 1, -1, -1):
        if room.is_full:
            # NOTE: one entry stands for all earlier messages, as single ones would take room again.
            missing = sum(len(string_of(each)) for each in items[: at + 1])
            room.cut += missing
            text = f"[{at + 1} earlier messages cut, {missing} characters]"
            found.append({"role": "user", "parts": [{"type": "text", "content": text}]})
            break
        message = read(items[at], room)
        if message is not None:
            found.append(message)
    return found[::-1]


def _of_prompt(prompt: Any, room: Room) -> Message:
    if isinstance(prompt, str):
        return {"role": "user", "parts": [text_part(prompt, room)]}
    count = len(prompt) if isinstance(prompt, list) else 0
    return {"role": "user", "parts": [{"type": "token_ids", "count": count}]}


def _of_item(item: Any, room: Room) -> Message | None:
    """Read a message of a chat, or an item of a response's input."""
    if not isinstance(item, dict):
        return None
    kind = item.get("type")
    if kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments", item.get("input"))
        part = tool_call_part(item.get("call_id"), item.get("name"), arguments, room)
        return {"role": "assistant", "parts": [part]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        part = tool_response_part(item.get("call_id"), item.get("output"), room)
        return {"role": "tool", "parts": [part]}
    if kind == "reasoning":
        return {"role": "assistant", "parts": list(reasoning_of(item, room))}
    role = item.get("role")
    if not isinstance(role, str):
        return {"role": "user", "parts": [{"type": string_of(kind)[:_MAX_ROLE] or "unknown"}]}
    if role in ("tool", "function"):
        id_ = item.get("tool_call_id", item.get("name"))
        return {"role": "tool", "parts": [tool_response_part(id_, item.get("content"), room)]}
    return {"role": role[:_MAX_ROLE], "parts": list(message_parts(item, room))}


def message_parts(message: dict[str, Any], room: Room) -> Iterator[Part]:
    """Yield the parts of a chat's or response's message: reasoning, content, tool calls."""
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str):
        yield reasoning_part(thought, room)
    yield from parts_of(message.get("content"), room)
    if isinstance(message.get("refusal"), str):
        yield text_part(message["refusal"], room)
    calls = message.get("tool_calls")
    if isinstance(message.get("function_call"), dict):
        calls = [{"function": message["function_call"]}]
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            function = call.get("function") or call.get("custom")
            function = function if isinstance(function, dict) else {}
            arguments = function.get("arguments", function.get("input"))
            yield tool_call_part(call.get("id"), function.get("name"), arguments, room)


def reasoning_of(item: dict[str, Any], room: Room) -> Iterator[Part]:
    """Yield the texts of a reasoning item, or its summary if that is all it has."""
    for part in item.get("content") or item.get("summary") or ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield reasoning_part(part["text"], room)
