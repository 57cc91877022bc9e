"""Simulated clients: applications arrive, their calls are submitted and answered, and they end.

The server knows the graph: it starts a call as soon as its inputs are ready, unless something
happens at the client in between (`pause_s`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from parrot_bench.simulator.clock import Clock
from parrot_bench.simulator.engines.sequences import EngineSequence
from parrot_bench.simulator.metrics import Measures
from parrot_bench.simulator.plan import ApplicationPlan, CallPlan


@dataclass(slots=True, eq=False)
class RunningCall:
    """One call of a running application. Compared by identity."""

    run: RunningApplication
    plan: CallPlan
    #: Inputs that are not there yet.
    missing: int
    #: When it could be sent.
    start_s: float = 0.0


@dataclass(slots=True, eq=False)
class RunningApplication:
    """An application that runs. Compared by identity."""

    plan: ApplicationPlan
    arrived_s: float
    #: Calls that have no output yet, and those that were sent and have not ended.
    unfinished: int
    live: int = 0
    #: Why it was given up.
    failed: str = ""
    ended_s: float = 0.0
    calls: list[RunningCall] = field(default_factory=list)
    #: By call, the calls that read its output.
    consumers: list[list[int]] = field(default_factory=list)


class Server(Protocol):
    def submit(self, call: RunningCall) -> None: ...

    def forget_application(self, application: str) -> None:
        """No more calls of an application will come."""
        ...


class Clients:
    """The clients of one simulation.

    Args:
        plans: what arrives, in that order.
        clock: the simulation's.
        server: where calls are sent; it reports their ends by `call_done` and `call_failed`.
    """

    def __init__(self, plans: Iterable[ApplicationPlan], clock: Clock, server: Server) -> None:
        self._arrivals = iter(plans)
        self._clock = clock
        self._server = server
        #: Applications that run or are due.
        self.live_runs = 0
        self.kinds: dict[str, Measures] = {}
        #: Applications by the code of their first failure.
        self.failures: Counter[str] = Counter()

    # Applications

    def expect_next(self) -> None:
        """Let the next application arrive at its time."""
        plan = next(self._arrivals, None)
        if plan is not None:
            self.live_runs += 1
            self._clock.at(plan.arrival_s, self._application_arrives, plan)

    def _application_arrives(self, plan: ApplicationPlan, _: object) -> None:
        plan.check()
        run = RunningApplication(plan, self._clock.now, unfinished=len(plan.calls))
        for call in plan.calls:
            run.calls.append(RunningCall(run, call, len(call.after)))
            run.consumers.append([])
            for producer in call.after:
                run.consumers[producer].append(call.index)
        for running in run.calls:
            if not running.plan.after:
                self._send(running)
        self.expect_next()

    # Calls

    def _send(self, call: RunningCall) -> None:
        call.run.live += 1
        call.start_s = self._clock.now + call.plan.pause_s
        self._clock.at(call.start_s, self._reach_server, call)

    def _reach_server(self, call: RunningCall, _: object = None) -> None:
        if call.run.failed:
            self._call_ended(call)
        else:
            self._server.submit(call)

    def call_done(self, call: RunningCall, sequence: EngineSequence) -> None:
        """The server has all of a call's output."""
        run = call.run
        run.unfinished -= 1
        consumers = [run.calls[index] for index in run.consumers[call.plan.index]]
        inside = [consumer for consumer in consumers if not consumer.plan.pause_s]
        self._count_call(call, sequence)
        for consumer in inside:
            self._input(consumer)
        if len(inside) < len(consumers) or not consumers:
            self._clock.at(self._clock.now, self._answer_arrives, call)
        else:
            self._call_ended(call)

    def call_failed(self, call: RunningCall, code: str) -> None:
        """A call will have no output: its application is given up."""
        if not call.run.failed:
            call.run.failed = code
            self.failures[code] += 1
        self._call_ended(call)

    def _answer_arrives(self, call: RunningCall, _: object) -> None:
        """A call's output is at its client: what waits for it there goes on."""
        for index in call.run.consumers[call.plan.index]:
            consumer = call.run.calls[index]
            if consumer.plan.pause_s:
                self._input(consumer)
        call.run.ended_s = self._clock.now
        self._call_ended(call)

    def _input(self, consumer: RunningCall) -> None:
        consumer.missing -= 1
        if consumer.missing or consumer.run.failed:
            return
        if consumer.plan.pause_s:
            self._send(consumer)
        else:
            consumer.run.live += 1
            consumer.start_s = self._clock.now
            self._reach_server(consumer)

    def _call_ended(self, call: RunningCall) -> None:
        run = call.run
        run.live -= 1
        if run.live or (run.unfinished and not run.failed):
            return
        self._server.forget_application(run.plan.id)
        measures = self._measures_of(run)
        measures.applications += 1
        if run.failed:
            measures.failed += 1
        else:
            measures.values["job_s"].append(run.ended_s - run.arrived_s)
        self.live_runs -= 1
        # Each call refers to its run: without this only the garbage collector would free them.
        run.calls = []

    # Measures

    def _measures_of(self, run: RunningApplication) -> Measures:
        return self.kinds.setdefault(run.plan.kind, Measures())

    def _count_call(self, call: RunningCall, sequence: EngineSequence) -> None:
        now, tokens = self._clock.now, sequence.generated
        first = sequence.first_token_at if tokens else now
        latency_s = now - call.start_s
        measures = self._measures_of(call.run)
        measures.calls += 1
        measures.prompt_tokens += sequence.prompt.tokens
        measures.cached_tokens += sequence.cached
        measures.prefilled_tokens += sequence.prefilled
        measures.output_tokens += tokens
        values = measures.values
        values["call_s"].append(latency_s)
        values["ttft_s"].append(first - call.start_s)
        if tokens:
            values["ms_per_token"].append(1000 * latency_s / tokens)
