"""Plans of simulated applications: the contract between workloads and the simulator.

A workload is an iterator of `ApplicationPlan`s, in order of arrival. A client submits all calls of
an application at once, with their graph; a call is ready as soon as its inputs are.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from parrot_scheduler.task import THROUGHPUT, GroupRef, Objective


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
    #: Seconds between the end of the last of these and its submission: a tool that runs, a person
    #: who thinks.
    pause_s: float = 0.0
    template: str = ""
    objective: Objective = THROUGHPUT
    #: Named within the application.
    groups: tuple[GroupRef, ...] = ()
    #: Calls on the longest chain that waits for this one.
    successors: int = 0


@dataclass(frozen=True, slots=True)
class ApplicationPlan:
    """One run of an application: a graph of calls."""

    id: str
    arrival_s: float
    calls: tuple[CallPlan, ...]
    tenant: str = "default"
    #: Results are reported for each kind of its own, e.g. `chat` and `map-reduce`.
    kind: str = "application"

    def check(self) -> None:
        """Refuse a plan that makes no sense.

        Raises:
            ValueError: names the call and the field.
        """
        where = f"application {self.id}"
        if not self.calls:
            raise ValueError(f"{where}: it has no calls")
        for index, call in enumerate(self.calls):
            if call.index != index:
                raise ValueError(f"{where}: call {index} has index {call.index}")
            if any(not 0 <= producer < index for producer in call.after):
                raise ValueError(f"{where}, call {index}: `after` must name earlier calls")
            if not 0 <= call.output_tokens <= call.max_tokens:
                raise ValueError(f"{where}, call {index}: output_tokens must be 0 to max_tokens")
            if not call.prompt or any(segment.tokens < 1 for segment in call.prompt):
                raise ValueError(f"{where}, call {index}: its prompt must have tokens")
