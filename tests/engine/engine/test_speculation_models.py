"""Models say the same with draft tokens and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.engine.checkpoints import CONFIGS, make_checkpoint
from harness.engine.doubles import Trace
from harness.engine.drafting import GREEDY
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.llm import LLM
from parrot_engine.protocol import Fill, Generate, SamplingParams
from parrot_engine.settings import BuiltinSettings


def _model_outputs(folder: Path, **options: Any) -> tuple[list[list[int]], int]:
    values = BuiltinSettings(device="cpu", dtype="float32", **options)
    engine = BuiltinEngine.load(folder, values, model="tiny")
    trace = Trace(engine)
    for index, params in enumerate(
        [
            replace(GREEDY, max_tokens=40),
            replace(GREEDY, max_tokens=40, frequency_penalty=0.5),
            SamplingParams(max_tokens=40, temperature=0.3, seed=3, ignore_eos=True),
            SamplingParams(max_tokens=40, top_k=5, seed=4, min_tokens=5),
            replace(GREEDY, max_tokens=33),
        ]
    ):
        repeating = [7 + index, 8, 9, 10 + index, 11] * (4 + index)
        trace.submit(Fill(index, repeating), Generate(index, params))
        trace.submit(Generate(10 + index, params, parent_context_id=index))
    trace.run()
    accepted = engine.stats().accepted_tokens
    said = [trace.tokens(index) for index in [*range(5), *range(10, 15)]]
    engine.close()
    return said, accepted


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_model_says_the_same_with_and_without(name: str, overlap: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS[name])
    plain, none = _model_outputs(folder, num_blocks=200, overlap=overlap)
    assert none == 0
    for num_blocks in (200, 14):
        said, accepted = _model_outputs(
            folder,
            num_blocks=num_blocks,
            overlap=overlap,
            speculative_tokens=5,
            speculative_min_ngram=1,
        )
        assert said == plain
        assert accepted > 0


def test_the_kernels_say_the_same_with_and_without(tmp_path: Path) -> None:
    """Triton's kernels, interpreted where there is no GPU."""
    folder = make_checkpoint(tmp_path, CONFIGS["llama"])
    outputs = []
    for tokens in (0, 3):
        values = BuiltinSettings(
            device="cpu",
            dtype="float32",
            kernels="triton",
            num_blocks=40,
            speculative_tokens=tokens,
            speculative_min_ngram=1,
        )
        engine = BuiltinEngine.load(folder, values, model="tiny")
        trace = Trace(engine)
        trace.submit(Fill(1, [5, 6, 7] * 5), Generate(1, replace(GREEDY, max_tokens=6))).run()
        assert (engine.stats().proposed_tokens > 0) == (tokens > 0)
        outputs.append(trace.tokens(1))
        engine.close()
    assert outputs[0] == outputs[1]


def test_several_processes_say_what_one_does(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, CONFIGS["llama"])
    options = {"num_blocks": 100, "speculative_tokens": 4, "speculative_min_ngram": 1}
    (plain, _), (said, accepted) = (
        _model_outputs(folder, tensor_parallel=size, **options) for size in (1, 2)
    )
    assert said == plain
    assert accepted > 0


def test_the_demo_model_repeats_and_is_drafted() -> None:
    text = "The ship lay in the harbour, and the captain walked along the deck. "
    params = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
    outputs = []
    for tokens in (0, 7):
        with LLM(device="cpu", dtype="float32", speculative_tokens=tokens) as llm:
            said = llm.generate([text * 3, text], params)
            outputs.append([each.outputs[0].token_ids for each in said])
            stats = llm.stats()
            # Ends in the middle of what a step brought, and of one of its tokens.
            stop = said[0].outputs[0].text[20:24]
            ended = llm.generate(text * 3, replace(params, stop=(stop,)))[0].outputs[0]
            assert ended.text == said[0].outputs[0].text.partition(stop)[0]
            with llm.context() as context:
                context.fill(text * 3)
                again = context.generate(replace(params, stop=(stop,)))
                assert again.token_ids == ended.token_ids
    assert outputs[0] == outputs[1]
    assert 0 < stats.accepted_tokens <= stats.proposed_tokens
    # Fewer steps than tokens of one sequence: some of them brought several.
    assert stats.steps < 80


# The benchmark
