"""Launching a step waits for nothing; overlapping steps change no token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.engine.checkpoints import CONFIGS, make_checkpoint
from harness.engine_checks import run_until_idle, tokens_of
from parrot_engine.batch import (
    UNKNOWN_TOKEN,
    BatchRow,
    BlockCopy,
    SamplingRow,
    ScoringRow,
    StepBatch,
)
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.protocol import Fill, Generate, SamplingParams
from parrot_engine.runner.loader import load_runner
from parrot_engine.runner.sampler import sample
from parrot_engine.settings import BuiltinSettings

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
KINDS = [
    GREEDY,
    SamplingParams(max_tokens=20, temperature=0.8, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=20, top_k=20, top_p=0.9, min_p=0.01, seed=2, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(max_tokens=20, presence_penalty=0.5, seed=3, min_tokens=10),
    SamplingParams(max_tokens=20, temperature=0, logit_bias={3: 4.0}, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0, logprobs=0, ignore_eos=True),
]


@contextmanager
def nothing_waits() -> Iterator[None]:
    """An operation that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _sampling(params: SamplingParams) -> SamplingRow:
    return SamplingRow(params, [1, 2, 3], [4, 5], 7, frozenset({9}))


def _batch(first_block: int, pending: bool) -> StepBatch:
    rows = [
        BatchRow([UNKNOWN_TOKEN] if pending else [4], 3, [first_block + index], "last", index)
        if pending
        else BatchRow([4], 3, [first_block + index], "last")
        for index in range(len(KINDS))
    ]
    sampling: list[SamplingRow | None] = [_sampling(params) for params in KINDS]
    rows.append(BatchRow([1, 2, 3], 0, [first_block + 20], "all"))
    rows.append(BatchRow([1, 2, 3], 0, [first_block + 21]))
    scoring = [*[None] * len(KINDS), ScoringRow([2, 3], 2), None]
    copies = [BlockCopy(first_block, first_block + 30)]
    return StepBatch(rows, copies, [*sampling, None, None], scoring)


def test_launch_waits_for_nothing(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, CONFIGS["qwen3"])
    values = BuiltinSettings(device="cuda", dtype="bfloat16", num_blocks=128)
    runner = load_runner(path, values)
    runner.kv_cache.normal_()
    # Kernels are compiled, and pinned memory is taken, the first times.
    for _ in range(3):
        runner.launch(_batch(0, False)).outcome()
        runner.launch(_batch(0, True)).outcome()
    with nothing_waits():
        first = runner.launch(_batch(0, False))
        second = runner.launch(_batch(0, True))
    for launch in (first, second):
        outcomes = launch.outcome()
        assert all(outcome.token is not None for outcome in outcomes[: len(KINDS)])
        assert [len(outcome.scores) for outcome in outcomes[-2:]] == [2, 0]
        assert launch.ready()


def test_the_sampler_on_the_device_is_that_of_the_cpu() -> None:
    logits = 3 * torch.randn(len(KINDS), 5000, generator=torch.Generator().manual_seed(1))
    logits = torch.cat([logits, logits])
    logits[len(KINDS) :, 17] = float("nan")
    rows = [_sampling(params) for params in KINDS] * 2
    here, there = sample(logits, rows), sample(logits.cuda(), rows)
    assert [one.token_id for one in here] == [other.token_id for other in there]
    for one, other in zip(here, there, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
            assert [t for t, _ in one.logprobs.top] == [t for t, _ in other.logprobs.top]


def test_overlapping_steps_change_no_token(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, CONFIGS["qwen3"])
    outputs = []
    for overlap in ("off", "on", "auto"):
        values = BuiltinSettings(
            device="cuda", dtype="float32", num_blocks=48, max_batch_tokens=70, overlap=overlap
        )
        engine = BuiltinEngine.load(path, values, model="tiny")
        primitives: list[Fill | Generate] = []
        for index, params in enumerate(KINDS * 3):
            tokens = [(index * 7 + at * at) % 250 for at in range(10 + 3 * index)]
            primitives += [Fill(index, tokens), Generate(index, params)]
        events = run_until_idle(engine, *primitives)
        engine.check_integrity()
        outputs.append([tokens_of(events, index) for index in range(len(KINDS) * 3)])
        engine.close()
    assert outputs[0] == outputs[1] == outputs[2]
    assert all(outputs[0])
