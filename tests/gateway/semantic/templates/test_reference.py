"""References: minted, found, checked, replaced; and everything else left alone."""

from __future__ import annotations

import base64
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot_gateway.semantic.templates.reference import (
    find_escaped_references,
    find_references,
    has_reference,
    is_variable_id,
    mint_variable_id,
    reference_of,
)
from parrot_gateway.semantic.templates.text_template import TextTemplate

ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
IDS = st.text(ALPHABET, min_size=26, max_size=26).map(lambda text: "v" + text)
#: Text made of what references are made of, so that near misses are common.
NEAR_MISSES = st.text(
    st.one_of(st.sampled_from('[]{}\\"v:parot23'), st.characters(codec="utf-8")), max_size=30
)
FRAGMENTS = st.one_of(
    NEAR_MISSES,
    st.sampled_from(["[[parrot:", "[[", "]]", "parrot:", "[[parrot:v]]", "\\u005b\\u005bparrot:"]),
)


def oracle_checksum(variable_id: str) -> str:
    digest = hashlib.blake2b(variable_id.encode(), digest_size=5, person=b"parrot ref").digest()
    return base64.b32encode(digest).decode().lower()[:4]


def test_minted_ids_are_fresh_and_fit_into_urls() -> None:
    ids = {mint_variable_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(id_.isalnum() and id_.isascii() and len(id_) == 27 for id_ in ids)
    assert all(is_variable_id(id_) for id_ in ids)
    # Every character but the last is uniform: 25 x 5 + 3 = 128 bits.
    assert {character for id_ in ids for character in id_[1:26]} == set(ALPHABET)


@given(IDS)
def test_a_reference_is_found_again(variable_id: str) -> None:
    reference = reference_of(variable_id)
    assert reference == f"[[parrot:{variable_id}{oracle_checksum(variable_id)}]]"
    assert find_references(reference) == [(0, len(reference), variable_id)]


@pytest.mark.parametrize("bad", ["", "v", "v" + "A" * 26, "v" + "1" * 26, "x" + "a" * 26, "v" * 28])
def test_only_ids_become_references(bad: str) -> None:
    with pytest.raises(ValueError, match="not a variable id"):
        reference_of(bad)


@given(IDS, st.integers(0, 41), st.characters(codec="utf-8"))
def test_one_changed_character_makes_it_ordinary(
    variable_id: str, position: int, character: str
) -> None:
    reference = reference_of(variable_id)
    position %= len(reference)
    changed = reference[:position] + character + reference[position + 1 :]
    # 20 bits of checksum: a change inside the id passes once in a million, and is then another id.
    if changed != reference and oracle_checksum(changed[9:36]) != changed[36:40]:
        assert find_references(changed) == []
        assert TextTemplate.of(changed, verbatim=True).render({variable_id: "!"}) == changed


@given(st.lists(st.one_of(FRAGMENTS, IDS.map(lambda id_: (id_,))), max_size=12))
def test_exactly_the_references_written_are_found(parts: list[str | tuple[str]]) -> None:
    text, expected = "", []
    for part in parts:
        if isinstance(part, str):
            text += part
        else:
            reference = reference_of(part[0])
            expected.append((len(text), len(text) + len(reference), part[0]))
            text += reference
    assert find_references(text) == expected
    assert has_reference(text) >= bool(expected)
    assert has_reference(text.encode("utf-8")) == has_reference(text)


@given(
    st.lists(st.one_of(FRAGMENTS, IDS.map(lambda id_: (id_,))), max_size=8), st.text(max_size=10)
)
def test_replacing_joins_the_values_and_does_not_look_at_them(
    parts: list[str | tuple[str]], value: str
) -> None:
    ids = [part[0] for part in parts if isinstance(part, tuple)]
    # Each value holds a reference to the next variable: it must stay.
    values = {
        id_: value + reference_of(ids[(n + 1) % len(ids)]) + "[[" for n, id_ in enumerate(ids)
    }
    text = "".join(reference_of(part[0]) if isinstance(part, tuple) else part for part in parts)
    expected = "".join(values[part[0]] if isinstance(part, tuple) else part for part in parts)
    assert TextTemplate.of(text, verbatim=True).render(values) == expected


@pytest.mark.parametrize(
    "body",
    [b'"[[parrot:x"', rb'"\u005b\u005bparrot:x"', rb'"\u005B\u005Bparrot:x"', rb'"\\u005bparrot:"'],
)
def test_bodies_that_may_hold_a_reference(body: bytes) -> None:
    assert has_reference(body)
    assert has_reference(body.decode())


@pytest.mark.parametrize("body", [b"", b'"parrot:"', b'"[[macaw:x]]"', b"\xff[[", b'"[ [parrot"'])
def test_other_bodies(body: bytes) -> None:
    assert not has_reference(body)


@given(IDS, st.sampled_from(["[", "\\u005b", "\\u005B"]), st.sampled_from(["]", "\\u005d"]))
def test_escaped_brackets_in_a_json_string(variable_id: str, opening: str, closing: str) -> None:
    bare = reference_of(variable_id)[2:-2]
    literal = f"é\\n{opening}[{bare}]{closing}x"
    assert bare in json.loads(f'"{literal}"')
    found = find_escaped_references(literal, 0, len(literal))
    assert [(literal[f.start : f.end], f.variable_id) for f in found] == [
        (f"{opening}[{bare}]{closing}", variable_id)
    ]


def test_an_escaped_backslash_is_no_escaped_bracket() -> None:
    bare = reference_of(mint_variable_id())[2:-2]
    literal = rf"\\u005b\u005b{bare}]]"
    assert find_references(json.loads(f'"{literal}"')) == []
    assert find_escaped_references(literal, 0, len(literal)) == []


def test_found_positions_are_those_of_the_text_however_wide_its_characters() -> None:
    variable_id = mint_variable_id()
    reference = reference_of(variable_id)
    for before in ("é", "語", "😀", "\ud800", "\x00"):
        assert find_references(before + reference)[0].start == 1
