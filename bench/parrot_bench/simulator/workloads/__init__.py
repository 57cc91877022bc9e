"""Workloads by name: the experiments of the Parrot paper, and some that it lacks.

A workload is a dataclass whose fields are its parameters (rate, count, seed, scale, …); lengths
are tokens, times seconds. `build` makes one from names and values, as a command line has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from parrot_bench.simulator.workloads.agents import Agents
from parrot_bench.simulator.workloads.base import Changed, Generator, WorkloadError
from parrot_bench.simulator.workloads.chats import Calibration, Copilot, Gpts, Mixed
from parrot_bench.simulator.workloads.multi_agent import MultiAgent
from parrot_bench.simulator.workloads.summaries import (
    ChainBackground,
    ChainClients,
    ChainSummary,
    MapReduce,
    MapReduceFleet,
)
from parrot_bench.simulator.workloads.tenants import Backlog, HotPrefix, Sessions, Tenants

__all__ = ["WORKLOADS", "Changed", "Generator", "WorkloadError", "build"]

#: Every generator by its name; figure numbers are the paper's.
WORKLOADS: Mapping[str, type[Generator]] = {
    "calibration": Calibration,  # figure 10
    "chain": ChainSummary,  # 11
    "chain-background": ChainBackground,  # 12a
    "chain-clients": ChainClients,  # 12b
    "map-reduce": MapReduce,  # 13
    "copilot": Copilot,  # 14, 15
    "gpts": Gpts,  # 16
    "multi-agent": MultiAgent,  # 17
    "mixed": Mixed,  # 18
    "agents": Agents,
    "tenants": Tenants,
    "sessions": Sessions,
    "backlog": Backlog,
    "hot-prefix": HotPrefix,
    "mapreduce-fleet": MapReduceFleet,
}


def build(name: str, parameters: Mapping[str, str | float] | None = None) -> Generator:
    """A workload with some of its parameters set; text is read as the parameter's own type.

    Raises:
        WorkloadError: no such workload or parameter, or a value that makes no sense for it.
    """
    kind = WORKLOADS.get(name)
    if kind is None:
        raise WorkloadError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    known = {field.name: str(field.type) for field in fields(kind) if field.init}
    del known["name"]
    values: dict[str, Any] = {}
    for parameter, value in (parameters or {}).items():
        if parameter not in known:
            raise WorkloadError(
                f"workload {name} has no parameter {parameter!r}; it has {', '.join(known)}"
            )
        values[parameter] = _read(f"workload {name}: {parameter}", known[parameter], value)
    return kind(**values)


def _read(what: str, kind: str, value: str | float) -> str | float:
    """`value` converted to the annotation `kind`."""
    try:
        if kind == "bool":
            words = {"true": True, "1": True, "false": False, "0": False}
            return words[str(value).lower()]
        if kind.startswith("int"):
            number = float(value)
            if number != int(number):
                raise ValueError
            return int(number)
        return float(value) if kind == "float" else str(value)
    except (ValueError, KeyError, OverflowError):
        raise WorkloadError(f"{what} cannot be {value!r}; it is of type {kind}") from None
