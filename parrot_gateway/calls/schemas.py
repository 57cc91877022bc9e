"""JSON schemas as people write them: an object that lists its properties has no others, and
strings of known formats end.

JSON Schema lets an object have any properties beside those it lists, unless `additionalProperties`
is false. Few who write a schema mean that, generators (pydantic, TypeScript) leave the field out,
and a model that may go on making up properties often does, until its tokens are used up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from parrot_gateway.calls.schema_formats import bounded

_Schema: TypeAlias = Mapping[str, Any]

#: Keywords by what they hold. Not in `not` and `if`: an object closed there would close less.
_HOLDS_SCHEMA = ("items", "additionalItems", "additionalProperties", "contains", "then", "else")
_HOLDS_LIST = ("prefixItems", "items", "allOf", "anyOf", "oneOf")
_HOLDS_MAP = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
#: Those by which an author says what else an object may have.
_SAYS_MORE = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")


def as_meant(schema: _Schema, *, closes: bool = True) -> dict[str, Any]:
    """The schema with `additionalProperties: false` where objects list their properties and say
    nothing of others, and with formats as `schema_formats.bounded` has them.

    Objects stay open that are put together of parts which each list some (`allOf`, or `properties`
    beside a `$ref`), since closed parts exclude one another, and objects that need more
    properties than they list.

    Args:
        schema: of a value.
        closes: close objects.

    Raises:
        RecursionError: too many levels.
    """
    made = _as_meant(schema, _Parts(schema).combined() if closes else None)
    assert isinstance(made, dict)
    return made


def _as_meant(value: Any, combined: set[int] | None) -> Any:
    """Make one schema; `combined`: those that are not closed, None closes none."""
    if not isinstance(value, Mapping):
        return value
    made = bounded(dict(value))
    for key in _HOLDS_MAP:
        if isinstance(value.get(key), Mapping):
            made[key] = {name: _as_meant(item, combined) for name, item in value[key].items()}
    for key in _HOLDS_LIST:
        if isinstance(value.get(key), list):
            made[key] = [_as_meant(item, combined) for item in value[key]]
    for key in _HOLDS_SCHEMA:
        if isinstance(value.get(key), Mapping):
            made[key] = _as_meant(value[key], combined)
    if combined is not None and id(value) not in combined and _lists_all(value):
        made["additionalProperties"] = False
    return made


def _lists_all(schema: _Schema) -> bool:
    """Return whether an object may be taken to have only the properties it lists."""
    listed = schema.get("properties")
    if not isinstance(listed, Mapping) or any(key in schema for key in _SAYS_MORE):
        return False
    required, least = schema.get("required"), schema.get("minProperties")
    if isinstance(required, list) and any(name not in listed for name in required):
        return False
    return not isinstance(least, int | float) or least <= len(listed)


class _Parts:
    """The schemas whose conditions hold for one and the same value."""

    def __init__(self, root: _Schema) -> None:
        self._root = root
        self._lists: dict[int, bool] = {}

    def combined(self) -> set[int]:
        """Ids of the schemas that are parts of a whole of which several list properties."""
        found: set[int] = set()
        for schema in _subschemas(self._root):
            groups = self._groups(schema)
            listing = isinstance(schema.get("properties"), Mapping)
            if listing + sum(any(map(self._lists_some, group)) for group in groups) > 1:
                self._add(schema, found)
        return found

    def _groups(self, schema: _Schema) -> list[list[_Schema]]:
        """The parts of a schema beside itself; of those in one list one holds, at least."""
        groups = [[part] for part in _list_at(schema, "allOf")]
        groups += [_list_at(schema, key) for key in ("anyOf", "oneOf")]
        if (target := self._target(schema)) is not None:
            groups.append([target])
        return groups

    def _lists_some(self, schema: _Schema) -> bool:
        known = self._lists.get(id(schema))
        if known is None:
            self._lists[id(schema)] = False  # for a schema that refers to itself
            known = isinstance(schema.get("properties"), Mapping) or any(
                self._lists_some(part) for group in self._groups(schema) for part in group
            )
            self._lists[id(schema)] = known
        return known

    def _add(self, schema: _Schema, found: set[int]) -> None:
        if id(schema) not in found:
            found.add(id(schema))
            for group in self._groups(schema):
                for part in group:
                    self._add(part, found)

    def _target(self, schema: _Schema) -> _Schema | None:
        """Look up what `$ref` refers to, within the schema."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: Any = self._root
        for step in reference[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Mapping):
                found = found.get(name)
            else:
                return None
        return found if isinstance(found, Mapping) else None


def _subschemas(schema: _Schema) -> Iterator[_Schema]:
    """A schema and all within it."""
    yield schema
    for key in _HOLDS_MAP:
        if isinstance(schema.get(key), Mapping):
            for item in schema[key].values():
                if isinstance(item, Mapping):
                    yield from _subschemas(item)
    for key in _HOLDS_LIST:
        for item in _list_at(schema, key):
            yield from _subschemas(item)
    for key in _HOLDS_SCHEMA:
        if isinstance(schema.get(key), Mapping):
            yield from _subschemas(schema[key])


def _list_at(schema: _Schema, key: str) -> list[_Schema]:
    value = schema.get(key)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
