"""Draft tokens on a GPU: the same outputs, through the graphs of decodes, without waiting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.engine.checkpoints import CONFIGS, make_checkpoint
from harness.engine_checks import run_until_idle, tokens_of
from parrot_engine.batch import UNKNOWN_TOKEN, BatchRow, SamplingRow, StepBatch
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.protocol import Fill, Generate, SamplingParams
from parrot_engine.runner.loader import load_runner
from parrot_engine.settings import BuiltinSettings

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
KINDS = [
    GREEDY,
    replace(GREEDY, logprobs=2),
    replace(GREEDY, logit_bias={3: 2.0}),
    replace(GREEDY, repetition_penalty=1.3),
    SamplingParams(max_tokens=40, temperature=0.3, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.5, top_k=5, top_p=0.9, seed=2, min_tokens=40),
]


def _primitives() -> list[Fill | Generate]:
    primitives: list[Fill | Generate] = []
    for index in range(2 * len(KINDS)):
        tokens = [7 + index, 8, 9, 10 + index, 11] * (5 + 9 * index)
        primitives += [Fill(index, tokens), Generate(index, KINDS[index % len(KINDS)])]
    return primitives


def test_the_same_tokens_with_and_without(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, CONFIGS["qwen3"])
    ways = [(0, "off", "off"), (4, "on", "lazy")]
    ways += [
        (k, overlap, g) for k in (1, 7) for overlap in ("off", "auto") for g in ("off", "lazy")
    ]
    said, accepted = {}, {}
    for way in ways:
        count, overlap, graphs = way
        values = BuiltinSettings(
            device="cuda",
            dtype="float32",
            num_blocks=400,
            overlap=overlap,
            cuda_graphs=graphs,
            speculative_tokens=count,
            speculative_min_ngram=1,
        )
        engine = BuiltinEngine.load(path, values, model="tiny")
        events = run_until_idle(engine, *_primitives())
        engine.check_integrity()
        said[way] = [tokens_of(events, index) for index in range(2 * len(KINDS))]
        accepted[way] = engine.stats().accepted_tokens
        engine.close()
    plain = said[0, "off", "off"]
    assert [way for way, tokens in said.items() if tokens != plain] == []
    assert all((number > 0) == (way[0] > 0) for way, number in accepted.items())


def test_graphs_of_decodes_hold_rows_with_drafts(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, CONFIGS["llama"])
    values = BuiltinSettings(
        device="cuda",
        dtype="bfloat16",
        num_blocks=200,
        cuda_graphs="lazy",
        speculative_tokens=7,
        speculative_min_ngram=1,
    )
    runner = load_runner(path, values)
    graphs = runner._graphs
    assert graphs is not None
    engine = BuiltinEngine(runner, values, model="tiny")
    prompts = [[7, 8, 9, 10 + index] * 10 for index in range(3)]
    run_until_idle(engine, *(Fill(index, prompt) for index, prompt in enumerate(prompts)))
    replays, misses, keys = graphs.num_replays, graphs.num_misses, set(graphs._graphs)
    run_until_idle(engine, *(Generate(index, GREEDY) for index in range(3)))
    assert engine.stats().proposed_tokens > 0
    assert graphs.num_misses == misses
    assert graphs.num_replays > replays
    captured = set(graphs._graphs) - keys
    assert captured
    assert not any(key.parts.tiles for key in captured)
    engine.close()


def test_launch_waits_for_nothing(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, CONFIGS["qwen3"])
    runner = load_runner(path, BuiltinSettings(device="cuda", dtype="bfloat16", num_blocks=128))
    runner.kv_cache.normal_()

    def batch(pending: int | None) -> StepBatch:
        rows = [
            BatchRow([4 if pending is None else UNKNOWN_TOKEN, 5, 6], 3, [5], "all", pending, 2),
            BatchRow([4], 3, [6], "last"),
            BatchRow([1, 2, 3], 0, [7]),
        ]
        sampling = [
            SamplingRow(params, [1, 2, 3], [4], 7, frozenset({9})) for params in (KINDS[5], GREEDY)
        ]
        return StepBatch(rows, [], [*sampling, None], [None] * 3)

    for _ in range(3):
        runner.launch(batch(None)).outcome()
        runner.launch(batch(1)).outcome()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launches = [runner.launch(batch(None)), runner.launch(batch(1))]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for launch in launches:
        outcomes = launch.outcome()
        assert [len(outcome.following) for outcome in outcomes] == [2, 0, 0]
        assert [outcome.token is None for outcome in outcomes] == [False, False, True]
