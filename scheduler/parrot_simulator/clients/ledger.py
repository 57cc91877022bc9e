"""What a simulation writes down of its calls and applications, for `Results`."""

from __future__ import annotations

from parrot_simulator.clients.running import Call, Run
from parrot_simulator.engines.sequence import Sequence
from parrot_simulator.metrics import CallTimes, Measures, group_of


class Ledger:
    """Measures of the applications that count, by kind and by tenant, and why others failed."""

    def __init__(self) -> None:
        self.kinds: dict[str, Measures] = {}
        self.tenants: dict[str, Measures] = {}
        #: Applications by the code of their first failure, those of the warm-up included.
        self.failures: dict[str, int] = {}

    def add_call(self, call: Call, sequence: Sequence, now: float, back_s: float) -> None:
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

    def add_application(self, run: Run) -> None:
        """An application has ended, with success or without."""
        if not run.counted:
            return
        tpot = run.tpot_total_s / run.tpot_count if run.tpot_count else 0.0
        job_s = run.ended_s - run.arrived_s
        for measures in self._measures_of(run):
            measures.add_application(run.plan, job_s, run.ttft_s, tpot, failed=bool(run.failed))

    def add_failure(self, code: str) -> None:
        """An application is given up."""
        self.failures[code] = self.failures.get(code, 0) + 1

    def total(self) -> Measures:
        """All kinds together."""
        total = Measures()
        for measures in self.kinds.values():
            total.merge(measures)
        return total

    def _measures_of(self, run: Run) -> tuple[Measures, Measures]:
        plan = run.plan
        return group_of(self.kinds, plan.kind), group_of(self.tenants, plan.tenant)
