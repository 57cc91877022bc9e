"""Ways in which a request names its session, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

#: Headers, fields of the body, and the name of the session that they mean.
Source: TypeAlias = tuple[dict[str, str], dict[str, Any], str]


def all_of(sources: Sequence[Source]) -> tuple[dict[str, str], dict[str, Any]]:
    """Headers and body of a request that names its session in all these ways."""
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}
    for more_headers, more_body, _ in sources:
        headers |= more_headers
        body |= more_body
    return headers, body
