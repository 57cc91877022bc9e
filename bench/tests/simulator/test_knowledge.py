"""What is known of plain clients' calls, and what wrong knowledge costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from parrot_bench.simulator.experiments.definitions import OWN
from parrot_bench.simulator.experiments.runner import asking_for
from parrot_bench.simulator.metrics import Results
from parrot_bench.simulator.options import SimulationOptions
from parrot_bench.simulator.plan import ApplicationPlan, Knowledge
from parrot_bench.simulator.profiles import PROFILES
from parrot_bench.simulator.simulation import simulate
from parrot_bench.simulator.workloads import Changed, build

INFERRED = Knowledge(sessions=True, groups=True, lengths=True, inferred=True)
MIXED = {
    "rate": 60,
    "count": 600,
    "gap_scale": 0.125,
    "summaries": 22,
    "same_paper": "false",
    "seed": 0,
}
AGENTS = {
    "clients": 60,
    "count": 60,
    "turns_scale": 0.1,
    "spread": 10,
    "pause_max_s": 30,
    "seed": 0,
}


def run(
    workload: str,
    parameters: dict[str, str | float],
    knowledge: Knowledge | None,
    *,
    engines: int = 4,
    alike: bool = False,
) -> Results:
    """`alike`: all first calls have one template."""
    built = asking_for(build(workload, parameters), 2048)
    if alike:
        built = Changed(built, as_maps)
    engine = PROFILES["H200-8B"].with_(**OWN)
    options = SimulationOptions(engines=[engine] * engines, mode="plain", knowledge=knowledge)
    return simulate(built, options)


def as_maps(plan: ApplicationPlan) -> ApplicationPlan:
    calls = (call if call.after else replace(call, template="map") for call in plan.calls)
    return replace(plan, calls=tuple(calls))


def chats_s(results: Results) -> float:
    return results.kinds["chat"].job_s.mean


def test_inferred_groups_cost_chats_and_jobs_no_more_than_declared_ones_do() -> None:
    none = run("mixed", MIXED, Knowledge())
    inferred = run("mixed", MIXED, INFERRED)
    declared = run("mixed", MIXED, replace(INFERRED, inferred=False))
    assert chats_s(inferred) < chats_s(none)
    assert chats_s(inferred) < 1.05 * chats_s(declared)
    jobs = [each.kinds["map-reduce"].job_s.mean for each in (none, inferred)]
    assert jobs[1] < 1.2 * jobs[0], "engines fill it behind what somebody waits for"


def test_chats_that_are_taken_for_maps_are_answered_in_bounded_extra_time() -> None:
    """Most calls of their template feed a fan-in, so that each is taken for such a one."""
    none = run("mixed", MIXED, Knowledge(), alike=True)
    wrong = run("mixed", MIXED, INFERRED, alike=True)
    assert wrong.total.failed == none.total.failed == 0
    assert chats_s(wrong) < 1.25 * chats_s(none)
    assert wrong.kinds["chat"].job_s.quantile(0.99) < 1.5 * none.kinds["chat"].job_s.quantile(0.99)


@pytest.mark.parametrize(("quality", "bound"), [(0.99, 1.01), (0.5, 1.1), (0.0, 1.25)])
def test_sessions_are_worth_something_and_wrong_ones_cost_little(
    quality: float, bound: float
) -> None:
    none = run("agents", AGENTS, Knowledge(), engines=2)
    knowledge = replace(INFERRED, recall=quality, precision=quality)
    inferred = run("agents", AGENTS, knowledge, engines=2)
    assert inferred.total.failed == 0
    assert inferred.total.latency_s.mean < bound * none.total.latency_s.mean


def test_the_same_errors_for_the_same_seed() -> None:
    knowledge = replace(INFERRED, recall=0.8, precision=0.8)
    one, other = (run("agents", AGENTS, knowledge, engines=2) for _ in range(2))
    assert one.total.latency_s.mean == other.total.latency_s.mean
