"""Four applications with long system prompts (Parrot, OSDI '24, figure 16).

Calls of four GPTs in equal numbers, as one Poisson process. System prompt and answer in tokens:
productivity 7437/704, image generation 1116/89, programming 1694/631, data analysis 2031/416; a
query of a few tokens ends each prompt. The paper took repeated dummy words for the prompts; here
they are passages of the book.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from parrot_gateway.bench.apps import book
from parrot_gateway.bench.apps.workload import Call, Job, Size, Workload

#: Calls a second, before the time between arrivals is scaled like the lengths: a quarter of the
#: paper's lowest rate, which is about what four engines of the demo model on two cores can do.
RATE = 0.25


class Gpt(NamedTuple):
    """One application; lengths in the paper's tokens."""

    name: str
    system: int
    answer: int


GPTS = (
    Gpt("productivity", 7437, 704),
    Gpt("image_generation", 1116, 89),
    Gpt("programming", 1694, 631),
    Gpt("data_analysis", 2031, 416),
)


def build(size: Size, salt: str) -> Workload:
    """The workload with about `size.count` calls, in whole fours; prompts begin with `salt`."""
    draw = random.Random(2024)  # noqa: S311 - a workload, not a secret
    systems = {
        gpt.name: f"{salt} You are {gpt.name}.\n"
        + book.passage(size.characters(gpt.system), start=number * 30_000)
        for number, gpt in enumerate(GPTS)
    }
    order = list(GPTS) * max(1, round(size.count / len(GPTS)))
    draw.shuffle(order)
    jobs: list[Job] = []
    arrives_s = 0.0
    for number, gpt in enumerate(order):
        call = Call(
            f"{gpt.name}_{number}",
            (f"{systems[gpt.name]}\nQuery {number}:",),
            size.tokens(gpt.answer),
            seed=number,
            objective="latency",
        )
        jobs.append(Job(call.name, "gpts", (call,), (call.name,), arrives_s))
        arrives_s += draw.expovariate(RATE) * size.scale
    return Workload("gpts", tuple(jobs), ("parallel",), per_token=("gpts",))
