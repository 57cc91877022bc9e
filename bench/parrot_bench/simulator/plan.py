"""What simulated applications do: the contract between workloads and the simulator.

A workload yields `ApplicationPlan`s. How an application's calls reach the scheduler is the
client's business (`ClientMode`): a plain client sends a call when its inputs have come back to it
over the network, and the scheduler sees single calls; a client with semantic variables submits
all at once, and a call is ready as soon as its inputs are, with the graph known.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from parrot_scheduler.task import LATENCY, THROUGHPUT, GroupRef, Objective

#: `plain`: single calls, each after a round trip; nothing but its prompt is known.
#: `session`: as plain, but calls carry their application's id (a session header).
#: `graph`: submitted at once; objectives, groups, successors and templates are known.
ClientMode: TypeAlias = Literal["plain", "session", "graph"]


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Pieces of what a server can know of plain clients' calls, and how they are known.

    Without any it takes calls whose prompts begin with the same blocks for calls of one kind.
    """

    #: The applications that calls belong to.
    sessions: bool = False
    #: Objectives, and the task groups of calls that one reads together.
    groups: bool = False
    #: Templates, for predictions of output lengths.
    lengths: bool = False
    #: How much of a prompt any applications share, where that is inferred.
    prefixes: bool = True
    #: Calls on the longest chain that waits for a call; cannot be inferred.
    successors: bool = False
    #: From the texts of calls, with errors; otherwise declared.
    inferred: bool = False
    #: Of inferred links: the share of links that are found, and of found ones that are right.
    recall: float = 0.99
    precision: float = 0.99


class Segment(NamedTuple):
    """A run of prompt tokens; equal `content` means equal tokens, cached or not."""

    #: Any id. An output of call `c` of the same application is ("output", application, c).
    content: Hashable
    tokens: int


@dataclass(slots=True, unsafe_hash=True)
class CallPlan:
    """One call of an application; not to be changed, see `parrot_scheduler.events`."""

    #: Within the application: 0, 1, … in a topological order.
    index: int
    prompt: tuple[Segment, ...]
    #: Tokens that it generates, and its `max_tokens`.
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

    def check(self) -> None:
        """See that it makes sense.

        Raises:
            ValueError: names the call and the field.
        """
        where = f"application {self.id}"
        if not self.calls:
            raise ValueError(f"{where}: it has no calls")
        if not 0 <= self.arrival_s < float("inf"):
            raise ValueError(f"{where}: arrival_s {self.arrival_s} is no time")
        for index, call in enumerate(self.calls):
            if call.index != index:
                raise ValueError(f"{where}: call {index} has index {call.index}")
            if any(not 0 <= producer < index for producer in call.after):
                raise ValueError(f"{where}, call {index}: `after` must name earlier calls")
            if len(set(call.after)) < len(call.after):
                raise ValueError(f"{where}, call {index}: `after` names a call twice")
            if not 0 <= call.output_tokens <= call.max_tokens:
                raise ValueError(f"{where}, call {index}: output_tokens must be 0 to max_tokens")
            if not call.prompt or any(segment.tokens < 1 for segment in call.prompt):
                raise ValueError(f"{where}, call {index}: its prompt must have tokens")
            if not 0 <= call.pause_s < float("inf"):
                raise ValueError(f"{where}, call {index}: pause_s {call.pause_s} is no time")


def one_call(
    name: str,
    arrival_s: float,
    prompt: tuple[Segment, ...],
    output_tokens: int,
    *,
    template: str = "",
    **more: Any,
) -> ApplicationPlan:
    """An application of a single call that somebody waits for; `more`: fields of the plan."""
    call = CallPlan(
        index=0,
        prompt=prompt,
        output_tokens=output_tokens,
        max_tokens=output_tokens,
        template=template,
        objective=LATENCY,
    )
    return ApplicationPlan(id=name, arrival_s=arrival_s, calls=(call,), **more)


class Workload(Protocol):
    """Where applications come from. Deterministic for a seed; memory does not grow with length."""

    name: str

    def arrivals(self) -> Iterator[ApplicationPlan]:
        """Open loop: plans in order of arrival."""
        ...

    def successor(self, finished: ApplicationPlan, now: float) -> ApplicationPlan | None:
        """Closed loop: what the same client starts once `finished` has ended; None: nothing."""
        ...
