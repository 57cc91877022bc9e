"""All workloads, by the names of the command line, and their usual sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parrot_gateway.bench.apps import chain, chat, gpts, map_reduce, mixed, multi_agent
from parrot_gateway.bench.apps.workload import Size, Workload


@dataclass(frozen=True, slots=True)
class Recipe:
    """A workload and its usual size."""

    build: Callable[[Size, str], Workload]
    count: int
    #: On a CPU with the demo model.
    scale: float
    what: str
    #: Whether it is for several engines: policies of placement are compared by it.
    by_policy: bool = False


RECIPES = {
    "chain": Recipe(chain.build, 20, 0.25, "steps"),
    "map-reduce": Recipe(map_reduce.build, 16, 0.25, "chunks"),
    "multi-agent": Recipe(multi_agent.build, 8, 0.125, "branches"),
    "chat": Recipe(chat.build, 40, 0.25, "chats"),
    "gpts": Recipe(gpts.build, 40, 0.2, "calls", by_policy=True),
    "mixed": Recipe(mixed.build, 40, 0.25, "chats", by_policy=True),
}
