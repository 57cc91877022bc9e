"""What the order is for: simulated backlogs that another order serves worse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from parrot_bench.simulator.metrics import Results
from parrot_bench.simulator.options import SimulationOptions
from parrot_bench.simulator.plan import ApplicationPlan, CallPlan, Segment, Workload
from parrot_bench.simulator.profiles import PROFILES, EngineProfile
from parrot_bench.simulator.simulation import simulate
from parrot_bench.simulator.workloads.tenants import Backlog
from parrot_scheduler.config import PRESETS
from parrot_scheduler.task import THROUGHPUT, Objective

#: Room for four calls of 1,000 + 100 tokens.
ENGINE = PROFILES["H200-8B"].with_(capacity_tokens=4_800)


def job(
    name: str,
    at: float,
    *,
    tenant: str = "t",
    kind: str = "job",
    objective: Objective = THROUGHPUT,
    goal_s: float | None = None,
) -> ApplicationPlan:
    call = CallPlan(0, (Segment(name, 1000),), 100, 100, template=kind, objective=objective)
    return ApplicationPlan(name, at, (call,), tenant, kind=kind, job_s=goal_s)


@dataclass
class Listed:
    """Plans as they are given."""

    plans: list[ApplicationPlan]
    name: str = "listed"

    def successor(self, finished: ApplicationPlan, now: float) -> ApplicationPlan | None:
        return None

    def arrivals(self) -> Iterator[ApplicationPlan]:
        return iter(self.plans)


def run(
    workload: Workload, order: str, admission: str = "working-set", engine: EngineProfile = ENGINE
) -> Results:
    config = replace(PRESETS["parrot"], order=order, admission=admission)
    return simulate(workload, SimulationOptions(engines=[engine], config=config))


def test_a_tenant_with_little_work_does_not_wait_for_all_of_anothers() -> None:
    """Held and queued: ten jobs beside a hundred that came just before."""
    plans = [job(f"many-{i}", 0.0, tenant="many", kind="many") for i in range(100)]
    plans += [job(f"few-{i}", 0.01, tenant="few", kind="few") for i in range(10)]
    for admission in ("working-set", "open"):
        fair = run(Listed(plans), "fair", admission)
        fcfs = run(Listed(plans), "fcfs", admission)
        assert fair.kinds["few"].job_s.mean < 0.3 * fcfs.kinds["few"].job_s.mean
        # The others lose no more than the time that those ten take: a tenth of all, twice the mean.
        assert fair.kinds["many"].job_s.mean < 1.25 * fcfs.kinds["many"].job_s.mean


def test_short_applications_go_before_long_ones_of_the_same_tenant() -> None:
    larger = ENGINE.with_(capacity_tokens=40_000)
    workload = Backlog(count=250)
    fair, fcfs = (run(workload, order, engine=larger) for order in ("fair", "fcfs"))
    assert fair.kinds["short"].job_s.mean < 0.8 * fcfs.kinds["short"].job_s.mean
    assert fair.total.job_s.mean < 0.95 * fcfs.total.job_s.mean


def test_what_has_a_deadline_is_in_time() -> None:
    """Behind a backlog of one tenant's work without any."""
    plans = [job(f"batch-{i}", 0.0) for i in range(60)]
    soon = Objective("deadline", 4.0)
    plans += [job(f"soon-{i}", 0.5, kind="soon", objective=soon, goal_s=4.0) for i in range(6)]
    fair, fcfs = (run(Listed(plans), order, "open") for order in ("fair", "fcfs"))
    assert fair.kinds["soon"].good == 6
    assert fcfs.kinds["soon"].good == 0
