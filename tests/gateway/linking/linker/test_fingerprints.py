"""Fingerprints of texts, and the index of who wrote them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot_gateway.linking.linker.call_store import contains
from parrot_gateway.linking.linker.fingerprints import (
    RUN,
    WINDOW,
    FingerprintIndex,
    PassageCounts,
    fingerprint,
    normalise,
)

STORY = (
    "The heron stood in the reeds for an hour before the fox came down to the water.\n"
    "“You are late,” it said — and meant it.\n  - bread\n  - three eggs\n\tand a naïve duck"
)


@pytest.mark.parametrize(
    "changed",
    [
        json.dumps(STORY),
        json.dumps(json.dumps(STORY)),
        json.dumps(STORY, ensure_ascii=False),
        "> " + STORY.replace("\n", "\n> "),
        "```\n" + STORY.replace("\n", "\n        ") + "\n```",
        STORY.upper().replace("Ï", "ï"),
        STORY.replace("  - ", "* ").replace("“", '"').replace("”", '"').replace("—", "--"),
    ],
)
def test_a_text_is_the_same_in_any_format(changed: str) -> None:
    assert normalise(changed).content.tobytes() == normalise(STORY).content.tobytes()


@given(st.text(), st.text(min_size=1), st.text())
def test_spans_lead_back_to_the_original(before: str, word: str, after: str) -> None:
    text = before + word + after
    normalised = normalise(text)
    size = len(normalised.content)
    for start in range(0, size, max(1, size // 5)):
        first, last = normalised.character_span(start, size)
        assert 0 <= first <= last <= len(text)
        part = normalise(text[first:last]).content.tobytes()
        assert "\\" in text or part.endswith(normalised.content[start:].tobytes())


@given(st.text("abcdefgh ", max_size=120), st.text("abcdefgh ", max_size=120), st.data())
def test_texts_that_share_enough_share_a_fingerprint(
    first: str, second: str, data: st.DataObject
) -> None:
    common = data.draw(st.text("ijklmnop", min_size=RUN + WINDOW - 1, max_size=90))
    mine = set(fingerprint(normalise(first + common + second).content)[0].tolist())
    other = set(fingerprint(normalise(second + common + first).content)[0].tolist())
    assert mine & other


def test_long_texts_have_the_fingerprints_of_their_parts() -> None:
    text = " ".join(str(number * 7919) for number in range(20_000))
    content = normalise(text).content
    hashes, positions = fingerprint(content)
    assert (np.diff(positions) > 0).all()
    assert np.diff(positions).max() <= WINDOW
    for start in (0, 16_300, 16_384, 40_000):
        part, places = fingerprint(content[start : start + 500])
        of_text = dict(zip(positions.tolist(), hashes.tolist(), strict=True))
        within = slice(1, -1)
        assert [of_text[start + place] for place in places[within].tolist()] == part[
            within
        ].tolist()


def test_an_index_finds_owners_and_forgets_the_oldest() -> None:
    index = FingerprintIndex(max_entries=4096)
    made = {
        owner: np.unique(
            fingerprint(
                normalise(f"{owner} wrote {owner * 7919} and {owner * owner}. " * 9).content
            )[0]
        )
        for owner in range(1, 5000)
    }
    for owner, hashes in made.items():
        index.add(hashes, owner)
    rows, owners = index.find(made[4999])
    assert set(rows[owners == 4999].tolist()) == set(range(len(made[4999])))
    assert 1 not in index.find(made[1])[1]
    assert index.size_bytes <= 4096 * 8 + 4096


def test_passages_are_counted_once_a_call_and_up_to_a_byte() -> None:
    counts = PassageCounts(bits=12)
    hashes = np.array([1 << 20, 5 << 20, 1 << 20], np.uint32)
    for _ in range(300):
        counts.add(hashes)
    assert counts.of(hashes).tolist() == [255, 255, 255]
    assert counts.of(np.array([9 << 20], np.uint32)).tolist() == [0]


def test_many_passages_that_stood_once_do_not_make_others_common() -> None:
    counts = PassageCounts(bits=12)
    draw = np.random.default_rng(0)
    shared = draw.integers(0, 1 << 32, 40, np.uint32)
    for _ in range(400):
        counts.add(np.concatenate([shared, draw.integers(0, 1 << 32, 60, np.uint32)]))
    others = counts.of(draw.integers(0, 1 << 32, 1000, np.uint32))
    assert np.mean(others >= 2) < 0.1
    assert np.median(counts.of(shared)) >= 8


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=700),
    st.lists(st.integers(0, 2**32 - 1), max_size=700),
)
def test_membership_is_exact(known: list[int], others: list[int]) -> None:
    theirs = np.array(known, np.uint32)
    # Neighbours of known ones share their first bits.
    asked = np.concatenate((theirs, theirs ^ np.uint32(1), np.array(others, np.uint32)))
    assert contains(theirs, asked).tolist() == np.isin(asked, theirs).tolist()
