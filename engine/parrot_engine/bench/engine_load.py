"""Requests that arrive at random times: how long until the first token, and between two."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from parrot_engine.bench.engine_prompts import Prompts
from parrot_engine.bench.engine_results import BenchError
from parrot_engine.bench.engine_subjects import greedy
from parrot_engine.llm import LLM, Request

#: A run may take so much longer than its arrivals.
_DRAIN_S = 120.0


@dataclass(slots=True)
class _Watch:
    """Notes when the tokens of one request come."""

    arrival: float
    times: list[float] = field(default_factory=list)

    def __call__(self, token_ids: Sequence[int]) -> None:
        self.times.extend([time.perf_counter()] * len(token_ids))


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Times in seconds."""

    #: From a request's arrival, whether or not anybody looked then, to its first token.
    first: list[float]
    #: Between two tokens of the same request.
    between: list[float]
    #: From the first arrival to the last token.
    wall_s: float
    output_tokens: int

    def percentiles_ms(self, values: Sequence[float]) -> tuple[float, float]:
        """Median and 99th percentile in milliseconds."""
        median, high = np.percentile(values, (50, 99)) if values else (0.0, 0.0)
        return 1000 * float(median), 1000 * float(high)


def run_load(llm: LLM, prompts: Prompts, arrivals: Sequence[float]) -> LoadResult:
    """Let each prompt arrive at its time, in seconds from now; returns when all are done.

    Raises:
        BenchError: it took far too long, or tokens are missing.
        GenerationError: a request failed.
    """
    begin = time.perf_counter()
    watches = [_Watch(begin + arrival) for arrival in arrivals]
    deadline = watches[-1].arrival + _DRAIN_S
    requests: list[Request] = []
    running: list[Request] = []
    try:
        while len(requests) < len(watches) or running:
            now = time.perf_counter()
            if now > deadline:
                raise BenchError(f"requests were not done {_DRAIN_S} s after the last arrival")
            while len(requests) < len(watches) and watches[len(requests)].arrival <= now:
                number = len(requests)
                request = llm.submit(
                    prompts.token_ids[number],
                    greedy(prompts.max_tokens[number]),
                    detokenize=False,
                    on_tokens=watches[number],
                )
                requests.append(request)
                running.append(request)
            if running:
                llm.step()
                running = [request for request in running if not request.finished]
            else:
                time.sleep(max(0.0, watches[len(requests)].arrival - now))
    finally:
        for request in running:
            request.cancel()
    counts = [len(request.output().outputs[0].token_ids) for request in requests]
    if counts != prompts.max_tokens or counts != [len(watch.times) for watch in watches]:
        raise BenchError("tokens are missing")
    return LoadResult(
        [watch.times[0] - watch.arrival for watch in watches],
        [
            later - earlier
            for watch in watches
            for earlier, later in zip(watch.times, watch.times[1:], strict=False)
        ],
        max(watch.times[-1] for watch in watches) - watches[0].arrival,
        sum(counts),
    )
