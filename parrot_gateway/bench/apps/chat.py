"""Chats beside map-reduce jobs (Parrot, OSDI '24, figure 18).

40 chats of one turn, one per second, each with a prompt of its own (at most 1024 tokens, 2048 with
the answer); nine map-reduce summaries from the 15th second on. Chats ask for latency, the
summaries for throughput.

The paper took the chats from ShareGPT; here their lengths are drawn, always the same, from
log-normal distributions within the same bounds, and their texts are passages of the book.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, cycle, islice

from parrot_gateway.bench.apps import book, map_reduce
from parrot_gateway.bench.apps.workload import Call, Job, Size, Workload

CHATS = 40
INTERVAL_S = 1.0
MEDIAN_PROMPT, MEDIAN_ANSWER = 90, 220
MAX_PROMPT, MAX_TOTAL, MIN_LENGTH = 1024, 2048, 4
JOBS = 9
JOBS_START_S = 15.0
JOB_GAPS_S = (0.5, 0.5, 10.0)
CHUNKS = 16


def build(size: Size, salt: str) -> Workload:
    """The workload with `size.count` chats, and map-reduce jobs in proportion; prompts begin
    with `salt`. Time between arrivals is scaled like the lengths."""
    jobs = chats(size, salt)
    for number, arrives_s in enumerate(summary_times(size)):
        jobs.append(
            map_reduce.job(
                replace(size, count=CHUNKS),
                f"{salt} Job {number}.",
                prefix=f"job_{number}_",
                arrives_s=arrives_s,
                objective="throughput",
            )
        )
    return Workload("chat", tuple(jobs), ("parallel",), per_token=("chat",))


def chats(size: Size, salt: str) -> list[Job]:
    """`size.count` chats, evenly one after the other, each with a prompt of its own."""
    draw = random.Random(2024)  # noqa: S311 - a workload, not a secret
    jobs: list[Job] = []
    for number in range(size.count):
        prompt = _length(draw, MEDIAN_PROMPT, MAX_PROMPT)
        answer = _length(draw, MEDIAN_ANSWER, MAX_TOTAL - prompt)
        text = book.passage(size.characters(prompt), start=number * 3500)
        call = Call(
            f"chat_{number}",
            (f"{salt} Chat {number}.\n{text}",),
            size.tokens(answer),
            seed=number,
            objective="latency",
        )
        arrives_s = number * INTERVAL_S * size.scale
        jobs.append(Job(call.name, "chat", (call,), (call.name,), arrives_s))
    return jobs


def summary_times(size: Size) -> list[float]:
    """When the map-reduce jobs beside `size.count` chats start."""
    gaps = islice(cycle(JOB_GAPS_S), max(0, round(JOBS * size.count / CHATS) - 1))
    start_s = JOBS_START_S * size.count / CHATS
    return [arrives_s * size.scale for arrives_s in accumulate(gaps, initial=start_s)]


def _length(draw: random.Random, median: int, most: int) -> int:
    return min(most, max(MIN_LENGTH, round(median * draw.lognormvariate(0.0, 0.9))))
