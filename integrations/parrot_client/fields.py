"""The gateway's own fields of a call, what its headers answer, and references in texts.

The fields travel as the object `parrot` of the body; docs/semantic-variables.md describes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: What a call may say under `parrot`.
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
#: The longest name, session or id that the gateway takes, in characters.
MAX_CHARACTERS = 256

REFERENCE_START = "[[parrot:"
#: A reference; its last letters are a checksum, which only the gateway can check.
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
    """Fields of several layers, the last one wins; without None and without `defer=False`."""
    merged = {name: value for layer in layers for name, value in layer.items() if value is not None}
    return {name: value for name, value in merged.items() if value or name != "defer"}


def answer_metadata(headers: Mapping[str, str]) -> dict[str, Any]:
    """Read an answer's headers about its call in the gateway; empty for an ordinary call."""
    return {name: read(text) for header, name, read in _HEADERS if (text := headers.get(header))}
