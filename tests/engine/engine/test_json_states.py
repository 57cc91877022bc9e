"""States of JSON texts: what has the same name has the same masks, and is led to the same end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from parrot_engine.engine.grammar import CompiledGrammar, GrammarCompiler
from parrot_engine.engine.json_states import JsonState, JsonStates
from parrot_engine.loading.hub import resolve_model
from parrot_engine.protocol import Grammar
from parrot_engine.text.loading import load_text_assets

ENDS = [1, 0]
WIDTH = 4096


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    text = load_text_assets(resolve_model("parrot-demo"))
    compiler = GrammarCompiler(text.tokenizer_json, vocab_size=WIDTH, eos_token_ids=ENDS)
    yield compiler
    compiler.close()


def compiled(compiler: GrammarCompiler, schema: dict[str, Any]) -> CompiledGrammar:
    return compiler.compile(Grammar("json_schema", json.dumps(schema))).result(20)


# Against a grammar whose states have no names

_LITERALS = ["red", "redder", "", 'a"b\\c', "é", "\n", "true"]
_TEXTS = st.builds(
    lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
    st.integers(0, 5),
    st.integers(0, 12),
)
_LEAVES = st.one_of(
    _TEXTS,
    st.just({"type": "string"}),
    st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from([*_LITERALS, 1, 12, None]),
                                                        min_size=1, unique=True)),
    st.builds(lambda value: {"const": value}, st.sampled_from(_LITERALS)),
    st.just({"type": ["integer", "null"], "minimum": 7, "maximum": 123}),
    st.just({"type": "number"}),
    st.just({"type": "boolean"}),
)  # fmt: skip
_SCALARS = st.lists(_LEAVES, min_size=1, max_size=3).map(lambda options: {"anyOf": options})


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(st.sampled_from(["a", "ab", "é", "b c"]), inner, max_size=3)
    return st.one_of(
        st.builds(
            lambda named, required, more: {
                "type": "object",
                "properties": named,
                "required": list(named)[:required],
                "additionalProperties": more,
            },
            properties,
            st.integers(0, 3),
            st.one_of(st.booleans(), _TEXTS),
        ),
        st.builds(
            lambda item, low: {"type": "array", "items": item, "minItems": low, "maxItems": 4},
            inner,
            st.integers(0, 2),
        ),
        inner.map(lambda schema: {"anyOf": [schema, {"type": "null"}]}),
    )


_SCHEMAS = st.recursive(st.one_of(_LEAVES, _SCALARS), _containers, max_leaves=5)


def assert_same_masks(
    compiler: GrammarCompiler, schema: dict[str, Any], seed: int, max_tokens: int = 60
) -> None:
    """Several texts, so that names come again, beside a grammar that says the same without names.

    A keyword that is not listed, and constrains nothing, keeps names away.
    """
    named, plain = compiled(compiler, schema), compiled(compiler, {**schema, "$anchor": "x"})
    source = np.random.default_rng(seed)
    for _ in range(6):
        matchers = [each.matcher(max_tokens=max_tokens, ends=ENDS) for each in (named, plain)]
        text = list[int]()
        while len(text) < max_tokens:
            masks = np.zeros((2, WIDTH // 32), dtype=np.int32)
            for matcher, mask in zip(matchers, masks, strict=True):
                matcher.fill_mask(text, mask)
            assert (masks[0] == masks[1]).all(), text
            assert matchers[0].is_closing == matchers[1].is_closing
            assert matchers[0].problem == matchers[1].problem
            bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
            token = int(source.choice(np.nonzero(bits)[0]))
            if token in ENDS:
                break
            text.append(token)


@given(schema=_SCHEMAS, seed=st.integers(0, 2**32 - 1))
@hypothesis_settings(max_examples=40, deadline=None)
def test_masks_are_those_of_the_library(
    compiler: GrammarCompiler, schema: dict[str, Any], seed: int
) -> None:
    # One string of limited length at least: others have no names.
    whole = {
        "type": "object",
        "properties": {"x": {"type": "string", "maxLength": 9}, "y": schema},
        "required": ["x", "y"],
        "additionalProperties": False,
    }
    assert JsonStates.of(json.dumps(whole)) is not None
    assert_same_masks(compiler, whole, seed)


@pytest.mark.parametrize("seed", range(3))
def test_of_a_schema_that_refers_to_itself(compiler: GrammarCompiler, seed: int) -> None:
    node = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 2, "maxLength": 6},
            "kind": {"$ref": "#/$defs/kind"},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
        "required": ["name", "kind", "next"],
        "additionalProperties": False,
    }
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node, "kind": {"enum": ["x", "xy"]}}}
    assert JsonStates.of(json.dumps(schema)) is not None
    assert_same_masks(compiler, schema, seed, 120)


# Names

SHORT = {"type": "string", "maxLength": 5}


def name(schema: Any, text: str) -> Any:
    states = JsonStates.of(json.dumps(schema))
    assert states is not None
    state = JsonState(states)
    for byte in text.encode():
        state.extend(bytes((byte,)))
    whole = JsonState(states)
    whole.extend(text.encode())
    assert state.name() == whole.name()
    return state.name()


TWO = {"properties": {"a": SHORT, "b": {"enum": ["red", "rose"]}}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": "abc', '{"a":"xyz'),
        ('{"a": "é\\n', '{"a":"xy'),
        ('{"a": "abc", "b": "red"', '{"a":"","b":"rose"'),
        ('{"c": {"d": [1, 2, "x"]}, "a": "', '{"c": 12.5, "a": "'),
        ('{"c": "longer than all that is', '{"c": "longer than any bound is not'),
    ],
)
def test_texts_of_one_state(one: str, other: str) -> None:
    assert name(TWO, one) == name(TWO, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": "abc', '{"a": "ab'),
        ('{"a": "r', '{"a": "x'),
        ('{"a": "re', '{"a": "ro'),
        ('{"a": "\\u0041', '{"a": "x'),
        ('{"a": "\\', '{"a": "x'),
        ('{"a": ["x", "', '{"a": ["'),
        ('{"a": "x", "', '{"b": "x", "'),
        ('{"a": 1', '{"a": 12'),
        ('{"a": ', '{"a":'),
        ('{"a', '{"a": "a'),
    ],
)
def test_texts_of_different_states(one: str, other: str) -> None:
    assert name(TWO, one) != name(TWO, other)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "string"},
        {"properties": {"a": SHORT, "b": {"type": "string", "pattern": "^a+$"}}},
        {"properties": {"a": SHORT, "b": {"type": "string", "format": "date"}}},
        {"properties": {"a": SHORT}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"anyOf": [{"properties": {"a": SHORT}}, {"type": "array", "items": SHORT}]},
        {"properties": {"a": SHORT, "b": {"enum": [{"c": 1}, {"c": 2}]}}},
        {"properties": {"a": SHORT, "b": {"$ref": "#/properties/a"}}},
        {"properties": {"a": SHORT}, "patternProperties": {"^x": SHORT}},
        {"properties": {"a": SHORT}, "required": ["a"], "x-guidance": {"lenient": True}},
        {"properties": [SHORT]},
        {"properties": {"a": {"maxLength": "5"}}},
    ],
)
def test_schemas_whose_states_have_no_names(schema: Any) -> None:
    assert JsonStates.of(json.dumps(schema)) is None
