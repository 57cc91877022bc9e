"""The session that a request names in another way than `X-Parrot-Session`.

Clients, agents and tracers name their conversations in many ways. `SessionIdentity` reads them in
an order that is a setting (`sessions.identity`); the first source that is there counts. A name
found here is prefixed by its source, so that the same text found in two places, or given by the
user, names different sessions. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from parrot_gateway.calls.requests.call import IdentityFields

#: Longest value that is taken for a name.
MAX_LENGTH = 200

#: The source `agents`: headers of known agents and gateways.
AGENT_HEADERS = (
    b"x-claude-code-session-id",
    b"session-id",
    b"session_id",
    b"thread-id",
    b"x-dynamo-session-id",
    b"x-litellm-trace-id",
    b"x-litellm-session-id",
    b"x-session-token",
    b"x-smg-routing-key",
    # NOTE: this name means other things elsewhere; only Codex means a session by it.
    b"conversation_id",
)
_VENDOR_HEADER = re.compile(rb"x-[a-z0-9-]+-session-id")
_VENDOR_VALUE = re.compile(rb"[A-Za-z0-9_-]{8,}")
_VENDOR_ENDING = b"-session-id"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")


class Identity(NamedTuple):
    """A session's name, and where it was found."""

    name: str
    source: str


class SessionIdentity:
    """Finds the session that a request names by other means than ours.

    Args:
        sources: strongest first, see `SESSION_SOURCES` in the settings; none names no session.
    """

    __slots__ = ("_body", "_headers", "_vendors")

    def __init__(self, sources: Sequence[str]) -> None:
        #: Ranks of header names, smaller is stronger.
        self._headers: dict[bytes, tuple[int, int]] = {}
        self._vendors: tuple[int, int] | None = None
        self._body: list[tuple[tuple[int, int], str]] = []
        for number, source in enumerate(sources):
            if source in _BODY_READERS:
                self._body.append(((number, 0), source))
            elif source == "x-*-session-id":
                self._vendors = (number, 0)
            else:
                plain = source.removeprefix("header:").lower().encode()
                names = AGENT_HEADERS if source == "agents" else (plain,)
                for position, name in enumerate(names):
                    self._headers.setdefault(name, (number, position))

    def __bool__(self) -> bool:
        return bool(self._headers or self._body or self._vendors)

    def reads(self, header: bytes) -> bool:
        """Return whether a header of this lower-case name may name a session."""
        if header in self._headers:
            return True
        return self._vendors is not None and header.endswith(_VENDOR_ENDING)

    def find(self, headers: Iterable[tuple[bytes, bytes]], body: IdentityFields) -> Identity | None:
        """The session that a request names; None when it names none.

        Args:
            headers: names in lower case, as ASGI gives them; the first of a name counts.
            body: its fields that may name one, undecoded.
        """
        found: Identity | None = None
        best: tuple[int, int] | None = None
        ranks, vendors = self._headers, self._vendors
        for name, raw in headers:
            rank = ranks.get(name)
            if rank is None:
                if vendors is None or not name.endswith(_VENDOR_ENDING):
                    continue
                if not (_VENDOR_HEADER.fullmatch(name) and _VENDOR_VALUE.fullmatch(raw.strip())):
                    continue
                rank = vendors
            if best is not None and rank >= best:
                continue
            value = _value_of_header(name, raw)
            if _is_name(value) and (name != b"conversation_id" or _is_codex(headers)):
                source = name.decode("latin-1")
                found, best = Identity(f"{source}:{value}", source), rank
        for rank, field in self._body:
            if best is not None and rank > best:
                break
            source, read = _BODY_READERS[field]
            raw_value = getattr(body, source)
            if raw_value and _is_name(value := read(_decoded(raw_value))):
                return Identity(f"{source}:{value}", source)
        return found


def _is_name(value: str) -> bool:
    return bool(value) and len(value) <= MAX_LENGTH and value.isprintable()


def _is_codex(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == b"user-agent" and b"codex" in raw.lower() for name, raw in headers)


def _value_of_header(name: bytes, raw: bytes) -> str:
    text = raw.decode("utf-8", "replace").strip()
    if name == b"traceparent":
        trace = _TRACEPARENT.fullmatch(text)
        return trace[1] if trace is not None and set(trace[1]) != {"0"} else ""
    return _of_baggage(text) if name == b"baggage" else text


def _of_baggage(baggage: str) -> str:
    """`session.id` of W3C baggage: `key=value;property, key=value`, values percent-encoded."""
    for member in baggage.split(","):
        key, _, value = member.partition(";")[0].partition("=")
        if key.strip() == "session.id":
            return unquote(value.strip())
    return ""


def _decoded(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def _of_conversation(value: Any) -> str:
    return _text(value.get("id") if isinstance(value, dict) else value)


def _of_metadata(value: Any) -> str:
    return _text(value.get("session_id")) if isinstance(value, dict) else ""


#: Of each source in the body: its field, which prefixes the name, and how that is read.
_BODY_READERS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "previous_response_id": ("previous_response_id", _text),
    "conversation": ("conversation", _of_conversation),
    "prompt_cache_key": ("prompt_cache_key", _text),
    "metadata.session_id": ("metadata", _of_metadata),
}
