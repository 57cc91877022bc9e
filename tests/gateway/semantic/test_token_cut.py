"""Cutting texts to a number of tokens."""

from __future__ import annotations

from harness.gateway.scripted_remote import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from parrot_gateway.semantic.transforms.transform import token_cutter

TOKENIZER = byte_tokenizer()


def count(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False))


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40), st.integers(0, 20))
def test_the_longest_beginning_that_fits(text: str, limit: int) -> None:
    cut = token_cutter(TOKENIZER)(text, limit)
    assert text.startswith(cut)
    assert count(cut) <= limit
    # No longer beginning fits, up to where the tokens of the whole text end.
    assert cut == text or count(text[: len(cut) + 1]) > limit or count(text) > limit


def test_words_are_not_cut_within_tokens() -> None:
    assert token_cutter(TOKENIZER)("the quick fox", 2) == "the quick"


class Blank:
    """A tokenizer that puts a blank in front, as some do."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return " " + "".join(map(chr, ids))


def test_tokens_that_do_not_spell_the_text() -> None:
    assert token_cutter(Blank())("abcdef", 4) == "abcd"
