"""The gateway's own fields of a call: what the body's object `parrot` may say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Constructor fields and keyword arguments of a call, under the names of the body.
NAMES = (
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


def take_fields(kwargs: dict[str, Any], defaults: object) -> dict[str, Any]:
    """Take the fields of one call out of its keyword arguments.

    Args:
        kwargs: of the call; loses what is a field.
        defaults: has each field as an attribute, for what the call does not say.

    Returns:
        those that are set; `defer` only if it is true.
    """
    fields = {name: kwargs.pop(name, getattr(defaults, name)) for name in NAMES}
    if not fields["defer"]:
        del fields["defer"]
    return {name: value for name, value in fields.items() if value is not None}


def merge_linked(fields: dict[str, Any], linked: Mapping[str, str]) -> dict[str, Any]:
    """Add what the spans say of a call; what the user said wins, field by field."""
    merged = {**linked, **fields}
    if "output" in fields and "name" not in fields:
        # The gateway shows the output's name, which somebody chose.
        merged.pop("name", None)
    return merged
