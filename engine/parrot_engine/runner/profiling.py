"""Measures the memory of the largest step that settings allow on a GPU.

The step runs once, with a minimal cache, before the real cache is made; its other memory must stay
free.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from parrot_engine.batch import BatchRow, SamplingRow, ScoringRow, StepBatch
from parrot_engine.exceptions import SettingsError
from parrot_engine.protocol import SamplingParams
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.settings import BuiltinSettings

#: Options that take memory: sorting for top-p, log-probabilities.
_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, logprobs=5)
_TOP_LOGPROBS = 5


def largest_step(settings: BuiltinSettings, longest: int) -> StepBatch:
    """Return a step with as many tokens, rows and log-probabilities as settings allow.

    `longest` is the longest context. All rows write to the same blocks, from block 0 on, so the
    results are meaningless.
    """
    budget = settings.max_batch_tokens
    rows: list[BatchRow] = []
    sampling: list[SamplingRow | None] = []
    scoring: list[ScoringRow | None] = []

    def add(count: int, *, scored: bool) -> None:
        nonlocal budget
        budget -= count
        table = list(range(-(-count // settings.block_size)))
        rows.append(BatchRow([0] * count, 0, table, "all" if scored else "last"))
        sampling.append(SamplingRow(_SAMPLING, [0], [], len(rows), frozenset()))
        scoring.append(ScoringRow([0] * count, _TOP_LOGPROBS) if scored else None)

    add(min(settings.max_logprob_tokens, budget, longest), scored=True)
    decodes = min(settings.max_batch_size - len(rows), budget)
    # Each replaces a decode.
    prefills = min(decodes, -(-(budget - decodes) // max(1, longest - 1)))
    for _ in range(decodes - prefills):
        add(1, scored=False)
    for _ in range(prefills):
        add(min(budget, longest), scored=False)
    return StepBatch(rows, sampling=sampling, scoring=scoring)


def step_bytes(
    make_runner: Callable[[int], ModelRunner],
    settings: BuiltinSettings,
    longest: int,
    device: torch.device,
) -> int:
    """Return the memory of the largest step on `device` besides weights and cache.

    `make_runner` makes a runner with a cache of the given number of blocks.

    Raises:
        SettingsError: there is not enough memory.
    """
    batch = largest_step(settings, longest)
    try:
        runner = make_runner(max(len(row.block_table) for row in batch.rows))
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        runner.launch(batch).outcome()
        peak = torch.cuda.max_memory_allocated(device)
    except torch.cuda.OutOfMemoryError as error:
        raise SettingsError(
            "max_batch_tokens",
            f"a step of {settings.max_batch_tokens} tokens and {settings.max_batch_size} contexts "
            f"does not fit beside the weights: lower it, or max_batch_size ({error})",
        ) from error
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return int(peak - before)
