"""Which session a request belongs to when it does not say so by `X-Parrot-Session`.

Clients and agents name their conversations in many ways; the first that is there counts. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

MAX_LENGTH = 256


class Identity(NamedTuple):
    """A session's name, and where it was found."""

    name: str
    source: str


class _Body(msgspec.Struct):
    conversation: Any = None
    prompt_cache_key: Any = None
    metadata: Any = None


def identify(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> Identity | None:
    """To be completed."""
    return None
