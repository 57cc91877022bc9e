"""Map-reduce summary (Parrot, OSDI '24, figure 13): chunks summarised apart, then together.

Chunks of 1024 tokens, outputs of 50; the last call reads all the summaries.
"""

from __future__ import annotations

from parrot_gateway.bench.apps import book
from parrot_gateway.bench.apps.workload import Call, Job, Output, Size, Workload

CHUNK_TOKENS = 1024
OUTPUT_TOKENS = 50


def build(size: Size, salt: str) -> Workload:
    """The workload with `size.count` chunks; prompts begin with `salt`."""
    return Workload("map-reduce", (job(size, salt),), ("one by one", "parallel"))


def job(
    size: Size,
    salt: str,
    *,
    prefix: str = "",
    arrives_s: float = 0.0,
    objective: str = "",
    first_seed: int = 0,
) -> Job:
    """One summary, its calls named with `prefix` in front, their seeds from `first_seed` on."""
    tokens = size.tokens(OUTPUT_TOKENS)
    maps = [
        Call(
            f"{prefix}map_{number}",
            (f"{salt}\nSummarise this part of a book in one sentence:\n{chunk}\nThe summary:",),
            tokens,
            seed=first_seed + number,
            objective=objective,
        )
        for number, chunk in enumerate(book.chunks(size.count, size.characters(CHUNK_TOKENS)))
    ]
    prompt: list[str | Output] = [f"{salt}\nMake one summary of these summaries:"]
    for each in maps:
        prompt += ["\n- ", Output(each.name)]
    prompt.append("\nThe summary of all:")
    last = Call(
        f"{prefix}reduce", tuple(prompt), tokens, seed=first_seed + size.count, objective=objective
    )
    return Job(f"{prefix}reduce", "map-reduce", (*maps, last), (last.name,), arrives_s)
