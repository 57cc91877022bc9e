"""The input of a custom tool out of arguments, in pieces of any size."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from parrot_gateway.calls.tools.custom_input import CustomInput


@given(st.text(), st.booleans(), st.lists(st.integers(0, 60)))
def test_any_cut_gives_the_text(text: str, ascii: bool, cuts: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii)
    reader, told, at = CustomInput(), "", 0
    for cut in [*sorted(cuts), len(arguments)]:
        told += reader.push(arguments[at:cut])
        at = max(at, cut)
    assert told + reader.push("", ends=True) == text


def test_halves_of_characters_do_not_stop_it() -> None:
    for arguments, text in (
        ('{"input": "a\\ud83d b"}', "a b"),
        ('{"input": "a\\ud83d\\n"}', "a\n"),
        ('{"input": "a\\ude00b"}', "ab"),
    ):
        reader = CustomInput()
        told = "".join(reader.push(letter) for letter in arguments) + reader.push("", ends=True)
        assert "".join(c for c in told if c != "\ufffd") == text


def test_what_is_cut_off_is_shown_as_far_as_it_goes() -> None:
    reader = CustomInput()
    assert reader.push('{"input": "ab\\') + reader.push("", ends=True) == "ab"
    reader = CustomInput()
    assert reader.push('{"inp') + reader.push("", ends=True) == '{"inp'
