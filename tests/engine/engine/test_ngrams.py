"""Drafts from a text that repeats, and their absence elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_engine.engine.ngrams import MAX_PLACES, NgramIndex, NgramProposer

texts = st.lists(st.integers(0, 3), max_size=80) | st.lists(st.integers(0, 1), max_size=60)


def naive_draft(tokens: Sequence[int], least: int, most: int, count: int) -> list[int]:
    """Return what `NgramIndex.propose` says, found by looking everywhere."""
    tail = tokens[len(tokens) - least :]
    places = [
        end
        for end in range(len(tokens) - 1, least - 1, -1)
        if list(tokens[end - least : end]) == list(tail)
    ][:MAX_PLACES]

    def agreement(end: int) -> int:
        length = 0
        while length < min(most, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    if not places:
        return []
    best = max(places, key=agreement)
    text = list(tokens)
    for place in range(best, best + count):
        text.append(text[place])
    return text[len(tokens) :]


@given(
    text=texts,
    least=st.integers(1, 4),
    more=st.integers(0, 4),
    count=st.integers(1, 7),
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
@settings(max_examples=400, deadline=None)
def test_drafts_are_those_of_a_search_over_the_text(
    text: list[int], least: int, more: int, count: int, pieces: list[int]
) -> None:
    index = NgramIndex(least, least + more)
    grown: list[int] = []
    while len(grown) < len(text):
        piece = pieces[len(grown) % len(pieces)]
        grown += text[len(grown) : len(grown) + piece]
        assert index.extend(grown, 1000) > 0
        assert index.propose(grown, count) == naive_draft(grown, least, least + more, count)


def test_a_long_text_is_forgotten_from_its_beginning() -> None:
    index = NgramIndex(2, 4, max_indexed=100)
    text = [1000, 1001, 1002, *range(200), 1000, 1001]
    grown: list[int] = []
    for token in text:
        grown.append(token)
        index.extend(grown, 50)
        assert index.num_tokens == len(grown)
        assert len(index._earlier) <= 100
    assert index.propose(grown, 3) == []
    grown += [180, 181]
    index.extend(grown, 50)
    assert index.propose(grown, 3) == [182, 183, 184]


def test_the_index_takes_a_long_prompt_in_pieces() -> None:
    text = [5, 6, 7, 8, *range(100, 130), 5, 6, 7]
    index = NgramIndex(3, 8)
    taken = [index.extend(text, 10) for _ in range(5)]
    assert taken == [10, 10, 10, 7, 0]
    assert index.propose(text, 2) == [8, 100]


def test_generations_whose_drafts_are_wrong_pause_longer_and_longer() -> None:
    proposer = NgramProposer(3, 8)
    generated, tries, pauses = 0, 0, []
    while generated < 2000:
        if generated < proposer.resumes_at:
            pauses.append(proposer.resumes_at - generated)
            generated = proposer.resumes_at
        generated += 1
        tries += 1
        proposer.note(0, 4, generated)
    assert pauses[:4] == [16, 32, 64, 128]
    assert max(pauses) == 512
    assert tries < 20
    generated = max(generated, proposer.resumes_at)
    proposer.note(4, 4, generated)
    while proposer.resumes_at <= generated:
        generated += 1
        proposer.note(0, 4, generated)
    assert proposer.resumes_at - generated == 16, "what was right is not remembered"


def test_the_likelihood_of_drafts_is_learned_from_those_that_were_checked() -> None:
    proposer = NgramProposer(3, 8)
    assert proposer.worth(0.3) == 2
    for generated in range(5, 105, 5):
        proposer.note(4, 4, generated)
    assert proposer.likelihood > 0.95
    assert proposer.worth(0.3) > 7
    assert proposer.expected(4) > 3.5
    for generated in range(105, 145, 2):
        # Those behind the first wrong one say nothing.
        proposer.note(1, 4, generated)
    assert proposer.likelihood == pytest.approx(0.5, abs=0.05)
    assert proposer.expected(7) == pytest.approx(1.0, abs=0.1)
    assert proposer.worth(1.0) == 1
