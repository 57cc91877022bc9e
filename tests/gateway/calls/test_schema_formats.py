"""Formats of strings as patterns that end: all that they allow is valid, and real values pass."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from parrot_gateway.calls.schema_formats import PATTERNS, bounded, unknown_formats
from parrot_gateway.calls.schemas import as_meant

TYPES: dict[str, Any] = {
    "date-time": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
    "duration": datetime.timedelta,
    "uuid4": UUID,
}
#: As pydantic 2.12 and 2.13 write them: for `Decimal` alone, and with its limits.
DECIMALS = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": (12, 12),
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$": (12, 2),
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,8}|(?=[\d.]{1,11}0*$)\d{0,8}\.\d{0,2}0*$)": (8, 2),
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,0}|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,2}0*$)": (1, 2),
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,10}|(?=[\d.]{1,11}0*$)\d*\.\d*0*$)": (5, 5),
}
EMAIL = re.compile(r"(?!\.)[\w.+-]{1,64}(?<!\.)@(?:(?!-)[A-Za-z0-9-]{1,63}(?<!-)\.)+[A-Za-z]{2,63}")


def texts_of(pattern: str) -> st.SearchStrategy[str]:
    return st.from_regex(pattern.removeprefix("^").removesuffix("$"), fullmatch=True)


@pytest.mark.parametrize("name", TYPES)
def test_what_a_pattern_allows_is_valid(name: str) -> None:
    adapter = TypeAdapter(TYPES[name])

    @given(texts_of(PATTERNS[name]))
    def check(text: str) -> None:
        adapter.validate_json(f'"{text}"')

    check()


@given(texts_of(PATTERNS["email"]))
def test_an_address_has_a_local_part_and_a_host(text: str) -> None:
    assert EMAIL.fullmatch(text)
    assert len(text) < 255


REAL: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], str]]] = {
    "date-time": (
        st.datetimes(timezones=st.just(datetime.UTC)),
        lambda value: str(value.isoformat()).replace("+00:00", "Z"),
    ),
    "date": (st.dates(), str),
    "time": (st.times(timezones=st.just(datetime.UTC)), lambda value: str(value.isoformat())),
    "uuid4": (st.uuids(version=4), str),
}


@pytest.mark.parametrize("name", REAL)
def test_real_values_pass(name: str) -> None:
    values, write = REAL[name]

    @given(values)
    def check(value: Any) -> None:
        assert re.fullmatch(PATTERNS[name], write(value)), write(value)

    check()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("date-time", "2023-02-29T10:00:00Z"),
        ("date-time", "2024-01-01T24:00:00Z"),
        ("date-time", "2024-01-01T10:00:00." + "1" * 7 + "Z"),
        ("date-time", "2024-01-01 10:00:00Z"),
        ("date", "0000-01-01"),
        ("date", "1900-02-29"),
        ("time", "10:00:60Z"),
        ("duration", "P"),
        ("duration", "P1DT"),
        ("duration", "PT12345S"),
        ("email", ".a@b.de"),
        ("email", "a@b"),
        ("uuid4", "00000000-0000-1000-8000-000000000000"),
    ],
)
def test_others_do_not(name: str, text: str) -> None:
    assert not re.fullmatch(PATTERNS[name], text)


@pytest.mark.parametrize("text", ["P3D", "P1Y2M3DT4H5M6S", "PT0.5S", "P2W", "PT1M", "P1YT2H"])
def test_durations(text: str) -> None:
    assert re.fullmatch(PATTERNS["duration"], text)


@pytest.mark.parametrize("pattern", DECIMALS)
def test_the_look_ahead_of_decimals(pattern: str) -> None:
    made = bounded({"type": "string", "pattern": pattern})["pattern"]
    places, decimals = DECIMALS[pattern]
    assert re.fullmatch(made, "9" * places + "." + "9" * decimals) or places == 1
    for text in ("", ".", "+", "1.", "9" * (places + 1), "0." + "9" * (decimals + 1)):
        assert not re.fullmatch(made, text), text

    @given(texts_of(made))
    def check(text: str) -> None:
        assert Decimal(text).is_finite()
        # The pattern as it was allows it too.
        assert re.match(pattern, text)

    check()


def test_formats_within_a_schema() -> None:
    schema = {
        "properties": {
            "when": {"type": "string", "format": "date"},
            "where": {"anyOf": [{"type": "string", "format": "path"}, {"type": "null"}]},
            "id": {"type": "string", "format": "ipv4"},
            "plate": {"type": "string", "format": "email", "pattern": "^a@b$"},
            "format": {"const": {"format": "data"}},
            "size": {"type": "integer", "format": "int32"},
        },
        "$defs": {"secret": {"type": "string", "format": "password", "writeOnly": True}},
    }
    made = as_meant(schema, closes=False)
    assert made["properties"] == {
        "when": {"type": "string", "pattern": PATTERNS["date"]},
        "where": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "id": {"type": "string", "format": "ipv4"},
        "plate": {"type": "string", "pattern": "^a@b$"},
        "format": {"const": {"format": "data"}},
        "size": {"type": "integer"},
    }
    assert made["$defs"] == {"secret": {"type": "string", "writeOnly": True}}
    assert "additionalProperties" not in made
    assert unknown_formats([schema, schema]) == ["path", "int32", "password"]
