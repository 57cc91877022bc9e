"""Generations that near their `max_tokens` are led to the end of their grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from parrot_engine.batch import SamplingRow
from parrot_engine.engine.grammar import CompiledGrammar, GrammarCompiler
from parrot_engine.loading.hub import resolve_model
from parrot_engine.protocol import Grammar, SamplingParams
from parrot_engine.runner.sampler import sample
from parrot_engine.text import Tokenizer
from parrot_engine.text.loading import load_text_assets

ENDS = [1, 0]
WIDTH = 4096
_ASSETS = load_text_assets(resolve_model("parrot-demo"))
TOKENIZER = Tokenizer(_ASSETS)

TEXT = {"type": "string"}
NUMBER = {"type": "number"}


def made(properties: dict[str, Any], required: Sequence[str] | None = None) -> dict[str, Any]:
    names = list(properties) if required is None else list(required)
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


ITEM = made({"title": TEXT, "price": NUMBER, "kind": {"enum": ["red", "green"]}, "tags": {
    "type": "array", "items": TEXT}})  # fmt: skip
TREE: dict[str, Any] = made({"name": TEXT, "children": {"type": "array", "items": {"$ref": "#"}}})
SCHEMAS: dict[str, dict[str, Any]] = {
    "a string": TEXT,
    "any object": {"type": "object"},
    "anything": {},
    "list of objects": made({"items": {"type": "array", "items": ITEM}}),
    "text, list, date": made(
        {"text": TEXT, "items": {"type": "array", "items": ITEM},
         "when": {"type": "string", "format": "date-time"}}),
    "a tree": TREE,
    "a map": {"type": "object", "additionalProperties": made({"a": TEXT, "b": TEXT})},
    "optional parts": made({"a": TEXT, "b": ITEM, "c": ITEM}, required=["a"]),
    "long at least": made({"a": {"type": "string", "minLength": 20}, "b": TEXT}),
    "of a pattern": made({"a": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, "b": TEXT}),
    "alternatives": made({"a": {"anyOf": [ITEM, TEXT, {"type": "null"}]}, "b": TEXT}),
}  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(_ASSETS.tokenizer_json, vocab_size=WIDTH, eos_token_ids=ENDS)
    yield compiler
    compiler.close()


def compiled(compiler: GrammarCompiler, schema: dict[str, Any]) -> CompiledGrammar:
    return compiler.compile(Grammar("json_schema", json.dumps(schema))).result(20)


def write(grammar: CompiledGrammar, max_tokens: int, seed: int, min_tokens: int = 0) -> list[int]:
    """Return what random logits that seldom end write under a grammar."""
    matcher = grammar.matcher(max_tokens=max_tokens, min_tokens=min_tokens, ends=ENDS)
    generated: list[int] = []
    row = SamplingRow(
        SamplingParams(seed=seed), [], generated, seed, frozenset(ENDS), matcher=matcher
    )
    generator = torch.Generator().manual_seed(seed)
    while len(generated) < max_tokens and (not generated or generated[-1] not in ENDS):
        (token,) = sample(4 * torch.randn((1, WIDTH), generator=generator), [row])
        assert token.token_id is not None, matcher.problem
        generated.append(token.token_id)
    return generated


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("max_tokens", [70, 160])
def test_documents_are_whole(compiler: GrammarCompiler, name: str, max_tokens: int) -> None:
    grammar = compiled(compiler, SCHEMAS[name])
    for seed in range(4):
        tokens = write(grammar, max_tokens, seed)
        assert tokens[-1] in ENDS, TOKENIZER.decode(tokens)
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens[:-1])), SCHEMAS[name])


def test_the_model_is_left_most_of_its_tokens(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, made({"a": TEXT}))
    lengths = [len(write(grammar, 200, seed)) for seed in range(4)]
    assert max(lengths) > 180


def test_what_does_not_fit_is_cut(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, SCHEMAS["text, list, date"])
    tokens = write(grammar, 20, 1)
    assert len(tokens) == 20
    assert tokens[-1] not in ENDS


@pytest.mark.parametrize("kind", ["regex", "lark"])
def test_texts_that_may_end_anywhere_are_cut(compiler: GrammarCompiler, kind: Any) -> None:
    text = "[a-z ]*" if kind == "regex" else "start: /[a-z ]*/"
    grammar = compiler.compile(Grammar(kind, text)).result(20)
    lengths = {len(write(grammar, 40, seed)) for seed in range(8)}
    assert 40 in lengths


def test_min_tokens_are_kept(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, TEXT)
    for seed in range(4):
        tokens = write(grammar, 50, seed, min_tokens=48)
        assert tokens[-1] in ENDS
        assert len(tokens) >= 48


def test_numbers_are_written_to_the_last(compiler: GrammarCompiler) -> None:
    """A text that is valid as it stands may be cut: it stays valid."""
    tokens = write(compiled(compiler, {"type": "integer"}), 12, 3)
    assert isinstance(json.loads(TOKENIZER.decode(tokens)), int)


@given(
    name=st.sampled_from(sorted(SCHEMAS)),
    max_tokens=st.integers(1, 120),
    seed=st.integers(0, 2**32 - 1),
    at=st.integers(0, 120),
)
@hypothesis_settings(max_examples=25, deadline=None)
def test_a_replay_gets_the_same_masks(
    compiler: GrammarCompiler, name: str, max_tokens: int, seed: int, at: int
) -> None:
    grammar = compiled(compiler, SCHEMAS[name])
    tokens = write(grammar, max_tokens, seed)
    begun = tokens[: min(at, len(tokens) - 1)]
    stepwise, at_once = (grammar.matcher(max_tokens=max_tokens, ends=ENDS) for _ in range(2))
    for end in range(len(begun)):
        stepwise.fill_mask(begun[:end], np.zeros(WIDTH // 32, dtype=np.int32))
    masks = [np.zeros(WIDTH // 32, dtype=np.int32) for _ in range(2)]
    stepwise.fill_mask(begun, masks[0])
    at_once.fill_mask(begun, masks[1])
    assert (masks[0] == masks[1]).all()
