"""Chats beside a prompt that can wait: `python tools/engine_study.py background`.

Chats of an 8B model with random weights generate one token a step; then a prompt of less priority
comes (`max_background_tokens`), with each of `--bursts` as `background_burst_tokens`. A line of
JSON each: milliseconds of a step alone, of the steps from the prompt's arrival to its end (median
and largest), the seconds that the prompt took, and milliseconds a token of the chats over
`--window` steps from its arrival on, all of which hold the prompt's work, however it is spread.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.protocol import (
    Event,
    Fill,
    Filled,
    FreeContext,
    Generate,
    Generated,
    SamplingParams,
)
from parrot_engine.runner.graphs import CudaCapture
from parrot_engine.settings import BuiltinSettings

from engine_studies.harness import emit
from engine_studies.steps import SHAPES, dummy_runner

_CHAT_TOKENS = 512
_CACHE_TOKENS = 300_000
#: Of less priority than the chats.
_BACKGROUND = 1


def measure(
    engine: BuiltinEngine, chats: int, prompt: int, window: int, rest: int
) -> dict[str, Any]:
    """The figures of one case; `rest` steps before the prompt comes save up for it."""
    vocab = engine.info.vocab_size

    def tokens(count: int) -> list[int]:
        return [random.randrange(vocab) for _ in range(count)]  # noqa: S311 -- any will do

    sampling = SamplingParams(max_tokens=10_000, temperature=0, ignore_eos=True)
    for number in range(chats):
        engine.submit([Fill(number, tokens(_CHAT_TOKENS)), Generate(number, sampling)])
    started: set[int] = set()
    while len(started) < chats:
        started |= {event.context_id for event in engine.step().events if _is_token(event)}
    alone = [_step_ms(engine)[0] for _ in range(rest)][-rest // 2 :]
    engine.submit([Fill(chats, tokens(prompt), priority=_BACKGROUND)])
    beside, filled = list[float](), 0
    while len(beside) < window or not filled:
        step_ms, events = _step_ms(engine)
        beside.append(step_ms)
        if not filled and any(isinstance(event, Filled) for event in events):
            filled = len(beside)
    engine.submit([FreeContext(number) for number in range(chats + 1)])
    while engine.stats().contexts:
        engine.step()
    until = beside[:filled]
    return {
        "alone_ms": round(median(alone), 2),
        "beside_p50_ms": round(median(until), 2),
        "beside_max_ms": round(max(until), 2),
        "steps": filled,
        "prompt_s": round(sum(until) / 1000, 3),
        "window_ms": round(sum(beside[:window]) / window, 2),
    }


def _is_token(event: Event) -> bool:
    return isinstance(event, Generated)


def _step_ms(engine: BuiltinEngine) -> tuple[float, Sequence[Event]]:
    """Milliseconds from one step's outcome to the next one's, and its events."""
    begin = time.perf_counter()
    events = engine.step().events
    return 1000 * (time.perf_counter() - begin), events


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `harness.Study`."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--chats", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--share", type=int, help="`max_background_tokens` (default: the engine's)")
    parser.add_argument("--bursts", type=int, nargs="*", default=[0, 254, 508, 1016])
    parser.add_argument("--prompt", type=int, default=8192, help="its tokens (default: 8192)")
    parser.add_argument("--window", type=int, default=256, help="steps (default: 256)")
    parser.add_argument("--rest", type=int, default=96, help="steps before it (default: 96)")
    parser.add_argument("--repetitions", type=int, default=2)


def run(options: argparse.Namespace) -> None:
    """See `harness.Study`."""
    settings = BuiltinSettings.for_device("cuda", device="cuda", dtype="bfloat16")
    share = options.share or settings.background_tokens
    runner = dummy_runner(
        settings.block_size, _CACHE_TOKENS // settings.block_size, shape=options.shape
    )
    graphs = runner.use_graphs(
        CudaCapture(torch.device("cuda")),
        max_rows=settings.max_batch_size,
        max_context=runner.max_position,
        max_tokens=settings.max_batch_tokens,
    )
    assert graphs is not None
    graphs.capture_all()
    for repetition in range(options.repetitions):
        for chats in options.chats:
            for burst in options.bursts:
                chosen = replace(
                    settings, max_background_tokens=share, background_burst_tokens=burst or None
                )
                engine = BuiltinEngine(runner, chosen, model="bench")
                figures = measure(engine, chats, options.prompt, options.window, options.rest)
                case = {"chats": chats, "share": share, "burst": burst, "repetition": repetition}
                emit(case | figures)
