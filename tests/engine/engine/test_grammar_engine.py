"""Generations under a grammar in the engine: alone and in company, preempted, forked, refused."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from harness.engine.doubles import (
    ScriptedRunner,
    Trace,
    prompt,
    reference_generate,
    reference_logits,
)
from harness.engine.small_vocabulary import EOS, text_of, tokenizer_json
from harness.scripted_engine import ScriptedEngine
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from parrot_engine.batch import SamplingRow
from parrot_engine.engine import pending_grammars
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.engine.grammar import CompiledGrammar, GrammarCompiler
from parrot_engine.link.wire import Submit, decode_from_gateway, encode
from parrot_engine.loading.factory import EngineOptions, load_engine
from parrot_engine.protocol import Fill, FreeContext, Generate, Grammar, SamplingParams
from parrot_engine.runner.sampler import sample
from parrot_engine.settings import BuiltinSettings
from parrot_engine.text import Tokenizer

LIST = Grammar("regex", r"\[(0|1|2|true|x|y|a|b|c)(,(0|1|2|true|x|y|a|b|c))*\]")
CHOICE = Grammar("choice", '["abc", "ab!", "x,y", "z"]')
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer_json(), vocab_size=24, eos_token_ids=[EOS])
    yield compiler
    compiler.close()


def engine_with(
    compiler: GrammarCompiler | None, overlap: str, **settings: Any
) -> tuple[Trace, ScriptedRunner]:
    runner = ScriptedRunner(num_blocks=settings.get("num_blocks", 64))
    values = BuiltinSettings(block_size=4, overlap=overlap, **settings)
    return Trace(BuiltinEngine(runner, values, model="m", grammars=compiler)), runner


def reference(compiler: GrammarCompiler, tokens: list[int], params: SamplingParams) -> list[int]:
    """One token after the other, each under the mask of a matcher that was never interrupted."""
    if params.grammar is None:
        return reference_generate(tokens, params)[0]
    matcher = compiler.compile(params.grammar).result(20).matcher(min_tokens=params.min_tokens,
                                                                 ends=[EOS])  # fmt: skip
    generated: list[int] = []
    ends = frozenset({EOS, *params.stop_token_ids})
    row = SamplingRow(params, tokens, generated, params.seed or 0, ends, matcher=matcher)
    while len(generated) < params.max_tokens:
        token = sample(reference_logits([*tokens, *generated]), [row])[0].token_id
        assert token is not None
        generated.append(token)
        if token in ends:
            break
    return generated


@pytest.mark.parametrize("params", [
    replace(GREEDY, grammar=LIST),
    replace(GREEDY, grammar=CHOICE),
    replace(GREEDY, grammar=LIST, temperature=1.0, seed=3),
    replace(GREEDY, grammar=LIST, temperature=2.0, seed=4, top_k=3, repetition_penalty=1.3),
    replace(GREEDY, grammar=LIST, presence_penalty=1.0, min_tokens=8),
    replace(GREEDY, grammar=LIST, max_tokens=2),
])  # fmt: skip
def test_tokens_are_those_of_one_after_the_other(
    compiler: GrammarCompiler, overlap: str, params: SamplingParams
) -> None:
    trace, _ = engine_with(compiler, overlap)
    trace.submit(Fill(1, prompt(6)), Generate(1, params)).run()
    assert trace.tokens(1) == reference(compiler, prompt(6), params)
    text = text_of(trace.tokens(1))
    if params.max_tokens == 2:
        assert (trace.finish(1), text[:1]) == (["length"], "[")
    elif trace.finish(1) == ["stop"]:
        assert trace.tokens(1)[-1] == EOS
        assert text in ("abc", "ab!", "x,y", "z") or text[0] + text[-1] == "[]"


def test_it_changes_nothing_for_the_others(compiler: GrammarCompiler, overlap: str) -> None:
    trace, runner = engine_with(compiler, overlap, num_blocks=128)
    wanted: dict[int, SamplingParams] = {}
    for number in range(12):
        grammar = [None, LIST, CHOICE][number % 3]
        wanted[number] = SamplingParams(max_tokens=15, temperature=1.0, seed=number,
                                        grammar=grammar)  # fmt: skip
        trace.submit(Fill(number, prompt(5 + number)), Generate(number, wanted[number]))
    trace.run()
    for number, params in wanted.items():
        assert trace.tokens(number) == reference(compiler, prompt(5 + number), params)
    if overlap == "on":
        # All were planned ahead; steps with one were drawn once its token was known.
        pending = [
            (row.pending is not None, wish is not None and wish.matcher is not None)
            for batch in runner.batches
            for row, wish in zip(batch.rows, batch.sampling, strict=True)
        ]
        assert (True, False) in pending
        assert (True, True) in pending
        assert all(
            batch.awaits_tokens
            == any(
                row.pending is not None and wish is not None and wish.matcher is not None
                for row, wish in zip(batch.rows, batch.sampling, strict=True)
            )
            for batch in runner.batches
        )


@given(
    works=st.lists(
        st.tuples(st.integers(1, 20), st.sampled_from([None, LIST, CHOICE]), st.integers(0, 99)),
        min_size=2,
        max_size=6,
    ),
    num_blocks=st.integers(10, 16),
    overlap=st.sampled_from(["on", "off"]),
)
@hypothesis_settings(max_examples=40, deadline=None)
def test_preempted_in_the_middle(
    compiler: GrammarCompiler,
    works: list[tuple[int, Grammar | None, int]],
    num_blocks: int,
    overlap: str,
) -> None:
    trace, _ = engine_with(compiler, overlap, num_blocks=num_blocks, max_batch_tokens=8)
    for number, (length, grammar, seed) in enumerate(works):
        params = SamplingParams(max_tokens=18, temperature=1.5, seed=seed, grammar=grammar)
        trace.submit(Fill(number, prompt(length)), Generate(number, params))
    trace.run()
    for number, (length, grammar, seed) in enumerate(works):
        params = SamplingParams(max_tokens=18, temperature=1.5, seed=seed, grammar=grammar)
        assert trace.tokens(number) == reference(compiler, prompt(length), params)


def test_preemption_really_happens(compiler: GrammarCompiler, overlap: str) -> None:
    trace, _ = engine_with(compiler, overlap, num_blocks=10)
    params = SamplingParams(max_tokens=20, temperature=1.5, seed=1, min_tokens=18, grammar=LIST)
    for number in range(4):
        trace.submit(Fill(number, prompt(6, number)), Generate(number, params))
    trace.run()
    assert trace.engine.stats().preemptions > 0
    for number in range(4):
        assert trace.tokens(number) == reference(compiler, prompt(6, number), params)


def test_forks_have_a_matcher_each(compiler: GrammarCompiler, overlap: str) -> None:
    trace, _ = engine_with(compiler, overlap)
    params = [SamplingParams(max_tokens=10, temperature=1.5, seed=n, grammar=LIST) for n in (1, 2)]
    trace.submit(Fill(1, prompt(6)), *(Generate(n + 2, params[n], 1) for n in (0, 1)))
    trace.run()
    for n in (0, 1):
        assert trace.tokens(n + 2) == reference(compiler, prompt(6), params[n])
    assert trace.tokens(2) != trace.tokens(3)


def test_a_second_generate_begins_its_grammar_anew(compiler: GrammarCompiler, overlap: str) -> None:
    trace, _ = engine_with(compiler, overlap)
    params = replace(GREEDY, grammar=CHOICE)
    trace.submit(Fill(1, prompt(4)), Generate(1, params), Generate(1, params)).run()
    first = reference(compiler, prompt(4), params)
    second = reference(compiler, [*prompt(4), *first], params)
    assert trace.tokens(1) == [*first, *second]


# While a grammar is compiled


class SlowCompiler(GrammarCompiler):
    """Compiles nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__(tokenizer_json(), vocab_size=24, eos_token_ids=[EOS])
        self.gate = threading.Event()

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        assert self.gate.wait(60)
        return super()._compile(grammar)


