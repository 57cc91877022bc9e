"""String formats of JSON schemas as patterns that end, and patterns that the library lacks.

A format of the engine's library may repeat without a bound (the fraction of a second, the local
part of an address), and a model may then write digits until its tokens are used up. Here each such
format has a pattern with bounds. A format without a pattern is ignored, as JSON Schema allows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_YEAR = "(?:[1-9][0-9]{3}|0(?:[1-9][0-9]{2}|0[1-9][0-9]|00[1-9]))"
#: Multiples of four that are no century, and every fourth century.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_CLOCK})"
_NUMBER = "(?:0|[1-9][0-9]{0,3})"
_DAYS = f"(?:{_NUMBER}Y(?:{_NUMBER}M(?:{_NUMBER}D)?)?|{_NUMBER}M(?:{_NUMBER}D)?|{_NUMBER}D)"
_SECONDS = rf"{_NUMBER}(?:\.[0-9]{{1,6}})?S"
_HOURS = f"(?:{_NUMBER}H(?:{_NUMBER}M(?:{_SECONDS})?)?|{_NUMBER}M(?:{_SECONDS})?|{_SECONDS})"
_LABEL = "[A-Za-z0-9]{1,24}(?:-[A-Za-z0-9]{1,16}){0,2}"
_ATOM = "[A-Za-z0-9_+-]{1,20}"


def _uuid(version: str) -> str:
    return (
        f"^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
    )


#: RFC 3339, RFC 5321 with bounds of ours, and pydantic's names of UUIDs by version.
PATTERNS: Mapping[str, str] = {
    "date-time": f"^{_DATE}T{_TIME}$",
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "duration": f"^P(?:{_DAYS}(?:T{_HOURS})?|T{_HOURS}|{_NUMBER}W)$",
    "email": rf"^{_ATOM}(?:\.{_ATOM}){{0,2}}@(?:{_LABEL}\.){{1,3}}[A-Za-z]{{2,12}}$",
    **{f"uuid{version}": _uuid(str(version)) for version in range(1, 9)},
}
#: Formats that the library follows itself, with bounds.
_NATIVE = frozenset({"uuid", "ipv4", "ipv6", "hostname", "uri"})
#: Keywords whose values are data, whatever they look like.
_DATA = ("enum", "const", "default", "examples")

#: The beginning of the pattern that pydantic 2.12 and 2.13 write for a `Decimal`, and its parts.
_DECIMAL = "^(?!^[-+.]*$)[+-]?0*"
_INTEGER_PLACES = re.compile(r"\\d\{0,(\d+)\}(?=\||$)")
_DECIMAL_PLACES = re.compile(r"\\\.\??\\d\{0,(\d+)\}")
#: Digits before and behind the point where the pattern has no bound.
_MAX_PLACES = 12


def bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """One schema, not those in it, with a pattern for its format and without an unknown one."""
    pattern, name = schema.get("pattern"), schema.get("format")
    made = schema
    if isinstance(name, str) and name not in _NATIVE:
        made = {key: value for key, value in made.items() if key != "format"}
        if name in PATTERNS and pattern is None:
            made["pattern"] = PATTERNS[name]
    if isinstance(pattern, str) and pattern.startswith(_DECIMAL):
        made = {**made, "pattern": _decimal(pattern.removeprefix(_DECIMAL))}
    return made


def unknown_formats(value: Any) -> list[str]:
    """Names of the formats that mean nothing here, in the schemas somewhere within a JSON value."""
    return list(dict.fromkeys(_unknown(value)))


def _unknown(value: Any) -> Iterator[str]:
    # NOTE: not recursive. This runs before the depth of a schema is checked.
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, Mapping):
            name = each.get("format")
            if isinstance(name, str) and name not in _NATIVE and name not in PATTERNS:
                yield name
            each = [item for key, item in each.items() if key not in _DATA]
        if isinstance(each, list):
            left += reversed(each)


def _decimal(rest: str) -> str:
    """The numbers that such a pattern allows, in plain notation and without leading zeros."""
    whole, behind = _INTEGER_PLACES.search(rest), _DECIMAL_PLACES.search(rest)
    places = int(whole[1]) if whole else _MAX_PLACES
    decimals = int(behind[1]) if behind else _MAX_PLACES
    if whole and behind is None and "." in rest:
        # The digits on both sides of the point are limited together.
        decimals = places // 2
        places -= decimals
    integer = "0" if places == 0 else f"(?:0|[1-9][0-9]{{0,{places - 1}}})"
    fraction = "" if decimals == 0 else rf"(?:\.[0-9]{{1,{decimals}}})?"
    return f"^[+-]?{integer}{fraction}$"
