"""Documents of JSON schemas, with values that a test chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def document_of(schema: dict[str, Any], value: Callable[[str, str], Any]) -> Any:
    """A document of a JSON schema; of alternatives the first.

    Args:
        value: gives a number, a text, a boolean or null, by its type (`any` where none is
            named) and the name of the field that it stands in.
    """
    definitions = schema.get("$defs", schema.get("definitions", {}))

    def fill(part: dict[str, Any], name: str = "") -> Any:
        if "$ref" in part:
            return fill(definitions[part["$ref"].rpartition("/")[2]], name)
        if "const" in part:
            return part["const"]
        if "enum" in part:
            return part["enum"][0]
        for kind in ("anyOf", "oneOf", "allOf"):
            if kind in part:
                return fill(part[kind][0], name)
        kind = part.get("type", "object" if "properties" in part else "any")
        kind = kind[0] if isinstance(kind, list) else kind
        if kind == "object":
            return {key: fill(below, key) for key, below in part.get("properties", {}).items()}
        if kind == "array":
            return [fill(part.get("items", {}), name)]
        return value(kind, name)

    return fill(schema)
