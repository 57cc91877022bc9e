"""Grammars: the masks that they give, and outputs under random weights and random seeds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from harness.engine.small_vocabulary import EOS, PIECES, text_of, tokenizer_json
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from parrot_engine.batch import SamplingRow
from parrot_engine.engine.grammar import (
    MAX_CACHED,
    MAX_GRAMMAR_BYTES,
    GrammarCompiler,
    GrammarMatcher,
)
from parrot_engine.exceptions import PrimitiveError, SettingsError
from parrot_engine.loading.hub import resolve_model
from parrot_engine.protocol import Grammar, SamplingParams
from parrot_engine.runner.sampler import apply_masks, sample, unpack
from parrot_engine.runner.step_inputs import TokenMasks, make_masks
from parrot_engine.text import Tokenizer
from parrot_engine.text.loading import load_text_assets

#: Wider than the tokenizer, as the logits of padded vocabularies are.
WIDTH = len(PIECES) + 14


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer_json(), vocab_size=WIDTH, eos_token_ids=[EOS])
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[GrammarCompiler, Tokenizer, list[int]]]:
    text = load_text_assets(resolve_model("parrot-demo"))
    compiler = GrammarCompiler(text.tokenizer_json, vocab_size=4096, eos_token_ids=[1, 0])
    yield compiler, Tokenizer(text), [1, 0]
    compiler.close()


def start(compiler: GrammarCompiler, kind: Any, text: str = "", **options: Any) -> GrammarMatcher:
    return compiler.compile(Grammar(kind, text)).result(20).matcher(**options)


def allowed(matcher: GrammarMatcher, tokens: Sequence[int], width: int = WIDTH) -> set[int]:
    mask = np.zeros(-(-width // 32), dtype=np.int32)
    matcher.fill_mask(tokens, mask)
    (bits,) = unpack(torch.from_numpy(mask[None]), width).tolist()
    return {token for token, bit in enumerate(bits) if bit}


def problem_of(compiler: GrammarCompiler, kind: Any, text: str) -> PrimitiveError:
    with pytest.raises(PrimitiveError) as caught:
        compiler.compile(Grammar(kind, text)).result(20)
    return caught.value


# Masks against what the language is


def language(pattern: str, longest: int) -> set[str]:
    """All strings up to a length that a pattern of finitely many matches in full."""
    letters = sorted(set(re.findall(r"[abc]", pattern)))
    return {
        text
        for length in range(longest + 1)
        for text in map("".join, product(letters, repeat=length))
        if re.fullmatch(pattern, text)
    }


def assert_mask(mask: set[int], following: set[int], words: set[str], text: str) -> None:
    """A mask is all that may follow; where only one letter can, it may be one token of these.

    Of several ways to spell what is certain the library takes the tokenizer's own.
    """
    next_letters = {word[len(text) :][:1] for word in words if word.startswith(text)}
    if len(next_letters) == 1:
        assert mask
        assert mask <= following
    else:
        assert mask == following


#: Patterns, and the length of their longest match.
PATTERNS = [("abc", 3), ("(ab|ac)b", 3), ("a?b?c?", 3), ("a{2,4}", 4), ("(ab){1,2}c?", 5),
            ("(a|b)(b|c)(a|c)?", 3), ("aab|aba|b", 3)]  # fmt: skip


@pytest.mark.parametrize(("pattern", "longest"), PATTERNS)
def test_masks_are_those_of_the_language(
    compiler: GrammarCompiler, pattern: str, longest: int
) -> None:
    words = language(pattern, longest)
    prefixes = {word[:end] for word in words for end in range(len(word) + 1)}
    todo: list[list[int]] = [[]]
    visited = 0
    while todo:
        tokens = todo.pop()
        visited += 1
        text = text_of(tokens)
        wanted = {
            token
            for token, piece in enumerate(PIECES)
            if piece is not None and text + piece in prefixes
        }
        following = set(wanted)
        if text in words:
            following.add(EOS)
        assert_mask(allowed(start(compiler, "regex", pattern), tokens), following, words, text)
        todo += [[*tokens, token] for token in sorted(wanted)]
    assert visited > 3


@given(st.sets(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=6), st.randoms())
@hypothesis_settings(max_examples=60, deadline=None)
def test_a_choice_is_walked_to_one_of_its_words(words: set[str], random: Any) -> None:
    compiler = _shared()
    matcher = start(compiler, "choice", json.dumps(sorted(words)))
    tokens: list[int] = []
    while True:
        follow = allowed(matcher, tokens)
        text = text_of(tokens)
        following = {
            token
            for token, piece in enumerate(PIECES)
            if piece and any(word.startswith(text + piece) for word in words)
        }
        assert_mask(follow, following | ({EOS} if text in words else set()), words, text)
        token = random.choice(sorted(follow))
        if token == EOS:
            break
        tokens.append(token)
    assert text_of(tokens) in words


_compilers: list[GrammarCompiler] = []


def _shared() -> GrammarCompiler:
    if not _compilers:
        _compilers.append(GrammarCompiler(tokenizer_json(), vocab_size=WIDTH, eos_token_ids=[EOS]))
    return _compilers[0]


def test_min_tokens_keeps_the_end_away_where_there_is_more(compiler: GrammarCompiler) -> None:
    a = PIECES.index("a")
    matcher = start(compiler, "regex", "a{1,3}", min_tokens=3, ends=[EOS])
    assert EOS not in allowed(matcher, [])
    assert EOS not in allowed(matcher, [a])
    assert EOS not in allowed(matcher, [a, a])
    assert EOS in allowed(matcher, [a, a, a])
    # From that many on it may end, though it could go on.
    long = start(compiler, "regex", "a{1,5}", min_tokens=2, ends=[EOS])
    assert EOS not in allowed(long, [a])
    assert {a, EOS} <= allowed(long, [a, a])
    # Where it can only end, it ends.
    short = start(compiler, "regex", "a", min_tokens=3, ends=[EOS])
    assert allowed(short, [a]) == {EOS}


def test_matchers_of_one_grammar_do_not_share_a_state(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(Grammar("regex", "abc")).result(20)
    first, second = compiled.matcher(), compiled.matcher()
    a, b = PIECES.index("a"), PIECES.index("b")
    assert b in allowed(first, [a])
    assert a in allowed(second, [])
    assert allowed(first, [a]) == allowed(first, [a])


# Refusals


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", "{", "json_schema"),
        ("json_schema", "3", "json_schema"),
        ("json_schema", '{"type": "tree"}', "Invalid type: tree"),
        ("json_schema", '{"properties": {"a/b": {"not": {}}}}', '["not"] at #/properties/a~1b'),
        ("json_schema", '{"anyOf": [{}, {"uniqueItems": true}]}', "at #/anyOf/1"),
        ("json_schema", '{"$ref": "#/$defs/x"}', "/$defs/x"),
        ("json_schema", '{"$ref": "https://example.org/x"}', "example.org"),
        ("json_schema", '{"type": "number", "minimum": 5, "maximum": 3}', "minimum"),
        ("json_schema", "[" * 100_000, "json_schema"),
        ("regex", "(ab", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("choice", "[]", "array of 1 to"),
        ("choice", '["a", ""]', "array of 1 to"),
        ("choice", '"a"', "array of 1 to"),
        ("choice", "nonsense", "array of 1 to"),
        ("lark", "start: x", "unknown name"),
        ("lark", "", "grammar"),
    ],
)
def test_what_is_no_grammar_is_refused(
    compiler: GrammarCompiler, kind: str, text: str, words: str
) -> None:
    error = problem_of(compiler, kind, text)
    assert error.code == "invalid_request"
    assert words in error.message
    assert len(error.message) < 700
    assert "\n" not in error.message


def test_too_long_a_grammar_is_refused_at_once(compiler: GrammarCompiler) -> None:
    with pytest.raises(PrimitiveError, match="more than the"):
        compiler.compile(Grammar("regex", "a" * (MAX_GRAMMAR_BYTES + 1)))


def test_a_vocabulary_that_cannot_say_it(compiler: GrammarCompiler) -> None:
    error = problem_of(compiler, "regex", "Ω")
    assert "no token" in error.message


def test_a_tokenizer_that_cannot_be_used() -> None:
    with pytest.raises(SettingsError, match="end-of-text"):
        GrammarCompiler(tokenizer_json(), vocab_size=WIDTH, eos_token_ids=[])
    compiler = GrammarCompiler("{}", vocab_size=WIDTH, eos_token_ids=[EOS])
    assert "tokenizer cannot be used" in problem_of(compiler, "regex", "a").message
    compiler.close()


def test_what_was_compiled_is_found_again_up_to_a_limit() -> None:
    compiler = GrammarCompiler(tokenizer_json(), vocab_size=WIDTH, eos_token_ids=[EOS])
    first = compiler.compile(Grammar("regex", "a"))
    assert compiler.compile(Grammar("regex", "a")) is first
    assert compiler.compile(Grammar("choice", "a")) is not first
    for number in range(MAX_CACHED):
        compiler.compile(Grammar("regex", f"a{{{number + 1}}}")).result(20)
    assert compiler.compile(Grammar("regex", "a")) is not first
    compiler.close()


# Masks and logits


@given(
    st.integers(1, 150),
    st.lists(st.tuples(st.booleans(), st.integers(0, 2**32 - 1)), min_size=1, max_size=5),
)
@hypothesis_settings(max_examples=40, deadline=None)
def test_masked_logits(width: int, rows: list[tuple[bool, int]]) -> None:
    generator = torch.Generator().manual_seed(width)
    keep = [torch.rand(width, generator=generator) < 0.5 for _ in rows]

    class Fixed:
        problem = None
        is_closing = False

        def __init__(self, wanted: torch.Tensor) -> None:
            self.wanted = wanted

        def fill_mask(self, generated: Sequence[int], mask: Any) -> None:
            packed = np.packbits(self.wanted.numpy(), bitorder="little")
            mask.view(np.uint8)[: len(packed)] = packed

    sampling = [
        SamplingRow(
            SamplingParams(), [], [], 0, frozenset(), matcher=Fixed(wanted) if has else None
        )
        for (has, _), wanted in zip(rows, keep, strict=True)
    ]
    logits = torch.randn((len(rows), width), generator=generator)
    masked = logits.clone()
    masks = make_masks(sampling, width, torch.device("cpu"))
    if masks is not None:
        apply_masks(masked, masks)
    for (has, _), wanted, before, after in zip(rows, keep, logits, masked, strict=True):
        expected = before.masked_fill(~wanted, -torch.inf) if has else before
        assert torch.equal(after, expected)


def test_no_bias_brings_back_what_is_not_allowed(compiler: GrammarCompiler) -> None:
    c = PIECES.index("c")
    params = SamplingParams(temperature=0, logit_bias={c: 100.0}, logprobs=2)
    matcher = start(compiler, "regex", "a|b")
    row = SamplingRow(params, [], [], 0, frozenset(), matcher=matcher)
    logits = torch.zeros((1, WIDTH))
    logits[0, PIECES.index("b")] = 1.0
    (token,) = sample(logits, [row])
    assert token.token_id == PIECES.index("b")
    # Log-probabilities are those of the raw logits, allowed or not.
    assert token.logprobs is not None
    raw = torch.log_softmax(logits[0], -1)[PIECES.index("b")]
    assert token.logprobs.logprob == pytest.approx(float(raw))
    assert torch.equal(logits.isinf(), torch.zeros_like(logits, dtype=torch.bool))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the same on the device")
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 32), (2, 1025), (4, 2100)])
@pytest.mark.parametrize("some", [False, True])
def test_kernel_does_as_torch_does(rows: int, width: int, some: bool) -> None:
    pytest.importorskip("triton")
    from parrot_engine.kernels.sampling.logits import apply_token_masks

    generator = torch.Generator().manual_seed(rows * width)
    bits = torch.randint(-(2**31), 2**31, (rows, -(-width // 32)), generator=generator)
    bits = bits.to(torch.int32)
    logits = torch.randn((rows + 2 * some, width), generator=generator)
    at = torch.arange(rows).flip(0) + 1 if some else None
    expected = logits.clone()
    apply_masks(expected, TokenMasks(at, bits))
    apply_token_masks(logits, bits, at)
    assert torch.equal(logits, expected)
    assert not torch.isfinite(expected).all()


# Whatever is written validates

_NAMES = st.text("abxy_é ", min_size=1, max_size=4)
_LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-1000, 1000),
        st.integers(0, 500),
    ),
    st.builds(lambda size: {"type": "string", "maxLength": size}, st.integers(0, 12)),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[a-c]{1,4}$"},
            {"type": "string", "format": "date"},
            {"enum": ["red", 3, None, {"a": [1]}]},
            {"const": 'x\ny"z'},
        ]
    ),
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def make_object(properties: dict[str, Any], required: int) -> dict[str, Any]:
        names = list(properties)
        return {
            "type": "object",
            "properties": properties,
            "required": names[: required % (len(names) + 1)],
            "additionalProperties": False,
        }

    return st.one_of(
        st.builds(make_object, st.dictionaries(_NAMES, inner, max_size=4), st.integers(0, 4)),
        st.builds(
            lambda item, low, more: {
                "type": "array",
                "items": item,
                "minItems": low,
                "maxItems": low + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    )


SCHEMAS = st.recursive(_LEAVES, _containers, max_leaves=6)


@given(schema=SCHEMAS, seed=st.integers(0, 2**32 - 1), temperature=st.sampled_from([0.0, 1.0]))
@hypothesis_settings(max_examples=60, deadline=None)
def test_whatever_random_logits_write_validates(
    demo: tuple[GrammarCompiler, Tokenizer, list[int]],
    schema: dict[str, Any],
    seed: int,
    temperature: float,
) -> None:
    compiler, tokenizer, ends = demo
    matcher = start(compiler, "json_schema", json.dumps(schema))
    params = SamplingParams(temperature=temperature, seed=seed)
    generated: list[int] = []
    row = SamplingRow(params, [], generated, seed, frozenset(ends), matcher=matcher)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(1500):
        (token,) = sample(torch.randn((1, 4096), generator=generator), [row])
        assert token.token_id is not None, matcher.problem
        if token.token_id in ends:
            break
        generated.append(token.token_id)
    else:
        assume(False)
    text = tokenizer.decode(generated)
    jsonschema.validate(json.loads(text), schema)
