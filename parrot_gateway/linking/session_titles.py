"""Titles of unnamed sessions, from the shape of their calls and never from text.

A title helps to find a session in a list. It changes as calls come; the id does not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

#: Maximum tools in a title.
_MAX_TOOLS = 2
#: Digits of the id at the end of a title.
_DIGITS = 6

_SINGLE = {
    "/v1/chat/completions": "Chat call",
    "/v1/completions": "Completion",
    "/v1/responses": "Response",
    "/v1/messages": "Message",
    "/v1/embeddings": "Embeddings",
}
#: Names that consist of a source and a value; see `SESSION_SOURCES`.
_SOURCED = re.compile(
    r"(?P<source>previous_response_id|conversation|prompt_cache_key|metadata|agents|baggage"
    r"|traceparent|x-[a-z0-9-]*(?:session|affinity)[a-z0-9-]*):(?P<value>.+)"
)
_WORDS = {
    "previous_response_id": "Responses",
    "conversation": "Conversation",
    "traceparent": "Trace",
}
#: Machine-made values, with the prefixes of OpenAI's ids.
_OPAQUE = re.compile(r"(?:[a-z]+_)?(?P<digits>[0-9a-f][0-9a-f-]{14,})")


def declared_title(name: str) -> str:
    """Return the title of a session that a client named.

    Args:
        name: the given name, or `source:value` if it was found in a request.
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
    """Return the title of an inferred session: the shape of its graph, and digits of its id.

    Args:
        session_id: `sess_` and digits.
        paths: of the calls, such as `/v1/chat/completions`.
        depths: number of calls by the length of the longest path that ends with them.
        link_kinds: kinds of all links between the calls; used only for chains.
        tools: distinct names of the tools that answers call.
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
