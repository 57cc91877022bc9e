"""Requests that arrive over time on this engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from parrot_engine.llm import LLM, Request

from parrot_bench.engine.prompts import Prompts
from parrot_bench.engine.report import BenchError
from parrot_bench.engine.subjects import sampling_of

#: A run may take this much longer than its arrivals.
_DRAIN_S = 120.0


@dataclass(slots=True)
class Timing:
    """The times of one request's arrival and of its tokens; seconds of `time.perf_counter`."""

    #: Whether or not the engine took it then.
    arrival: float
    tokens: list[float] = field(default_factory=list)

    def __call__(self, token_ids: Sequence[int]) -> None:
        self.tokens.extend([time.perf_counter()] * len(token_ids))

    @property
    def first_s(self) -> float:
        """From its arrival to its first token."""
        return self.tokens[0] - self.arrival

    @property
    def between_s(self) -> list[float]:
        """Between each two of its tokens."""
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]


def run_requests(llm: LLM, prompts: Prompts, arrivals: Sequence[float]) -> list[Timing]:
    """Run all prompts, in their order.

    Args:
        llm: used by this run alone.
        prompts: what to run.
        arrivals: when each arrives, in seconds from now.

    Raises:
        BenchError: it took far too long, or tokens are missing.
        GenerationError: a request failed.
    """
    params = sampling_of(prompts)
    begin = time.perf_counter()
    timings: list[Timing] = []
    requests: list[Request] = []
    running: list[Request] = []
    try:
        while len(requests) < len(arrivals) or running:
            now = time.perf_counter() - begin
            if now > arrivals[-1] + _DRAIN_S:
                raise BenchError(f"requests were not done after {now:g} s")
            while len(requests) < len(arrivals) and arrivals[len(requests)] <= now:
                number = len(requests)
                timings.append(Timing(begin + arrivals[number]))
                request = llm.submit(
                    prompts.token_ids[number],
                    params[number],
                    detokenize=False,
                    on_tokens=timings[number],
                )
                requests.append(request)
                running.append(request)
            if running:
                llm.step()
                running = [request for request in running if not request.finished]
            else:
                time.sleep(arrivals[len(requests)] - now)
    finally:
        for request in running:
            request.cancel()
    counts = [len(request.output().outputs[0].token_ids) for request in requests]
    if counts != prompts.max_tokens or counts != [len(timing.tokens) for timing in timings]:
        raise BenchError("tokens are missing")
    return timings
