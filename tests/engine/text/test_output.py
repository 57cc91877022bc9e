"""The text of a generation: the same however its tokens come, cut before the first stop string."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.engine.tokenizer_kinds import write_kind
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_engine.text import OutputText, Tokenizer
from parrot_engine.text.loading import load_text_assets

TEXT = st.text("ab é🦜\n", max_size=20)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_kind("byte_level", tmp_path_factory.mktemp("byte_level"))
    return Tokenizer(load_text_assets(folder))


def cut_before(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the match that begins first; of several there, the shortest."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, matched = min(found)
    return text[:start], matched


@settings(deadline=None, max_examples=100)
@given(
    data=st.data(),
    text=TEXT,
    stops=st.lists(st.text("ab é🦜\n", min_size=1, max_size=3), max_size=3),
    ended=st.booleans(),
    wants_offsets=st.booleans(),
)
def test_any_text_in_any_pieces(
    tokenizer: Tokenizer,
    data: st.DataObject,
    text: str,
    stops: list[str],
    ended: bool,
    wants_offsets: bool,
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    # The id that ends a text may be any; it is never shown.
    end = tokenizer.encode("a", add_special_tokens=False)[:1] if ended else []
    expected, matched = cut_before(text, stops)
    output = OutputText(tokenizer, [], stops)
    offsets: list[int] | None = [] if wants_offsets else None
    shown, kept, rest = "", 0, [*ids, *end]
    while not output.finished:
        size = data.draw(st.integers(min(1, len(rest)), len(rest)))
        chunk, rest = rest[:size], rest[size:]
        reason = None if rest else ("stop" if ended else "length")
        delta = output.push(chunk, reason, offsets=offsets)
        shown += delta.text
        kept += delta.num_tokens
        assert expected.startswith(shown)
        assert output.num_shown == len(shown)
        assert (delta.finish_reason is not None) == output.finished
        if not rest and reason is not None:
            assert output.finished
    assert (shown, delta.stop_string) == (expected, matched)
    assert delta.finish_reason == ("stop" if matched is not None or ended else "length")
    if delta.stopped_by_token:
        # Up to the token that completed the stop string, and no further.
        assert matched is not None
        assert matched in tokenizer.decode(ids[:kept])
        assert matched not in tokenizer.decode(ids[: kept - 1])
    else:
        assert kept == len(ids) + len(end)
    if offsets is not None:
        assert len(offsets) == kept
        assert offsets == sorted(offsets)
        # A character of several tokens stands at the one that completes it.
        assert all(
            offset == len(tokenizer.decode(ids[:index]).rstrip("\ufffd"))
            for index, offset in enumerate(offsets[: len(ids)])
        )


def test_a_stop_string_in_text_held_to_the_end(tokenizer: Tokenizer) -> None:
    """The longer one could still have come, so no token completed the shorter one."""
    output = OutputText(tokenizer, [], ["abb", "b"])
    assert output.push(tokenizer.encode("ab", add_special_tokens=False)).text == ""
    delta = output.push([], "length")
    assert delta == ("a", 0, "stop", "b", False)
