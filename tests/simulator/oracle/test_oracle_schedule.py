"""Fixed schedules: followed to the letter, recorded from policies, found by search."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from parrot_scheduler.config import PRESETS
from parrot_scheduler.task import LATENCY
from parrot_simulator.experiments.policies import POLICIES
from parrot_simulator.metrics import Figure
from parrot_simulator.options import SimulationOptions
from parrot_simulator.oracle.bounds import lower_bound
from parrot_simulator.oracle.pacing import latency_first, paced
from parrot_simulator.oracle.schedule import (
    CallKey,
    FixedWorkload,
    Placement,
    follow,
    keys_of,
    record,
)
from parrot_simulator.oracle.search import Problem, exhaustive, local_search
from parrot_simulator.oracle.starts import starts
from parrot_simulator.plan import ApplicationPlan, CallPlan, Segment, one_call
from parrot_simulator.profiles import PROFILES
from parrot_simulator.workloads import build

ENGINE = PROFILES["H200-8B"].with_(shared_attention=True)
MEAN = Figure("mean s", "job_s")


def call(
    name: str, arrival_s: float, prompt: int, output: int, shared: str = ""
) -> ApplicationPlan:
    """A call whose prompt is its own, or half of it another's too."""
    own = Segment(("own", name), prompt // 2 if shared else prompt)
    first = (Segment(shared, prompt // 2),) if shared else ()
    return one_call(name, arrival_s, (*first, own), output)


def fan_in(name: str, prompts: tuple[int, ...]) -> ApplicationPlan:
    """Some calls at once, and one that reads them all."""
    calls = [
        CallPlan(i, (Segment(("text", name, i), tokens),), 40, 40, objective=LATENCY)
        for i, tokens in enumerate(prompts)
    ]
    outputs = tuple(Segment(("output", name, i), 40) for i in range(len(prompts)))
    everything = tuple(range(len(prompts)))
    last = CallPlan(len(prompts), outputs, 40, 40, after=everything, objective=LATENCY)
    return ApplicationPlan(name, 0.0, (*calls, last))


#: Few calls, whose schedules can all be tried; what is best differs from case to case.
SMALL = {
    "sizes": [call(f"call-{i}", 0.0, size, 20) for i, size in enumerate((30_000, 20_000, 9_000))],
    "prefixes": [
        call(f"call-{i}", 0.01 * i, 24_000, 30, "one" if i % 2 else "other") for i in range(3)
    ],
    "arrivals": [call("long", 0.0, 60_000, 10), call("late", 0.3, 2_000, 200),
                 call("short", 0.0, 500, 5)],
    "fan-in": [fan_in("job", (20_000, 12_000, 9_000))],
}  # fmt: skip


def problem(plans: list[ApplicationPlan], engines: int = 2) -> Problem:
    options = SimulationOptions(engines=[ENGINE] * engines)
    return Problem(FixedWorkload("small", plans), options, (MEAN,), (1.0,))


@pytest.mark.parametrize("case", SMALL)
def test_local_search_finds_the_best_of_all_schedules(case: str) -> None:
    small = problem(SMALL[case])
    best = exhaustive(small)
    # A bad one to begin with: all on one engine, the last first.
    keys = keys_of(small.workload)
    bad = {key: Placement(0, -number) for number, key in enumerate(keys)}
    found = local_search(small, [bad], iterations=250, seed=1)
    assert found.tried == 251
    assert small.evaluate(bad)[0] > 1.001 * best.score
    # Delays, which are not among those tried one by one, may make it better still.
    assert found.score <= best.score * 1.0001
    assert small.evaluate(found.schedule)[0] == found.score
    bound = lower_bound(small.workload.plans, ENGINE, 2, MEAN.metric)
    assert 0.3 * best.score < bound <= min(best.score, found.score)


def test_what_is_too_much_to_try_is_refused() -> None:
    with pytest.raises(ValueError, match="8 calls on 4 engines have 2642411520 schedules"):
        exhaustive(problem([call(f"call-{i}", 0.0, 100, 5) for i in range(8)], engines=4))
    with pytest.raises(ValueError, match="begins with a schedule"):
        local_search(problem(SMALL["sizes"]), [], iterations=1)


def test_a_search_repeats_itself() -> None:
    small = problem(SMALL["sizes"])
    begin = list(starts(small.workload, ENGINE, 2))
    tries: list[tuple[int, float]] = []
    runs = [
        local_search(
            small, begin, iterations=30, seed=seed, progress=lambda *now: tries.append(now)
        )
        for seed in (3, 3)
    ]
    assert runs[0].schedule == runs[1].schedule
    assert tries[: len(tries) // 2] == tries[len(tries) // 2 :]
    scores = [score for _, score in tries[: len(tries) // 2]]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recorded_schedule_costs_what_its_policy_did(policy: str) -> None:
    parameters = {"count": 12, "summaries": 1, "scale": 0.5, "same_paper": "false"}
    workload = FixedWorkload("mixed", build("mixed", parameters).arrivals())
    options = SimulationOptions(engines=[ENGINE] * 3, config=PRESETS[policy])
    ran, schedule = record(workload, options)
    assert sorted(schedule) == sorted(keys_of(workload))
    again = follow(workload, options, schedule)
    for kind in ("chat", "map-reduce"):
        theirs, ours = ran.kinds[kind], again.kinds[kind]
        assert ours.job_s.mean == pytest.approx(theirs.job_s.mean, rel=1e-6)
        assert ours.latency_s.mean == pytest.approx(theirs.latency_s.mean, rel=1e-6)
    assert again.actions == {}
    assert again.total.cached_tokens == ran.total.cached_tokens


def test_a_schedule_is_followed() -> None:
    workload = FixedWorkload("two", [call("a", 0.0, 1000, 10), call("b", 0.0, 1000, 10)])
    options = SimulationOptions(engines=[ENGINE] * 2)
    a, b = CallKey("a", 0), CallKey("b", 0)
    apart = follow(workload, options, {a: Placement(0), b: Placement(1)})
    assert [use.busy_s > 0 for use in apart.engines] == [True, True]
    together = follow(workload, options, {a: Placement(1), b: Placement(1)})
    assert [use.busy_s > 0 for use in together.engines] == [False, True]
    assert together.total.job_s.mean > apart.total.job_s.mean
    late = follow(workload, options, {a: Placement(0), b: Placement(1, delay_s=2.0)})
    assert late.total.job_s.maximum == pytest.approx(apart.total.job_s.maximum + 2.0)
    assert late.total.held_s.maximum == pytest.approx(2.0)
    with pytest.raises(KeyError):
        follow(workload, options, {a: Placement(0)})


def test_starts_name_every_call_and_keep_objectives_apart() -> None:
    parameters = {"count": 8, "summaries": 2, "scale": 0.2, "same_paper": "false"}
    workload = FixedWorkload("mixed", build("mixed", parameters).arrivals())
    keys = sorted(keys_of(workload))
    found = list(starts(workload, ENGINE, 3))
    assert all(sorted(schedule) == keys for schedule in found)
    assert all(0 <= p.engine < 3 for schedule in found for p in schedule.values())
    chats = {plan.id for plan in workload.plans if plan.kind == "chat"}
    apart = found[-1]
    places = {
        is_chat: {p.engine for key, p in apart.items() if (key.application in chats) == is_chat}
        for is_chat in (True, False)
    }
    assert not places[True] & places[False]


@pytest.mark.parametrize("chosen", [True, False])
def test_paced_engines_get_one_prompt_after_the_other(chosen: bool) -> None:
    plans = [call(f"call-{i}", 0.0, 4_000, 50) for i in range(6)]
    workload = FixedWorkload("six", plans)
    options = SimulationOptions(engines=[ENGINE.with_(max_batch_tokens=16_384)] * 2)
    given = {key: Placement(0) for key in keys_of(workload)} if chosen else None
    schedule = paced(workload, options, given, 1024, latency_first)
    used = {placement.engine for placement in schedule.values()}
    assert used == ({0} if chosen else {0, 1})
    waits = sorted(placement.delay_s for placement in schedule.values())
    fill_s = 4_000 * ENGINE.step_model.prefill_token_s
    gaps = [b - a for a, b in pairwise(waits)]
    assert waits[0] == 0
    assert all(gap == 0 or gap >= fill_s for gap in gaps)
    at_once = follow(workload, options, given or {k: Placement(0) for k in schedule})
    held = follow(workload, options, schedule)
    assert held.total.ttft_s.mean < at_once.total.ttft_s.mean
    # All of a prompt fits into the limit: two share a step.
    wide = paced(workload, options, given, 8_000, latency_first)
    assert sum(placement.delay_s == 0 for placement in wide.values()) == (2 if chosen else 4)


# Bounds


def simulated(plans: list[ApplicationPlan], policy: str, engines: int) -> float:
    options = SimulationOptions(engines=[ENGINE] * engines, config=PRESETS[policy])
    results, _ = record(FixedWorkload("small", plans), options)
    return results.total.job_s.mean


@pytest.mark.parametrize(
    "plan",
    [call("short", 0.0, 64, 1), call("chat", 0.0, 500, 200), call("long", 0.0, 50_000, 3)],
    ids=lambda plan: plan.id,
)
def test_the_bound_of_a_call_alone_is_what_it_takes(plan: ApplicationPlan) -> None:
    bound = lower_bound([plan], ENGINE, 1, "job_s")
    assert bound == pytest.approx(simulated([plan], "lmetric", 1), rel=0.03)
    assert bound <= simulated([plan], "lmetric", 1) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["gpts", "mixed", "agents", "multi-agent", "mapreduce-fleet"])
def test_no_policy_is_below_the_bound(name: str) -> None:
    parameters: dict[str, str | float] = {
        "gpts": {"count": 24, "rate": 200.0},
        "mixed": {"count": 20, "rate": 100.0, "gap_scale": 0.01, "summaries": 1},
        "agents": {"clients": 5, "count": 5, "turns_scale": 0.05, "spread": 1, "pause_max_s": 3},
        "multi-agent": {"branches": 2, "count": 2, "rate": 1.0},
        "mapreduce-fleet": {"count": 102, "rate": 30.0},
    }[name]
    workload = FixedWorkload(name, build(name, {**parameters, "seed": 1}).arrivals())
    for engine in (ENGINE, ENGINE.with_(prefix_caching=False, shared_attention=False)):
        options = SimulationOptions(engines=[engine] * 2)
        bound = lower_bound(workload.plans, engine, 2, "job_s")
        for policy in POLICIES:
            results, _ = record(workload, replace(options, config=PRESETS[policy]))
            assert bound <= results.total.job_s.mean
        assert bound > 0


def test_bounds_of_other_means() -> None:
    plans = [call("a", 0.0, 4_000, 10), call("b", 0.0, 8_000, 100)]
    results, _ = record(FixedWorkload("two", plans), SimulationOptions(engines=[ENGINE]))
    for metric in ("ms_per_token", "call_s"):
        figure = Figure("mean", metric)
        bound = lower_bound(plans, ENGINE, 1, figure.metric)
        assert 0.4 * figure.of(results) < bound <= figure.of(results)
    chain = one_call("chain", 0.0, (Segment("own", 500),), 10)
    (first,) = chain.calls
    following = replace(first, index=1, after=(0,), pause_s=5.0)
    chain = replace(chain, calls=(first, following))
    results, _ = record(FixedWorkload("chain", [chain]), SimulationOptions(engines=[ENGINE]))
    bound = lower_bound([chain], ENGINE, 1, "call_s")
    # Nothing else is there: it takes what it has to, and the last partial block once more.
    assert bound == pytest.approx(results.total.latency_s.mean, rel=0.02)
    with pytest.raises(ValueError, match="ms_per_token has no bound"):
        lower_bound([chain], ENGINE, 1, "ms_per_token")
    with pytest.raises(ValueError, match="call_s has a bound for chains only"):
        lower_bound([fan_in("job", (100, 200))], ENGINE, 1, "call_s")
    with pytest.raises(ValueError, match="no application is of kind 'chat'"):
        lower_bound([chain], ENGINE, 1, "job_s", "chat")
