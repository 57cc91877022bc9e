"""Parts of texts are the same whether few signs are looked at one by one or many together."""

from __future__ import annotations

import random

import pytest

from parrot_gateway.linking.linker.fingerprints import normalise

_PIECES = (
    *"\"' \n:,-*.)([{}]=<>/;|`\\\t",
    *("\\n", "\\u00e9", "1. ", "\n- ", ': "', '", "', ", '", "='", "</tag>", "é", "•", "“", "12"),
    *("word", "some longer words that make a part", "another text of several words"),
)
#: Lines too short to be parts, with more signs than are looked at one by one.
_SHORT_LINES = "\n" + "a\n" * 200


@pytest.mark.parametrize("is_answer", [False, True])
def test_few_signs_and_many_signs_tell_the_same_parts(is_answer: bool) -> None:
    draw = random.Random(3)
    num = 0
    for _ in range(400):
        text = "".join(draw.choices(_PIECES, k=draw.choice((3, 10, 30)))) + "x"
        hashes, starts = normalise(text).parts(is_answer=is_answer)
        more, places = normalise(text + _SHORT_LINES).parts(is_answer=is_answer)
        assert (hashes.tolist(), starts.tolist()) == (more.tolist(), places.tolist()), text
        num += len(hashes)
    assert num > 200


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("the whole text is one part", ["the whole text is one part"]),
        ('{"key": "the value of a key", "n": 3}', ["the value of a key"]),
        ("<step>what stands between two tags</step>", ["what stands between two tags"]),
        ("Answer: what stands behind a label", ["what stands behind a label"]),
        ('["first of two strings", "and then the second"]', ["first of two strings"]),
    ],
)
def test_parts_that_stand_by_themselves(text: str, parts: list[str]) -> None:
    found = set(normalise(text).parts(is_answer=True)[0].tolist())
    for part in parts:
        assert found >= set(normalise(part).parts(is_answer=True)[0].tolist())
