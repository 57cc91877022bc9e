"""Incremental decoding equals decoding at once, however the tokens are cut."""

from __future__ import annotations

import pytest
from harness.engine.tokenizer_kinds import KINDS, write_kind
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_engine.text import IncrementalDetokenizer, Tokenizer
from parrot_engine.text.loading import load_text_assets

TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.text("a é日本🦜\u0301\n ▁<0xE>")


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = write_kind(request.param, tmp_path_factory.mktemp(request.param))
    return Tokenizer(load_text_assets(folder))


def cut(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """Random consecutive pieces of a list."""
    chunks, rest = [], ids
    while rest:
        size = data.draw(st.integers(0, len(rest)))
        chunks.append(rest[:size])
        rest = rest[max(size, 1) if size else 0 :]
        if not size:
            chunks.append(rest[:1])
            rest = rest[1:]
    return chunks


def check_pieces(
    tokenizer: Tokenizer, data: st.DataObject, ids: list[int], *, skip: bool = True
) -> None:
    """Check that pieces add up to the text of all tokens, from its beginning on."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    shown = ""
    for chunk in cut(data, ids):
        shown += detokenizer.push(chunk)
        assert whole.startswith(shown)
    assert shown + detokenizer.flush() == whole


@settings(deadline=None, max_examples=150)
@given(data=st.data(), text=TEXT)
def test_any_text_in_any_pieces(tokenizer: Tokenizer, data: st.DataObject, text: str) -> None:
    check_pieces(tokenizer, data, tokenizer.encode(text))


@settings(deadline=None, max_examples=150)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_in_any_pieces(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    """Random ids: invalid UTF-8, special tokens anywhere, ids outside the vocabulary."""
    if tokenizer.pieces.plan.kind == "opaque":
        pytest.skip("only texts are exact")
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3)))
    check_pieces(tokenizer, data, ids, skip=skip)


@settings(deadline=None, max_examples=150)
@given(data=st.data(), text=TEXT)
def test_behind_a_prompt(tokenizer: Tokenizer, data: st.DataObject, text: str) -> None:
    plan = tokenizer.pieces.plan
    if plan.kind == "opaque" or plan.bare_first:
        pytest.skip("no bytes per token in this kind")
    ids = tokenizer.encode(text)
    at = data.draw(st.integers(0, len(ids)))
    visible = [t for t in ids[:at] if not tokenizer.is_special(t)]
    # What the prompt has shown: its complete characters.
    prompt = b"".join(map(tokenizer.token_bytes, visible)).decode(errors="ignore")
    prompt = prompt[1:] if plan.strip_left and prompt.startswith(" ") else prompt
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:at])
    assert prompt + detokenizer.push(ids[at:]) + detokenizer.flush() == tokenizer.decode(ids)


@settings(deadline=None, max_examples=50)
@given(text=TEXT)
def test_one_string_per_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = detokenizer.push_each(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)


def test_a_long_prompt_is_only_looked_at_from_its_ends(tokenizer: Tokenizer) -> None:
    class Counting(list[int]):
        reads = 0

        def __iter__(self):  # type: ignore[no-untyped-def]
            for item in super().__iter__():
                self.reads += 1
                yield item

        def __reversed__(self):  # type: ignore[no-untyped-def]
            for item in super().__reversed__():
                self.reads += 1
                yield item

    prompt = Counting(tokenizer.encode("The quick brown fox " * 500))
    IncrementalDetokenizer(tokenizer, prompt)
    assert prompt.reads < 20


def test_half_an_emoji_waits_then_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🐙", add_special_tokens=False)
    if tokenizer.decode(ids) != "🐙":
        pytest.skip("this kind has no token for it")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(ids[:-1]) == ""
    assert set(detokenizer.flush()) == {"\ufffd"}


def test_prompt_bytes_of_an_invalid_run_are_not_given_out_again(tokenizer: Tokenizer) -> None:
    """A run of bytes is replaced byte by byte; those of the prompt belong to its text."""
    byte = {tokenizer.pieces.get(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    if 0xF0 not in byte:
        pytest.skip("no tokens of single bytes between text tokens in this kind")
    word = tokenizer.encode("a", add_special_tokens=False)
    prompt = [*word, byte[0xF0], byte[0x9F]]
    # The second run lies in the pushed tokens alone: every byte of it counts.
    pushed = [byte[0xA6], *word, byte[0xF0], byte[0x9F], *word]
    whole = tokenizer.decode(prompt + pushed)
    assert whole.count("\ufffd") == 5
    shown = tokenizer.decode(prompt)
    assert shown.endswith("\ufffd\ufffd")
    for chunks in ([pushed], [[token_id] for token_id in pushed]):
        detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        text = "".join(map(detokenizer.push, chunks)) + detokenizer.flush()
        assert shown + text == whole
