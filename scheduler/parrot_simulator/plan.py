"""What simulated applications do: the contract between workloads and the simulator.

A workload yields `ApplicationPlan`s. How an application's calls reach the scheduler is the
client's business (`ClientMode`): a plain client sends a call when its inputs have come back to it
over the network, and the scheduler sees single calls; a client with semantic variables submits
all at once, and a call is ready as soon as its inputs are, with the graph known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

from parrot_scheduler.task import THROUGHPUT, GroupRef, Objective

#: `plain`: single calls, each after a round trip; nothing but its prompt is known.
#: `session`: as plain, but calls carry their application's id (a session header).
#: `graph`: submitted at once; objectives, groups, successors and templates are known.
ClientMode: TypeAlias = Literal["plain", "session", "graph"]


class Segment(NamedTuple):
    """A run of prompt tokens; equal `content` means equal tokens, cached or not."""

    #: Any id. An output of call `c` of the same application is ("output", application, c).
    content: object
    tokens: int


@dataclass(frozen=True, slots=True)
class CallPlan:
    """One call of an application."""

    #: Within the application: 0, 1, … in a topological order.
    index: int
    prompt: tuple[Segment, ...]
    #: What it really generates, and what it asks for at most.
    output_tokens: int
    max_tokens: int
    #: Calls (by index) whose end it waits for.
    after: tuple[int, ...] = ()
    #: Seconds between the end of the last of these (at the client) and its submission: a tool
    #: that runs, a person who thinks.
    pause_s: float = 0.0
    template: str = ""
    #: What is known with `graph` only; groups are named within the application.
    objective: Objective = THROUGHPUT
    groups: tuple[GroupRef, ...] = ()
    successors: int = 0


@dataclass(frozen=True, slots=True)
class ApplicationPlan:
    """One run of an application: a graph of calls."""

    id: str
    arrival_s: float
    calls: tuple[CallPlan, ...]
    tenant: str = "default"
    model: str = "model"
    #: For tables: results are reported for each kind of its own, e.g. `chat` and `map-reduce`.
    kind: str = "application"
    #: A goal for goodput: the application counts when its slowest call's first token (`ttft_s`),
    #: its mean time per output token (`tpot_s`), and its end (`job_s`) are in time.
    ttft_s: float | None = None
    tpot_s: float | None = None
    job_s: float | None = None


class Workload(Protocol):
    """Where applications come from. Deterministic for a seed; memory does not grow with length."""

    name: str

    def arrivals(self) -> Iterator[ApplicationPlan]:
        """Open loop: plans in order of arrival."""
        ...

    def successor(self, finished: ApplicationPlan, now: float) -> ApplicationPlan | None:
        """Closed loop: what the same client starts once `finished` has ended; None: nothing."""
        ...
