"""Simulated clients: applications arrive, their calls are sent and answered, and they end.

What happens where: a client sits half a round trip away from the server. A plain client (and one
with a session header) sends a call when all its inputs have come back to it; with the graph, the
server goes on by itself as soon as the inputs are there, unless something happens at the client in
between (`pause_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from parrot_simulator.clock import Clock
from parrot_simulator.engines.prompts import uniform
from parrot_simulator.engines.sequences import EngineSequence
from parrot_simulator.metrics import CallTimes, Measures, group_of
from parrot_simulator.plan import ApplicationPlan, CallPlan, ClientMode, Workload


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

    @property
    def varies(self) -> bool:
        return bool(self.samples_s) or self.low_s < self.high_s

    def round_trip_s(self, where: float) -> float:
        """The round trip at a place of [0, 1)."""
        if self.samples_s:
            return self.samples_s[int(where * len(self.samples_s))]
        return self.low_s + (self.high_s - self.low_s) * where


class RunningCall:
    """One call of a running application. Compared by identity."""

    __slots__ = ("inputs_at", "missing", "plan", "round_trip_s", "run", "start_s", "submitted_s")

    def __init__(self, run: RunningApplication, plan: CallPlan, round_trip_s: float) -> None:
        self.run = run
        self.plan = plan
        self.round_trip_s = round_trip_s
        #: Inputs that are not there yet, and when the latest of the others came.
        self.missing = len(plan.after)
        self.inputs_at = 0.0
        #: When it could be sent, and when it reached the scheduler.
        self.start_s = 0.0
        self.submitted_s = 0.0


class RunningApplication:
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
            RunningCall(
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


class MeasureRecorder:
    """Measures of the applications that count, by kind and by tenant, and why others failed."""

    def __init__(self) -> None:
        self.kinds: dict[str, Measures] = {}
        self.tenants: dict[str, Measures] = {}
        #: Applications by the code of their first failure, those of the warm-up included.
        self.failures: dict[str, int] = {}

    def add_call(
        self, call: RunningCall, sequence: EngineSequence, now: float, back_s: float
    ) -> None:
        """A call has all of its output, which is at its client `back_s` later."""
        run = call.run
        tokens = sequence.generated
        first = sequence.first_token_at if tokens else now
        ttft = first + back_s - call.start_s
        tpot = (now - first) / (tokens - 1) if tokens > 1 else None
        run.ttft_s = max(run.ttft_s, ttft)
        if tpot is not None:
            run.tpot_total_s += tpot
            run.tpot_count += 1
        if not run.counted:
            return
        times = CallTimes(
            prompt_tokens=sequence.prompt.tokens,
            output_tokens=tokens,
            cached_tokens=sequence.cached,
            prefilled_tokens=sequence.prefilled,
            latency_s=now + back_s - call.start_s,
            ttft_s=ttft,
            tpot_s=tpot,
            held_s=sequence.submitted_at - call.submitted_s,
            queued_s=sequence.admitted_at - sequence.submitted_at,
        )
        for measures in self._measures_of(run):
            measures.add_call(times)

    def add_application(self, run: RunningApplication) -> None:
        if not run.counted:
            return
        tpot = run.tpot_total_s / run.tpot_count if run.tpot_count else 0.0
        job_s = run.ended_s - run.arrived_s
        for measures in self._measures_of(run):
            measures.add_application(run.plan, job_s, run.ttft_s, tpot, failed=bool(run.failed))

    def add_failure(self, code: str) -> None:
        self.failures[code] = self.failures.get(code, 0) + 1

    def total(self) -> Measures:
        total = Measures()
        for measures in self.kinds.values():
            total.merge(measures)
        return total

    def _measures_of(self, run: RunningApplication) -> tuple[Measures, Measures]:
        plan = run.plan
        return group_of(self.kinds, plan.kind), group_of(self.tenants, plan.tenant)


class Server(Protocol):
    def submit(self, call: RunningCall) -> None: ...

    def forget_application(self, application: str) -> None:
        """No more calls of an application will come."""
        ...


class Clients:
    """The clients of one simulation.

    Args:
        workload: what arrives.
        mode: how much the server knows of applications.
        clock: the simulation's.
        server: where calls are sent; it tells how they end, by `call_done` and `call_failed`.
        network: round trips of calls.
        seed: of the network's draws.
        warm_up: share of the applications, by order of arrival, that do not count.
        max_applications: stop taking in applications after so many.

    Raises:
        ValueError: the warm-up is no share.
    """

    def __init__(
        self,
        workload: Workload,
        mode: ClientMode,
        clock: Clock,
        server: Server,
        *,
        network: Network,
        seed: int,
        warm_up: float,
        max_applications: int | None,
    ) -> None:
        if not 0 <= warm_up < 1:
            raise ValueError(f"warm_up must be a share from 0 to below 1, not {warm_up}")
        self._workload = workload
        self._mode: ClientMode = mode
        self._clock = clock
        self._server = server
        self._network = network
        self._seed = seed
        self._max_applications = max_applications
        self._arrivals = iter(workload.arrivals())
        self._first_counted = self._count_warm_up(warm_up)
        self._expected = 0
        self._started = 0
        #: Applications that run or are due, and those that have ended.
        self.live_runs = 0
        self.ended_runs = 0
        #: When the first application came that counts; None: none did.
        self.measured_from: float | None = None
        self.recorder = MeasureRecorder()

    def _count_warm_up(self, warm_up: float) -> int:
        """How many applications come before those that count."""
        if not warm_up:
            return 0
        count = 0
        for _ in self._workload.arrivals():
            count += 1
            if count == self._max_applications:
                break
        return int(count * warm_up)

    # Applications

    def begin(self) -> None:
        self._next_arrival()

    def _next_arrival(self) -> None:
        if self._may_expect():
            plan = next(self._arrivals, None)
            if plan is not None:
                self._expect(plan, plan.arrival_s, is_open_loop=True)

    def _may_expect(self) -> bool:
        return self._max_applications is None or self._expected < self._max_applications

    def _expect(self, plan: ApplicationPlan, time: float, *, is_open_loop: bool) -> None:
        self._expected += 1
        self.live_runs += 1
        self._clock.at(time, self._application_arrives, plan, is_open_loop)

    def _application_arrives(self, plan: ApplicationPlan, is_open_loop: bool) -> None:
        plan.check()
        now = self._clock.now
        counted = self._started >= self._first_counted
        self._started += 1
        if counted and self.measured_from is None:
            self.measured_from = now
        for call in RunningApplication(plan, now, self._network, self._seed, counted=counted).calls:
            if not call.plan.after:
                call.inputs_at = now
                self._send(call)
        if is_open_loop:
            self._next_arrival()

    # Calls

    def _stays_inside(self, call: CallPlan) -> bool:
        """Whether the server starts it by itself, once its inputs are there."""
        return self._mode == "graph" and not call.pause_s

    def _send(self, call: RunningCall) -> None:
        call.run.live += 1
        call.start_s = call.inputs_at + call.plan.pause_s
        self._clock.at(call.start_s + call.round_trip_s / 2, self.reach_server, call)

    def reach_server(self, call: RunningCall, _: object = None) -> None:
        """A call that was sent (or is begun anew there) is at the server."""
        if call.run.failed:
            self._call_ended(call)
        else:
            self._server.submit(call)

    def call_done(self, call: RunningCall, sequence: EngineSequence) -> None:
        """The server has all of a call's output."""
        now = self._clock.now
        run = call.run
        run.unfinished -= 1
        consumers = [run.calls[index] for index in run.consumers[call.plan.index]]
        inside = [c for c in consumers if self._stays_inside(c.plan)]
        goes_back = len(inside) < len(consumers) or not consumers
        back_s = call.round_trip_s / 2 if goes_back else 0.0
        self.recorder.add_call(call, sequence, now, back_s)
        for consumer in inside:
            self._input(consumer)
        if goes_back:
            self._clock.at(now + back_s, self._answer_arrives, call)
        else:
            self._call_ended(call)

    def call_failed(self, call: RunningCall, code: str) -> None:
        """A call will have no output: its application is given up."""
        run = call.run
        if not run.failed:
            run.failed = code
            self.recorder.add_failure(code)
        self._call_ended(call)

    def _answer_arrives(self, call: RunningCall, _: object) -> None:
        """A call's output is at its client: what waits for it there goes on."""
        for index in call.run.consumers[call.plan.index]:
            consumer = call.run.calls[index]
            if not self._stays_inside(consumer.plan):
                self._input(consumer)
        call.run.ended_s = max(call.run.ended_s, self._clock.now)
        self._call_ended(call)

    def _input(self, consumer: RunningCall) -> None:
        consumer.missing -= 1
        consumer.inputs_at = self._clock.now
        if consumer.missing or consumer.run.failed:
            return
        if self._stays_inside(consumer.plan):
            consumer.run.live += 1
            consumer.start_s = self._clock.now
            self.reach_server(consumer)
        else:
            self._send(consumer)

    def _call_ended(self, call: RunningCall) -> None:
        run = call.run
        run.live -= 1
        if run.live or (run.unfinished and not run.failed):
            return
        plan = run.plan
        if self._mode == "graph":
            self._server.forget_application(plan.id)
        self.recorder.add_application(run)
        self.live_runs -= 1
        self.ended_runs += 1
        # Each call refers to its run: without this only the garbage collector would free them.
        run.calls = []
        if self._may_expect():
            now = self._clock.now
            successor = self._workload.successor(plan, now)
            if successor is not None:
                self._expect(successor, max(now, successor.arrival_s), is_open_loop=False)
