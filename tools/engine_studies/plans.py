"""What laying out a step costs the host: `python tools/engine_study.py plans`.

Needs no GPU: plans are those for an H200. Attention has the shape of Llama-3.1-8B. A line of JSON
a case, medians of CPU time in milliseconds: `tokens` gathers ids and positions, `lay_out` makes
the work list, `write` puts both into the buffer that CUDA graphs read; `bytes` go to the device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from parrot_engine.attention.launch import DeviceLimits
from parrot_engine.attention.policy import MAX_SLOTS
from parrot_engine.attention.triton_backend import TritonAttention
from parrot_engine.batch import BatchRow
from parrot_engine.runner.graphs import Bucket
from parrot_engine.runner.step_inputs import gather_tokens

from engine_studies.harness import emit
from engine_studies.kernels import LLAMA_8B, decode_load, prefill_load

#: Rows, keys of each, and how many of them all have in common.
_CASES = (
    (1, 576, 0),
    (8, 576, 0),
    (64, 576, 0),
    (64, 6400, 0),
    (64, 6400, 6144),
    (256, 576, 0),
    (256, 4096, 0),
    (256, 6400, 6144),
)
#: Mixed steps: decodes behind 4,096 keys, rows of prefill, tokens of each, keys before them.
_MIXED_CASES = (
    (0, 1, 256, 6144),
    (64, 1, 256, 6144),
    (64, 3, 320, 6144),
    (64, 8, 120, 6144),
    (64, 40, 24, 1024),
    (0, 1, 1024, 16384),
)
_MAX_ROWS, _MAX_CONTEXT = 256, 131_072
_H200 = DeviceLimits(num_sms=132, shared_memory=227 * 1024, copy_engine=True, hopper=True)


def _median_ms(work: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return round(1000 * statistics.median(times), 3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `harness.Study`."""
    parser.add_argument("--block-sizes", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--repeats", type=int, default=200)


def run(options: argparse.Namespace) -> None:
    """See `harness.Study`."""
    for block_size in options.block_sizes:
        shape = LLAMA_8B._replace(block_size=block_size)
        attention = TritonAttention(
            shape, windows=[None], device=torch.device("cpu"), dtype=torch.bfloat16, limits=_H200
        )
        for count, context, shared in _CASES:
            load = decode_load(count, context, shape, shared=shared)
            name = f"{load.name}, blocks of {block_size}"
            _report(name, attention, _with_arrays(load.rows), options.repeats)
        for decodes, count, new, cached in _MIXED_CASES:
            load = prefill_load(new, cached, shape, rows=count)
            rows = [*decode_load(decodes, 4096, shape).rows, *load.rows]
            name = f"decode {decodes} x 4096, {count} x {new} behind {cached}"
            name = f"{name}, blocks of {block_size}"
            _report(name, attention, _with_arrays(rows), options.repeats)


def _with_arrays(rows: Sequence[BatchRow]) -> list[BatchRow]:
    """As the engine has them: block tables as arrays; decodes whose token the device has."""
    return [
        BatchRow(
            row.token_ids,
            row.start,
            np.array(row.block_table, np.int32),
            "last",
            index if len(row.token_ids) == 1 else None,
        )
        for index, row in enumerate(rows)
    ]


def _report(name: str, attention: TritonAttention, rows: Sequence[BatchRow], repeats: int) -> None:
    num_tokens = sum(len(row.token_ids) for row in rows)
    bucket = Bucket(
        num_tokens,
        _MAX_ROWS,
        lambda start: attention.fixed_layout(num_tokens, _MAX_ROWS, _MAX_CONTEXT, MAX_SLOTS, start),
    )
    buffer = np.zeros(bucket.layout.size, dtype=np.int32)
    tokens, host = gather_tokens(rows), attention.lay_out(rows)
    assert bucket.layout.holds(*host)
    entry = {
        "case": name,
        "tokens_ms": _median_ms(lambda: gather_tokens(rows), repeats),
        "lay_out_ms": _median_ms(lambda: attention.lay_out(rows), repeats),
        "write_ms": _median_ms(lambda: bucket.write(buffer, tokens, host), repeats),
        "bytes": 4 * (bucket.write(buffer, tokens, host) - bucket.start),
    }
    emit(entry)
