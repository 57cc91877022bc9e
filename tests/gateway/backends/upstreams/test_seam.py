"""The join of two texts: nothing twice, nothing missing, however the second is cut into pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parrot_gateway.backends.upstreams.seam import MIN_ECHO_CHARACTERS, Seam

TEXTS = st.text(alphabet="ab \n\tÄ", max_size=40)


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def joined(seam: Seam, parts: list[str]) -> str:
    return "".join(seam.feed(part) for part in parts) + seam.end()


@given(
    whole=TEXTS, cut=st.integers(0, 40), cuts=st.lists(st.integers(0, 99), max_size=6),
    echoes=st.booleans(),
)  # fmt: skip
@example(whole="a \n b", cut=3, cuts=[], echoes=False)
@example(whole="ab ab ab", cut=3, cuts=[1, 2, 3], echoes=True)
def test_a_server_that_writes_the_rest_of_a_text_completes_it(
    whole: str, cut: int, cuts: list[int], echoes: bool
) -> None:
    sent = whole[:cut]
    asked = sent.rstrip()
    answer = whole if echoes else whole[len(asked) :]
    seam = Seam(asked, sent[len(asked) :], may_echo=echoes, is_known_to_echo=echoes)
    assert sent + joined(seam, pieces(answer, cuts)) == whole


@given(cuts=st.lists(st.integers(0, 99), max_size=6))
def test_a_long_beginning_that_is_repeated_is_cut(cuts: list[int]) -> None:
    sent = "x" * MIN_ECHO_CHARACTERS
    seam = Seam(sent, "", may_echo=True)
    assert joined(seam, pieces(sent + "yz", cuts)) == "yz"


@pytest.mark.parametrize("answer", ["xxxy", "xxxxx", ""])
def test_a_short_repetition_may_be_the_answer_itself(answer: str) -> None:
    assert joined(Seam("xxx", "", may_echo=True), [answer]) == answer


def test_a_server_that_never_repeats_is_taken_at_its_word() -> None:
    sent = "All work and no play makes Jack a dull boy.\n" * 2
    assert joined(Seam(sent, ""), [sent]) == sent


def test_what_only_begins_like_a_repetition_is_passed_on() -> None:
    seam = Seam("abcdef", "", may_echo=True, is_known_to_echo=True)
    assert seam.feed("abc") == ""
    assert seam.feed("xyz") == "abcxyz"
    assert seam.feed("abcdef") == "abcdef"
    held = Seam("abcdef", "", may_echo=True, is_known_to_echo=True)
    assert held.feed("abc") == ""
    assert held.end() == "abc"


def test_blanks_that_the_client_has_are_cut_and_others_kept() -> None:
    assert joined(Seam("a", "\n"), ["\n", "\n", "b"]) == "\nb"
    assert joined(Seam("a", " "), ["b"]) == "b"
    assert joined(Seam("a", " \n"), [" ", "c \n"]) == "c \n"
