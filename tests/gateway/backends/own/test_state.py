"""The text of a candidate: any cut into steps gives the same, and nothing of a stop string."""

from __future__ import annotations

import pytest
from harness.gateway.scripted_remote import byte_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from parrot_engine.protocol import Filled, Generated, SamplingParams, TokenLogprobs
from parrot_engine.text import OutputText

from parrot_gateway.backends.own.state import ChoiceText, GenerationState
from parrot_gateway.calls.generation_request import (
    ChoiceDelta,
    GenerationRequest,
    TextToken,
    TokenizedPrompt,
    choice_seed,
)

TOKENIZER = byte_tokenizer()
END = TOKENIZER.token_id("<|im_end|>") or 0

TEXTS = st.text(alphabet="abST OP€😀é\n", max_size=40)
STOPS = st.lists(st.text(alphabet="abST OP€😀", min_size=1, max_size=4), max_size=3)


def run(
    ids: list[int], cuts: list[int], stops: list[str], *, logprobs: bool, end: bool
) -> tuple[str, list[TextToken], str | None, int]:
    """Push `ids` in steps of the given sizes; text, tokens, reason and number of counted ids."""
    choice = ChoiceText(OutputText(TOKENIZER, [], stops))
    pieces: list[str] = []
    tokens: list[TextToken] = []
    counted, position, reason = 0, 0, None
    sizes = iter(cuts)
    while reason is None:
        size = min(next(sizes, 1), len(ids) - position)
        step = ids[position : position + size]
        position += size
        last = position == len(ids)
        entries = [TokenLogprobs(token_id, -1.0) for token_id in step] if logprobs else None
        delta = choice.push(step, entries, ("stop" if end else "length") if last else None)
        pieces.append(delta.text)
        tokens += delta.tokens
        counted += delta.num_tokens
        reason = delta.finish_reason
    assert choice.finished
    return "".join(pieces), tokens, reason, counted


def expected(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first."""
    ends = [text.find(stop) for stop in stops if stop in text]
    return text if not ends else text[: min(ends)]


@given(TEXTS, STOPS, st.lists(st.integers(1, 5), max_size=12), st.booleans(), st.booleans())
@example("STO", ["STOP", "TO"], [1], True, False)
@example("STO", ["STOP", "TO"], [1], True, True)
@example("a STOb", ["STOP", "TO"], [1], True, False)
def test_steps_do_not_matter(
    text: str, stops: list[str], cuts: list[int], logprobs: bool, end: bool
) -> None:
    ids = TOKENIZER.encode(text) + ([END] if end else [])
    if not ids:
        return
    shown, tokens, reason, counted = run(ids, cuts, stops, logprobs=logprobs, end=end)
    assert shown == expected(text, stops)
    stopped = any(stop in text for stop in stops)
    assert reason == ("stop" if end or stopped else "length")
    assert counted <= len(ids)
    if not stopped:
        assert counted == len(ids)
    if not logprobs:
        assert tokens == []
        return
    offsets = [token.offset for token in tokens]
    assert offsets == sorted(offsets)
    assert [token.logprobs.token_id for token in tokens] == ids[: len(tokens)]
    if stopped:
        assert all(offset < len(shown) for offset in offsets)
    else:
        assert len(tokens) == len(ids)
        assert [token.is_end for token in tokens] == [False] * (len(ids) - end) + [True] * end


def test_token_text_begins_at_its_offset() -> None:
    ids = TOKENIZER.encode("Hello world 😀!")
    shown, tokens, _, _ = run(ids, [2, 3], [], logprobs=True, end=False)
    assert shown == "Hello world 😀!"
    for token in tokens:
        text = TOKENIZER.token_text(token.logprobs.token_id)
        if not text.startswith("bytes:"):
            assert shown[token.offset :].startswith(text)


def test_half_a_stop_string_is_given_out_at_the_end() -> None:
    shown, tokens, reason, counted = run(
        TOKENIZER.encode("go ST"), [], ["STOP"], logprobs=True, end=False
    )
    assert (shown, reason) == ("go ST", "length")
    assert counted == len(tokens)


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    choice = ChoiceText(OutputText(TOKENIZER, [], ["STOP"]))
    first = choice.push(TOKENIZER.encode("ST"), [TokenLogprobs(0, -1.0)])
    assert (first.text, first.tokens) == ("", [])
    second = choice.push(TOKENIZER.encode("X"), [TokenLogprobs(1, -1.0)])
    assert second.text == "STX"
    assert [token.offset for token in second.tokens] == [0, 2]


def test_broken_characters_become_replacement_characters() -> None:
    ids = TOKENIZER.encode("😀")[:2]
    shown, _, _, _ = run(ids, [], [], logprobs=False, end=False)
    assert shown == "\ufffd"


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 127))
def test_seeds(seed: int, choice: int) -> None:
    derived = choice_seed(seed, choice)
    assert derived is not None
    assert 0 <= derived < 2**63
    assert derived == choice_seed(seed, choice)
    if choice and seed >= 0:
        assert derived != choice_seed(seed + 1 if seed < 2**62 else 5, choice - 1)


def test_the_first_choice_keeps_the_seed() -> None:
    assert choice_seed(42, 0) == 42
    assert choice_seed(None, 3) is None


@pytest.mark.parametrize(("text", "stop_string"), [('{"a": 1}', None), ('{"a": STOP', "STOP")])
def test_an_answer_that_a_stop_string_ends_was_not_closed(
    text: str, stop_string: str | None
) -> None:
    prompt = TokenizedPrompt(TOKENIZER.encode("x"))
    sampling = SamplingParams(max_tokens=20, stop=("STOP",))
    state = GenerationState(GenerationRequest([prompt], sampling), TOKENIZER)
    state.begin([1])
    state.apply(Filled(1, 1, 0))
    update = state.apply(Generated(1, [*TOKENIZER.encode(text), END], None, "closed")).update
    assert isinstance(update, ChoiceDelta)
    assert (update.stop_string, update.is_closed) == (stop_string, stop_string is None)
    assert state.done
