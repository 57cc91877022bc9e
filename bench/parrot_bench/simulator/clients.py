"""Simulated clients: applications arrive, their calls are sent and answered, and they end.

What happens where: a client sits half a round trip away from the server. A plain client (and one
with a session header) sends a call when all its inputs have come back to it; with the graph, the
server goes on by itself as soon as the inputs are ready, unless something happens at the client in
between (`pause_s`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from parrot_bench.simulator.clock import Clock
from parrot_bench.simulator.engines.prompts import uniform
from parrot_bench.simulator.engines.sequences import EngineSequence
from parrot_bench.simulator.metrics import CallTimes, Measures, group_of
from parrot_bench.simulator.options import SimulationOptions
from parrot_bench.simulator.plan import ApplicationPlan, CallPlan, Workload


@dataclass(slots=True, eq=False)
class RunningCall:
    """One call of a running application. Compared by identity."""

    run: RunningApplication
    plan: CallPlan
    round_trip_s: float
    #: Inputs that are not there yet, and when the latest of the others came.
    missing: int
    inputs_at: float = 0.0
    #: When it could be sent, and when it reached the scheduler.
    start_s: float = 0.0
    submitted_s: float = 0.0


@dataclass(slots=True, eq=False)
class RunningApplication:
    """An application that runs. Compared by identity."""

    plan: ApplicationPlan
    arrived_s: float
    #: Whether it counts in the results: it came after the warm-up.
    counted: bool
    ended_s: float
    #: Calls that have no output yet, and those that were sent and have not ended.
    unfinished: int
    live: int = 0
    #: Why it was given up.
    failed: str = ""
    ttft_s: float = 0.0
    tpot_total_s: float = 0.0
    tpot_count: int = 0
    calls: list[RunningCall] = field(default_factory=list)
    #: By call, the calls that read its output.
    consumers: list[list[int]] = field(default_factory=list)

    @classmethod
    def start(
        cls, plan: ApplicationPlan, now: float, options: SimulationOptions, *, counted: bool
    ) -> RunningApplication:
        """The application with its calls, none of them sent."""
        run = cls(plan, now, counted, ended_s=plan.arrival_s, unfinished=len(plan.calls))
        network = options.network
        for call in plan.calls:
            # The same for every policy that the workload is tried with.
            where = uniform(options.seed, plan.id, call.index) if network.varies else 0.0
            run.calls.append(RunningCall(run, call, network.round_trip_s(where), len(call.after)))
            run.consumers.append([])
            for producer in call.after:
                run.consumers[producer].append(call.index)
        return run


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
        latency = now + back_s - call.start_s
        times = CallTimes(
            prompt_tokens=sequence.prompt.tokens,
            output_tokens=tokens,
            cached_tokens=sequence.cached,
            prefilled_tokens=sequence.prefilled,
            latency_s=latency,
            ttft_s=ttft,
            tpot_s=tpot,
            normalised_s=latency / tokens if tokens else None,
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
        options: mode, network, seed, warm-up and number of applications.
        clock: the simulation's.
        server: where calls are sent; it reports their ends by `call_done` and `call_failed`.
    """

    def __init__(
        self, workload: Workload, options: SimulationOptions, clock: Clock, server: Server
    ) -> None:
        self._workload = workload
        self._options = options
        self._clock = clock
        self._server = server
        self._arrivals = iter(workload.arrivals())
        self._first_counted = self._count_warm_up()
        self._expected = 0
        self._started = 0
        #: Applications that run or are due, and those that have ended.
        self.live_runs = 0
        self.ended_runs = 0
        #: When the first application came that counts; None: none did.
        self.measured_from: float | None = None
        self.recorder = MeasureRecorder()

    def _count_warm_up(self) -> int:
        """How many applications come before those that count."""
        warm_up = self._options.warm_up
        if not warm_up:
            return 0
        count = 0
        for _ in self._workload.arrivals():
            count += 1
            if count == self._options.max_applications:
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
        return (
            self._options.max_applications is None
            or self._expected < self._options.max_applications
        )

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
        for call in RunningApplication.start(plan, now, self._options, counted=counted).calls:
            if not call.plan.after:
                call.inputs_at = now
                self._send(call)
        if is_open_loop:
            self._next_arrival()

    # Calls

    def _stays_inside(self, call: CallPlan) -> bool:
        """Whether the server starts it by itself, once its inputs are ready."""
        return self._options.mode == "graph" and not call.pause_s

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
        if self._options.mode == "graph":
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
