"""The gateway's fields of a call, facts in its answer's headers, and references in texts.

The fields travel as the object `parrot` of the body; docs/semantic-variables.md describes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: Fields that a call may set under `parrot`.
FIELDS = (
    "session",
    "output",
    "inputs",
    "objective",
    "transform",
    "context",
    "priority",
    "dedupe",
    "name",
    "group",
    "defer",
)
#: Fields that a server cannot ignore without giving a wrong answer.
ESSENTIAL_FIELDS = ("output", "inputs", "transform", "context", "defer")
#: Longest name, session or id that the gateway accepts, in characters.
MAX_CHARACTERS = 256

REFERENCE_START = "[[parrot:"
#: A reference; only the gateway can check the checksum in its last letters.
REFERENCE = re.compile(r"\[\[parrot:[a-z0-9]+\]\]")

#: Response header, its name in `answer_metadata`, and its type.
_HEADERS = (
    ("x-parrot-session", "session", str),
    ("x-parrot-call", "call", str),
    ("x-parrot-variable", "variable", str),
    ("x-parrot-engine", "engine", str),
    ("x-parrot-cached-tokens", "cached_tokens", int),
    ("x-parrot-queue-ms", "queue_ms", float),
)


def take_fields(arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the gateway's fields out of the arguments of a call."""
    return {name: arguments.pop(name) for name in FIELDS if name in arguments}


def merge_fields(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge fields of several layers, the last one wins; drops None and `defer=False`."""
    merged = {name: value for layer in layers for name, value in layer.items() if value is not None}
    return {name: value for name, value in merged.items() if value or name != "defer"}


def answer_metadata(headers: Mapping[str, str]) -> dict[str, Any]:
    """Read the gateway's facts about a call from an answer's headers; empty for an ordinary
    call.
    """
    return {name: read(text) for header, name, read in _HEADERS if (text := headers.get(header))}
