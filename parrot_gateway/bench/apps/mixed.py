"""Chats beside map-reduce jobs on several engines (Parrot, OSDI '24, figure 18).

As `chat`, but all the summaries are of one document, as the paper's were: what one job has filled,
another can find again, if its calls come to the same engine. Chats share nothing.
"""

from __future__ import annotations

from dataclasses import replace

from parrot_gateway.bench.apps import chat, map_reduce
from parrot_gateway.bench.apps.workload import Size, Workload

#: More than a job has calls: the same call of two jobs differs in its seed.
_SEEDS = 1000


def build(size: Size, salt: str) -> Workload:
    """The workload with `size.count` chats; prompts begin with `salt`."""
    jobs = chat.chats(size, salt)
    for number, arrives_s in enumerate(chat.summary_times(size)):
        jobs.append(
            map_reduce.job(
                replace(size, count=chat.CHUNKS),
                salt,
                prefix=f"job_{number}_",
                arrives_s=arrives_s,
                objective="throughput",
                first_seed=number * _SEEDS,
            )
        )
    return Workload("mixed", tuple(jobs), ("parallel",), per_token=("chat",))
