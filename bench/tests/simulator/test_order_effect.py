"""The order pays: simulated backlogs that another order serves worse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from parrot_bench.policies import PRESETS
from parrot_bench.simulator.metrics import Results
from parrot_bench.simulator.plan import ApplicationPlan, CallPlan, Segment
from parrot_bench.simulator.profiles import PROFILES
from parrot_bench.simulator.simulation import simulate
from parrot_scheduler.task import THROUGHPUT, Objective


def job(
    name: str, at: float, *, tenant: str = "t", kind: str = "job", objective: Objective = THROUGHPUT
) -> ApplicationPlan:
    call = CallPlan(0, (Segment(name, 1000),), 100, 100, template=kind, objective=objective)
    return ApplicationPlan(name, at, (call,), tenant, kind)


def backlog(count: int) -> Iterator[ApplicationPlan]:
    """Chains of 16 calls, one in four, and of two, of one tenant: more than an engine takes."""
    random, now = Random(0), 0.0
    for number in range(count):
        kind, length = ("long", 16) if random.random() < 0.25 else ("short", 2)
        now += random.expovariate(8.0)
        calls = [
            CallPlan(
                index,
                (Segment((number, index), 1000),),
                200,
                200,
                after=(index - 1,) if index else (),
                template=kind,
                successors=length - 1 - index,
            )
            for index in range(length)
        ]
        yield ApplicationPlan(f"job-{number}", now, tuple(calls), kind=kind)


def run(
    plans: Sequence[ApplicationPlan], order: str, admission: str = "working-set", room: int = 4_800
) -> Results:
    """One engine; by default with room for four calls of 1,000 + 100 tokens."""
    config = replace(PRESETS["parrot"], order=order, admission=admission)
    return simulate(plans, PROFILES["H200-8B"].with_(capacity_tokens=room), config=config)


def test_a_tenant_with_little_work_does_not_wait_for_all_of_anothers() -> None:
    """Held and queued: ten jobs beside a hundred that came just before."""
    plans = [job(f"many-{i}", 0.0, tenant="many", kind="many") for i in range(100)]
    plans += [job(f"few-{i}", 0.01, tenant="few", kind="few") for i in range(10)]
    for admission in ("working-set", "open"):
        fair, fcfs = (run(plans, order, admission).kinds for order in ("fair", "fcfs"))
        assert fair["few"].mean("job_s") < 0.3 * fcfs["few"].mean("job_s")
        # The others lose no more than the time that those ten take: a tenth of all, twice the mean.
        assert fair["many"].mean("job_s") < 1.25 * fcfs["many"].mean("job_s")


def test_short_applications_go_before_long_ones_of_the_same_tenant() -> None:
    plans = list(backlog(250))
    fair, fcfs = (run(plans, order, room=40_000) for order in ("fair", "fcfs"))
    assert fair.kinds["short"].mean("job_s") < 0.8 * fcfs.kinds["short"].mean("job_s")
    assert fair.total.mean("job_s") < 0.95 * fcfs.total.mean("job_s")


def test_what_has_a_deadline_is_in_time() -> None:
    """Behind a backlog of one tenant's work without any."""
    plans = [job(f"batch-{i}", 0.0) for i in range(60)]
    soon = Objective("deadline", 4.0)
    plans += [job(f"soon-{i}", 0.5, kind="soon", objective=soon) for i in range(6)]
    fair, fcfs = (run(plans, order, "open").kinds["soon"] for order in ("fair", "fcfs"))
    assert fair.quantile("job_s", 1.0) <= 4.0
    assert fcfs.quantile("job_s", 0.0) > 4.0