@pytest.fixture
def slow() -> Iterator[SlowCompiler]:
    compiler = SlowCompiler()
    yield compiler
    compiler.gate.set()
    compiler.close()


def test_others_go_on_while_one_waits(slow: SlowCompiler, overlap: str) -> None:
    trace, _ = engine_with(slow, overlap)
    params = replace(GREEDY, grammar=LIST)
    trace.submit(Fill(1, prompt(9)), Generate(1, params))
    trace.submit(Fill(2, prompt(5)), Generate(2, GREEDY))
    while not trace.finish(2):
        trace.step()
    # Its prompt is there already, and it still has work.
    assert len(trace.filled(1)) == 1
    assert trace.tokens(1) == []
    assert trace.step() == []
    assert trace.engine.stats().waiting == 1
    slow.gate.set()
    trace.run()
    assert trace.tokens(1) == reference(slow, prompt(9), params)
    assert trace.tokens(2) == reference(slow, prompt(5), GREEDY)


def test_its_blocks_may_be_taken_meanwhile(slow: SlowCompiler, overlap: str) -> None:
    trace, _ = engine_with(slow, overlap, num_blocks=6, prefix_caching=False)
    params = replace(GREEDY, grammar=LIST, max_tokens=6)
    trace.submit(Fill(1, prompt(12)), Generate(1, params), Generate(3, params, 1)).step()
    trace.submit(Fill(2, prompt(18)), Generate(2, replace(GREEDY, max_tokens=4)))
    while not trace.finish(2):
        trace.step()
    slow.gate.set()
    trace.run()
    assert trace.tokens(1) == reference(slow, prompt(12), params)
    assert trace.tokens(3) == reference(slow, [*prompt(12), *trace.tokens(1)], params)


