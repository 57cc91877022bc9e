"""JSON values of the types that client libraries declare for their requests."""

from __future__ import annotations

import datetime
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import typing_extensions
from hypothesis import strategies as st

#: Levels of objects and arrays; deeper ones are empty.
MAX_DEPTH = 5
_TEXTS = st.sampled_from(["", "x", "auto", "Once upon", "a-b", "é😀", "\x00", "{}", "[[parrot:x]]"])
_SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: _TEXTS,
    int: st.sampled_from([0, 1, 2, 16, 1024, -1]),
    float: st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    bool: st.booleans(),
    type(None): st.none(),
    datetime.datetime: st.just("2026-01-01T00:00:00Z"),
}
_ANYTHING = st.sampled_from([None, True, 0, 1.5, "x", [], {}, {"type": "string"}, ["x"]])


@lru_cache(maxsize=4096)
def values(declared: Any, depth: int = MAX_DEPTH) -> st.SearchStrategy[Any]:
    """Values of a type: a `TypedDict`, a literal, a union, a list or mapping, or a plain one."""
    if declared in _SCALARS:
        return _SCALARS[declared]
    if typing_extensions.is_typeddict(declared):
        return _objects(declared, depth)
    origin, arguments = typing.get_origin(declared), typing.get_args(declared)
    if origin is typing.Literal:
        return st.sampled_from(list(arguments))
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(argument, depth) for argument in arguments if _is_json(argument)])
    if origin in (typing.Annotated, typing_extensions.Required, typing_extensions.NotRequired):
        return values(arguments[0], depth)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(_TEXTS, values(arguments[1], depth - 1), max_size=2 * (depth > 0))
    if arguments:
        # Lists, iterables, sequences.
        return st.lists(values(arguments[0], depth - 1), max_size=2 * (depth > 0))
    return _ANYTHING


def _objects(declared: Any, depth: int) -> st.SearchStrategy[dict[str, Any]]:
    fields = fields_of(declared)
    required = {name: values(of, depth - 1) for name, (of, must) in fields.items() if must}
    optional = {name: values(of, depth - 1) for name, (of, must) in fields.items() if not must}
    return st.fixed_dictionaries(required, optional=optional if depth > 0 else None)


def fields_of(declared: Any) -> dict[str, tuple[Any, bool]]:
    """The fields of a `TypedDict`: the type of each, and whether it is required."""
    hints = typing_extensions.get_type_hints(declared, include_extras=True)
    found = {}
    for name, hint in hints.items():
        origin = typing.get_origin(hint)
        must = declared.__total__
        if origin in (typing_extensions.Required, typing_extensions.NotRequired):
            must = origin is typing_extensions.Required
        found[name] = (hint, must)
    return found


def _is_json(declared: Any) -> bool:
    """Tell whether it can be sent as JSON: no file, path or bytes."""
    name = getattr(declared, "__name__", str(declared))
    return name not in ("bytes", "IO", "PathLike", "Omit")
