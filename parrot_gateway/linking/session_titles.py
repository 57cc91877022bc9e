"""Titles of sessions without a name of their own: by the shape of their calls, never by text.

A title helps to find a session in a list. It changes as calls come; the id does not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

#: Tools that a title names.
_MAX_TOOLS = 2
#: Digits of an id that a title ends with.
_DIGITS = 6

_SINGLE = {
    "/v1/chat/completions": "Chat call",
    "/v1/completions": "Completion",
    "/v1/responses": "Response",
    "/v1/messages": "Message",
    "/v1/embeddings": "Embeddings",
}
#: Names that are made of where they were found and what stood there; see `SESSION_SOURCES`.
_SOURCED = re.compile(
    r"(?P<source>previous_response_id|conversation|prompt_cache_key|metadata|agents|baggage"
    r"|traceparent|x-[a-z0-9-]*(?:session|affinity)[a-z0-9-]*):(?P<value>.+)"
)
_WORDS = {
    "previous_response_id": "Responses",
    "conversation": "Conversation",
    "traceparent": "Trace",
}
#: Values for machines, with the prefixes of OpenAI's ids.
_OPAQUE = re.compile(r"(?:[a-z]+_)?(?P<digits>[0-9a-f][0-9a-f-]{14,})")


def declared_title(name: str) -> str:
    """The title of a session that a client has named.

    Args:
        name: as it was given, or `source:value` for one that was found in a request.
    """
    found = _SOURCED.fullmatch(name)
    if found is None:
        return name
    source, value = found.group("source", "value")
    opaque = _OPAQUE.fullmatch(value)
    if opaque is None:
        return value
    return f"{_WORDS.get(source, 'Session')} · {opaque['digits'][:_DIGITS]}"


def inferred_title(
    session_id: str,
    paths: Sequence[str],
    depths: Mapping[int, int],
    link_kinds: Collection[str],
    tools: Sequence[str],
) -> str:
    """The title of a session that was inferred: the shape of its graph, and digits of its id.

    Args:
        session_id: `sess_` and digits.
        paths: of the calls, such as `/v1/chat/completions`.
        depths: how many calls end a longest path of that many calls.
        link_kinds: of all links between the calls; looked at where the calls are a chain.
        tools: names of those that answers call, each once.
    """
    shape = _shape(paths, Counter(depths), link_kinds, tools)
    return f"{shape} · {session_id.removeprefix('sess_')[:_DIGITS]}"


def _shape(
    paths: Sequence[str], depths: Counter[int], link_kinds: Collection[str], tools: Sequence[str]
) -> str:
    calls, depth = len(paths), max(depths)
    if tools:
        more = f" + {len(tools) - _MAX_TOOLS}" if len(tools) > _MAX_TOOLS else ""
        return f"Agent with {', '.join(tools[:_MAX_TOOLS])}{more}"
    if calls == 1:
        return _SINGLE.get(paths[0], "Call")
    if depth == 1:
        return f"{calls} calls side by side"
    if depth == calls:
        is_chat = set(link_kinds) == {"continues"}
        return f"Chat of {calls} turns" if is_chat else f"Chain of {calls} calls"
    if depth == 2 and depths[2] == 1:
        return f"Map-reduce of {depths[1]}"
    if depth == 2 and depths[1] == 1:
        return f"Fan-out to {depths[2]}"
    return f"Graph of {calls} calls, {depth} deep"
