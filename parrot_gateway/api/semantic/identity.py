"""Which session a request belongs to when it does not say so by `X-Parrot-Session`.

Clients and agents name their conversations in many ways; the first source that is there counts:

1. the body's `conversation`;
2. `x-session-id`, `x-session-affinity`, `x-aibrix-session-key`;
3. the headers of known agents and gateways, then any `x-<vendor>-session-id` that looks like one;
4. `session.id` in W3C `baggage`, then the trace of `traceparent`;
5. the body's `prompt_cache_key`;
6. `session_id` in the body's `metadata`.

Pure. A name found here is prefixed by its source, so that the same text found in two places, or
given by the user, names different sessions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

#: Longest value that is taken for a name.
MAX_LENGTH = 200

_SESSION_HEADERS = ("x-session-id", "x-session-affinity", "x-aibrix-session-key")
_AGENT_HEADERS = (
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "thread-id",
    "x-dynamo-session-id",
    "x-litellm-trace-id",
    "x-litellm-session-id",
    "x-session-token",
    "x-smg-routing-key",
)
_VENDOR_HEADER = re.compile(r"x-[a-z0-9-]+-session-id")
_VENDOR_VALUE = re.compile(r"[A-Za-z0-9_-]{8,}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class Identity(NamedTuple):
    """A session's name, and where it was found."""

    name: str
    source: str


def identify(
    headers: Iterable[tuple[bytes, bytes]], body: Mapping[str, msgspec.Raw]
) -> Identity | None:
    """The session that a request names by other means than ours; None when it names none.

    Args:
        headers: names in lower case, as ASGI gives them; the first of a name counts.
        body: its fields, undecoded.
    """
    texts: dict[str, str] = {}
    for name, raw in headers:
        texts.setdefault(name.decode("latin-1"), raw.decode("utf-8", "replace").strip())
    for source, value in _candidates(texts, body):
        if value and len(value) <= MAX_LENGTH and value.isprintable():
            return Identity(f"{source}:{value}", source)
    return None


def _value(body: Mapping[str, msgspec.Raw], name: str) -> Any:
    try:
        return msgspec.json.decode(body.get(name, b"null"))
    except (msgspec.DecodeError, RecursionError):
        return None


def _candidates(
    headers: Mapping[str, str], body: Mapping[str, msgspec.Raw]
) -> Iterable[tuple[str, str]]:
    conversation = _value(body, "conversation")
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    yield "conversation", _text(conversation)
    for name in (*_SESSION_HEADERS, *_AGENT_HEADERS):
        yield name, headers.get(name, "")
    # NOTE: this name means other things elsewhere; only Codex means a session by it.
    if "codex" in headers.get("user-agent", "").lower():
        yield "conversation_id", headers.get("conversation_id", "")
    for name, value in headers.items():
        if _VENDOR_HEADER.fullmatch(name) and _VENDOR_VALUE.fullmatch(value):
            yield name, value
    yield "baggage", _of_baggage(headers.get("baggage", ""))
    trace = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    yield "traceparent", trace[1] if trace is not None and set(trace[1]) != {"0"} else ""
    yield "prompt_cache_key", _text(_value(body, "prompt_cache_key"))
    metadata = _value(body, "metadata")
    yield "metadata", _text(metadata.get("session_id")) if isinstance(metadata, dict) else ""


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def _of_baggage(baggage: str) -> str:
    """`session.id` of W3C baggage: `key=value;property, key=value`, values percent-encoded."""
    for member in baggage.split(","):
        key, _, value = member.partition(";")[0].partition("=")
        if key.strip() == "session.id":
            return unquote(value.strip())
    return ""
