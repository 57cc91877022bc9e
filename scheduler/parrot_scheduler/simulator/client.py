"""Simulated clients: when a call of an application is sent, and what the server knows of it.

What happens where: a client sits half a round trip away from the server. A plain client (and one
with a session header) sends a call when all its inputs have come back to it; with the graph, the
server goes on by itself as soon as the inputs are there, unless something happens at the client in
between (`pause_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parrot_scheduler.simulator.plan import ApplicationPlan, CallPlan, ClientMode, Segment
from parrot_scheduler.simulator.prompt import Prompt, PromptMaker, stable_hash, uniform
from parrot_scheduler.task import LATENCY, BlockHash, GroupRef, Task, TaskId

#: Beginnings of prompts whose names are remembered.
MAX_BEGINNINGS = 10_000


@dataclass(frozen=True, slots=True)
class Network:
    """Round trips between clients and the server: uniform between two times, or from samples."""

    low_s: float = 0.0
    high_s: float = 0.0
    samples_s: Sequence[float] = ()

    def __post_init__(self) -> None:
        times = (self.low_s, self.high_s, *self.samples_s)
        if not all(0 <= time < float("inf") for time in times) or self.low_s > self.high_s:
            raise ValueError(
                f"network: round trips must be finite, >= 0 and low <= high, not {times[:2]}"
            )

    def round_trip_s(self, where: float) -> float:
        """The round trip at a place of [0, 1)."""
        if self.samples_s:
            return self.samples_s[int(where * len(self.samples_s))]
        return self.low_s + (self.high_s - self.low_s) * where


class Call:
    """One call of a running application. Compared by identity."""

    __slots__ = (
        "inputs_at",
        "missing",
        "plan",
        "round_trip_s",
        "run",
        "start_s",
        "submitted_s",
        "task_id",
    )

    def __init__(self, run: Run, plan: CallPlan, round_trip_s: float) -> None:
        self.run = run
        self.plan = plan
        self.round_trip_s = round_trip_s
        #: Inputs that are not there yet, and when the latest of the others came.
        self.missing = len(plan.after)
        self.inputs_at = 0.0
        #: When it could be sent, and when it reached the scheduler.
        self.start_s = 0.0
        self.submitted_s = 0.0
        self.task_id: TaskId = -1


class Run:
    """An application that runs. Compared by identity."""

    __slots__ = (
        "arrived_s",
        "calls",
        "consumers",
        "counted",
        "ended_s",
        "failed",
        "live",
        "ordinal",
        "plan",
        "tpot_count",
        "tpot_total_s",
        "ttft_s",
        "unfinished",
    )

    def __init__(
        self, plan: ApplicationPlan, ordinal: int, network: Network, seed: int, *, counted: bool
    ) -> None:
        self.plan = plan
        self.ordinal = ordinal
        self.arrived_s = plan.arrival_s
        #: Whether it counts in the results: it came after the warm-up.
        self.counted = counted
        moving = network.samples_s or network.low_s < network.high_s
        self.calls = [
            Call(
                self,
                call,
                # The same for every policy that the workload is tried with.
                network.round_trip_s(uniform(seed, plan.id, call.index) if moving else 0.0),
            )
            for call in plan.calls
        ]
        self.consumers: list[list[int]] = [[] for _ in plan.calls]
        for call in plan.calls:
            for producer in call.after:
                self.consumers[producer].append(call.index)
        self.unfinished = len(plan.calls)
        #: Calls that were sent and have not ended.
        self.live = 0
        self.failed = ""
        self.ended_s = plan.arrival_s
        self.ttft_s = 0.0
        self.tpot_total_s = 0.0
        self.tpot_count = 0


def check(plan: ApplicationPlan) -> None:
    """See that a plan makes sense.

    Raises:
        ValueError: says what of which call does not.
    """
    where = f"application {plan.id}"
    if not plan.calls:
        raise ValueError(f"{where}: it has no calls")
    if not 0 <= plan.arrival_s < float("inf"):
        raise ValueError(f"{where}: arrival_s {plan.arrival_s} is no time")
    for index, call in enumerate(plan.calls):
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


class Clients:
    """Makes tasks of calls, as much as the server of a mode can know."""

    def __init__(self, mode: ClientMode, maker: PromptMaker, *, share_tenants: bool) -> None:
        self.mode: ClientMode = mode
        self._maker = maker
        self._share_tenants = share_tenants
        self._beginnings: dict[Segment, str] = {}

    def stays_inside(self, call: CallPlan) -> bool:
        """Whether the server starts it by itself, once its inputs are there."""
        return self.mode == "graph" and not call.pause_s

    def prompt_of(self, call: Call) -> Prompt:
        """Its prompt, as caches see it."""
        salt = "" if self._share_tenants else call.run.plan.tenant
        return self._maker.make(salt, call.plan.prompt)

    def task_of(self, task_id: TaskId, call: Call, prompt: Prompt, *, hashed: bool) -> Task:
        """What the scheduler is told of it."""
        application, plan = call.run.plan, call.plan
        prefix: tuple[BlockHash, ...] = prompt.hashes() if hashed else ()
        first: Segment = plan.prompt[0]
        if self.mode != "graph":
            name = application.id
            return Task(
                id=task_id,
                model=application.model,
                tenant=application.tenant,
                application=name if self.mode == "session" else f"{name}/{plan.index}",
                prompt_tokens=prompt.tokens,
                max_tokens=plan.max_tokens,
                prefix=prefix,
                template=self._beginning(first),
                template_tokens=first.tokens,
                objective=LATENCY,
            )
        return Task(
            id=task_id,
            model=application.model,
            tenant=application.tenant,
            application=application.id,
            prompt_tokens=prompt.tokens,
            max_tokens=plan.max_tokens,
            prefix=prefix,
            template=plan.template or self._beginning(first),
            template_tokens=first.tokens,
            objective=plan.objective,
            groups=tuple(
                GroupRef(f"{application.id}/{group.id}", group.size, group.objective)
                for group in plan.groups
            ),
            successors=plan.successors,
        )

    def _beginning(self, first: Segment) -> str:
        """Without a name, how a prompt begins says what it is."""
        name = self._beginnings.get(first)
        if name is None:
            if len(self._beginnings) >= MAX_BEGINNINGS:
                self._beginnings.clear()
            name = self._beginnings[first] = f"{stable_hash(repr(first)):016x}"
        return name
