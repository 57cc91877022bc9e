"""Stop strings over a stream, against a search on the whole text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from parrot_engine.text import StopStrings

SMALL = st.text("abc", max_size=12)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The match that begins first; of several there, the shortest."""
    found = [(text.find(s), len(s), s) for s in stops if s and s in text]
    if not found:
        return text, None
    start, _, matched = min(found)
    return text[:start], matched


@given(pieces=st.lists(SMALL, max_size=8), stops=st.lists(st.text("abc", max_size=5), max_size=4))
@example(pieces=["ab", "c"], stops=["abcc", "bc"])
@example(pieces=["ab", "cc"], stops=["abcc", "bc"])
@example(pieces=["abc", "c"], stops=["abcc", "bc"])
@example(pieces=["abc", "a"], stops=["abcc", "bc"])
@example(pieces=["aab"], stops=["ab", "aab"])
@example(pieces=["abc"], stops=["abc", "ab"])
def test_equals_a_search_on_the_whole(pieces: list[str], stops: list[str]) -> None:
    expected, matched = naive("".join(pieces), stops)
    stream = StopStrings(stops)
    shown, seen = "", None
    for piece in pieces:
        result = stream.push(piece)
        shown += result.text
        seen = seen or result.matched
        # Nothing of what will be cut off is ever shown.
        assert expected.startswith(shown)
    rest = stream.flush()
    assert (shown + rest.text, seen or rest.matched) == (expected, matched)
    if matched is not None:
        assert stream.push("".join(stops)) == ("", None)


@given(pieces=st.lists(SMALL, max_size=8), stop=st.text("abc", min_size=1, max_size=5))
def test_holds_back_no_more_than_needed(pieces: list[str], stop: str) -> None:
    stream = StopStrings([stop])
    text = shown = ""
    for piece in pieces:
        text += piece
        result = stream.push(piece)
        shown += result.text
        if result.matched:
            return
        held = text[len(shown) :]
        assert len(held) < len(stop)
        assert stop.startswith(held)


def test_without_stop_strings_text_passes() -> None:
    stream = StopStrings()
    text = "x" * 10
    assert stream.push(text) == (text, None)
    assert stream.flush() == ("", None)


def test_after_a_match_everything_is_swallowed() -> None:
    stream = StopStrings(["\n"])
    assert stream.push("one\ntwo") == ("one", "\n")
    assert stream.push("three") == ("", None)
    assert stream.flush() == ("", None)
