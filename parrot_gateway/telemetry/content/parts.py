"""Parts of messages in the shape of OpenTelemetry's GenAI conventions, cut to a length.

https://github.com/open-telemetry/semantic-conventions-genai (gen-ai-input-messages.json)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import msgspec

from parrot_gateway.telemetry.key_hiding import hide_keys

#: A part, and a message `{"role", "parts"}`; an answer's has `finish_reason` too.
Part: TypeAlias = dict[str, Any]
Message: TypeAlias = dict[str, Any]

#: Kinds of text parts in the three APIs.
_TEXTS = frozenset({"text", "input_text", "output_text", "summary_text"})
_REASONING = frozenset({"thinking", "reasoning", "reasoning_text"})
_MEDIA = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "audio": "audio",
    "video_url": "video",
    "file": "document",
    "input_file": "document",
    "document": "document",
}
_MAX_NAME = 256


class Room:
    """The characters that all texts of one call may have together.

    Attributes:
        left: remaining characters.
        cut: omitted characters so far.
    """

    def __init__(self, characters: int) -> None:
        self.left = characters
        self.cut = 0

    @property
    def is_full(self) -> bool:
        """Return true if further texts would be omitted."""
        return self.left <= 0

    def take(self, text: str) -> str:
        """Return the text, or its beginning and the number of missing characters; keys are
        hidden.
        """
        taken = text[: max(0, self.left)]
        missing = len(text) - len(taken)
        self.left -= len(taken)
        self.cut += missing
        if not taken.isascii():
            # Some upstreams send halves of surrogate pairs, which cannot be encoded.
            taken = taken.encode("utf-8", "replace").decode()
        taken = hide_keys(taken)
        return f"{taken}… [{missing} characters cut]" if missing else taken


def text_part(text: str, room: Room) -> Part:
    return {"type": "text", "content": room.take(text)}


def reasoning_part(text: str, room: Room) -> Part:
    return {"type": "reasoning", "content": room.take(text)}


def tool_call_part(id_: Any, name: Any, arguments: Any, room: Room) -> Part:
    """Build the part of a tool call.

    Args:
        arguments: JSON text, or the decoded value.
    """
    text = string_of(arguments)
    taken: Any = room.take(text)
    if taken == text:
        with suppress(msgspec.DecodeError, RecursionError):
            taken = msgspec.json.decode(text)
    return {
        "type": "tool_call",
        "id": string_of(id_)[:_MAX_NAME],
        "name": string_of(name)[:_MAX_NAME],
        "arguments": taken,
    }


def tool_response_part(id_: Any, content: Any, room: Room) -> Part:
    """Build the part of a tool's result."""
    return {
        "type": "tool_call_response",
        "id": string_of(id_)[:_MAX_NAME],
        "response": room.take(plain_text(content)),
    }


def parts_of(content: Any, room: Room) -> Iterator[Part]:
    """Yield the parts of a message's content in any of the APIs."""
    if isinstance(content, str):
        yield text_part(content, room)
        return
    if isinstance(content, dict):
        content = [content]
    for part in content if isinstance(content, list) else ():
        if isinstance(part, str):
            yield text_part(part, room)
        elif isinstance(part, dict):
            yield _part(part, room)


def _part(part: Mapping[str, Any], room: Room) -> Part:
    kind = part.get("type")
    if kind in _TEXTS or kind == "refusal":
        return text_part(string_of(part.get("text", part.get("refusal"))), room)
    if kind in _REASONING:
        return reasoning_part(string_of(part.get("thinking", part.get("text"))), room)
    if kind == "tool_use":
        return tool_call_part(part.get("id"), part.get("name"), part.get("input"), room)
    if kind == "tool_result":
        return tool_response_part(part.get("tool_use_id"), part.get("content"), room)
    if kind in _MEDIA:
        return _media(part, _MEDIA[kind])
    return {"type": string_of(kind)[:_MAX_NAME] or "unknown"}


def _media(part: Mapping[str, Any], modality: str) -> Part:
    """Describe an image, sound or document by its address or type, never its bytes."""
    of = part.get("image_url") or part.get("input_audio") or part.get("video_url")
    of = of or part.get("file") or part.get("source") or part
    given = {"url": of} if isinstance(of, str) else of if isinstance(of, dict) else {}
    kind = given.get("media_type") or given.get("mime_type")
    file_id = given.get("file_id")
    url = given.get("url") or given.get("file_url")
    if isinstance(url, str) and url.startswith("data:"):
        kind, url = url[5:].partition(",")[0].partition(";")[0], None
    found: Part = {"modality": modality}
    if isinstance(kind, str) and kind:
        found["mime_type"] = kind[:_MAX_NAME]
    if isinstance(file_id, str):
        return {"type": "file", **found, "file_id": file_id[:_MAX_NAME]}
    if isinstance(url, str):
        return {"type": "uri", **found, "uri": _bare(url)}
    return {"type": "blob", **found}


def _bare(url: str) -> str:
    """Remove from an address the parts that may contain a key: user, query and fragment."""
    try:
        parts = urlsplit(url[:2048])
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return ""
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def plain_text(content: Any) -> str:
    """Return the text of a string or of text parts; other content as JSON."""
    if isinstance(content, list) and all(
        isinstance(each, dict) and isinstance(each.get("text"), str) for each in content
    ):
        return "\n".join(each["text"] for each in content)
    return string_of(content)


def string_of(value: Any) -> str:
    """Return a string unchanged, "" for None, and JSON for other values."""
    if isinstance(value, str):
        return value
    return "" if value is None else msgspec.json.encode(value).decode("utf-8", "replace")