def test_freed_while_it_waits(slow: SlowCompiler, overlap: str) -> None:
    trace, _ = engine_with(slow, overlap)
    trace.submit(Fill(1, prompt(9)), Generate(1, replace(GREEDY, grammar=LIST)))
    for _ in range(3):
        trace.step()
    trace.submit(FreeContext(1)).run()
    assert trace.failure(1) is None
    assert trace.engine.stats().contexts == 0


def test_a_grammar_that_takes_too_long(
    slow: SlowCompiler, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_grammars, "COMPILE_TIMEOUT_S", 0.01)
    trace, _ = engine_with(slow, overlap)
    trace.submit(Fill(1, prompt(9)), Generate(1, replace(GREEDY, grammar=LIST))).run()
    failure = trace.failure(1)
    assert failure is not None
    assert failure.code == "invalid_request"
    assert "not compiled within" in failure.message


# Refusals


def test_a_bad_grammar_fails_its_context_alone(compiler: GrammarCompiler, overlap: str) -> None:
    trace, _ = engine_with(compiler, overlap)
    bad = Grammar("json_schema", '{"items": {"not": {}}}')
    trace.submit(Fill(1, prompt(5)), Generate(1, replace(GREEDY, grammar=bad)))
    trace.submit(Fill(2, prompt(5)), Generate(2, GREEDY)).run()
    failure = trace.failure(1)
    assert failure is not None
    assert failure.code == "invalid_request"
    assert "#/items" in failure.message
    assert trace.tokens(2) == reference(compiler, prompt(5), GREEDY)
    assert trace.engine.stats().contexts == 1


def test_a_dead_end_fails_as_a_bad_request(compiler: GrammarCompiler, overlap: str) -> None:
    trace, _ = engine_with(compiler, overlap)
    # No token of this vocabulary says Ω, which shows after a few tokens only.
    dead = Grammar("regex", "(x|y)Ω")
    trace.submit(Fill(1, prompt(5)), Generate(1, replace(GREEDY, grammar=dead))).run()
    failure = trace.failure(1)
    assert failure is not None
    assert failure.code == "invalid_request"
    assert "no token" in failure.message


def test_ignore_eos_and_a_grammar_exclude_each_other(
    compiler: GrammarCompiler, overlap: str
) -> None:
    trace, _ = engine_with(compiler, overlap)
    params = replace(GREEDY, grammar=LIST, ignore_eos=True)
    trace.submit(Fill(1, prompt(5)), Generate(1, params)).run()
    failure = trace.failure(1)
    assert failure is not None
    assert failure.message.startswith("ignore_eos")


def test_an_engine_without_a_tokenizer_says_so(overlap: str) -> None:
    trace, _ = engine_with(None, overlap)
    assert not trace.engine.info.supports_grammars
    trace.submit(Fill(1, prompt(5)), Generate(1, replace(GREEDY, grammar=LIST))).run()
    failure = trace.failure(1)
    assert failure is not None
    assert "tokenizer" in failure.message


def test_grammars_travel() -> None:
    generate = Generate(1, replace(GREEDY, grammar=LIST))
    message = decode_from_gateway(encode(Submit([generate, Generate(2, GREEDY)])))
    assert message == Submit([generate, Generate(2, GREEDY)])


def test_programs_give_grammars_too() -> None:
    from parrot_engine import LLM

    params = SamplingParams(max_tokens=20, seed=1, grammar=Grammar("regex", "[a-c]{2}[0-9]"))
    with LLM("parrot-demo") as llm:
        (output,) = llm.generate(["It was"], params)
    assert re.fullmatch("[a-c]{2}[0-9]", output.outputs[0].text)


def test_scripted_engines_have_none() -> None:
    assert not ScriptedEngine().info.supports_grammars


# The demo model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "moods": {"type": "array", "items": {"enum": ["glad", "sad"]}, "maxItems": 3},
    },
    "required": ["name", "age", "moods"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("mode", ["off", "on"])
def test_the_demo_model_writes_what_its_schema_says(mode: str) -> None:
    loaded = load_engine(EngineOptions("parrot-demo", overlap=mode, num_blocks=40))
    assert isinstance(loaded.engine, BuiltinEngine)
    assert loaded.engine.info.supports_grammars
    tokenizer, trace = Tokenizer(loaded.text), Trace(loaded.engine)
    grammar = Grammar("json_schema", json.dumps(PERSON))
    tokens = tokenizer.encode("The person whom I met was")
    for seed in range(6):
        params = SamplingParams(max_tokens=160, temperature=1.0, seed=seed, grammar=grammar)
        trace.submit(Fill(seed, tokens), Generate(seed, params))
    trace.run()
    for seed in range(6):
        assert trace.finish(seed) == ["stop"]
        text = tokenizer.decode(trace.tokens(seed)[:-1])
        jsonschema.validate(json.loads(text), PERSON)
    loaded.engine.close()
