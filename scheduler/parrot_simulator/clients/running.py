"""Applications that run, and their calls: what a plan has come to so far."""

from __future__ import annotations

from parrot_simulator.clients.network import Network
from parrot_simulator.engines.prompt import uniform
from parrot_simulator.plan import ApplicationPlan, CallPlan


class Call:
    """One call of a running application. Compared by identity."""

    __slots__ = ("inputs_at", "missing", "plan", "round_trip_s", "run", "start_s", "submitted_s")

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
        "plan",
        "tpot_count",
        "tpot_total_s",
        "ttft_s",
        "unfinished",
    )

    def __init__(
        self, plan: ApplicationPlan, arrived_s: float, network: Network, seed: int, *, counted: bool
    ) -> None:
        self.plan = plan
        self.arrived_s = arrived_s
        #: Whether it counts in the results: it came after the warm-up.
        self.counted = counted
        self.calls = [
            Call(
                self,
                call,
                # The same for every policy that the workload is tried with.
                network.round_trip_s(uniform(seed, plan.id, call.index) if network.varies else 0.0),
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
        #: Why it was given up.
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
