"""The scheduler, clients and engines together on the virtual clock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_bench.policies import PRESETS
from parrot_bench.simulator.metrics import Measures, Results
from parrot_bench.simulator.plan import ApplicationPlan, CallPlan, Segment
from parrot_bench.simulator.profiles import PROFILES
from parrot_bench.simulator.simulation import simulate
from parrot_scheduler.actions import Action
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.events import EngineReport, Event, TaskFinished, TaskSubmitted
from parrot_scheduler.task import LATENCY, THROUGHPUT, GroupRef
from simulated import profile, step

ENGINE = profile()


class Recorded:
    """Keeps every step of the scheduler."""

    def __init__(self) -> None:
        self.items: list[Event | Action] = []

    def __call__(self, now: float, events: Sequence[Event], actions: Sequence[Action]) -> None:
        self.items += [*events, *actions]

    def all(self, kind: type) -> list:  # type: ignore[type-arg]
        return [item for item in self.items if isinstance(item, kind)]


def call(index: int, prompt: Sequence[tuple[object, int]], output: int, **more: object) -> CallPlan:
    segments = tuple(Segment(*segment) for segment in prompt)
    more.setdefault("max_tokens", output)
    return CallPlan(index, segments, output, **more)  # type: ignore[arg-type]


def chain(name: str, at: float, length: int, pause_s: float = 0.0) -> ApplicationPlan:
    calls = [call(0, [((name, 0), 256)], 16)]
    for i in range(1, length):
        prompt = [((name, i), 240), (("output", name, i - 1), 16)]
        calls.append(call(i, prompt, 16, after=(i - 1,), pause_s=pause_s))
    return ApplicationPlan(name, at, tuple(calls))


def alone_s(prompt: int, output: int) -> float:
    return step(prompt, 0) + sum(step(0, prompt + g) for g in range(1, output))


def run(plans: Sequence[ApplicationPlan], **more: object) -> Results:
    more.setdefault("config", PRESETS["least-loaded"])
    return simulate(plans, more.pop("profile", ENGINE), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("pause_s", [0.0, 2.0])
def test_a_chain_takes_its_calls_and_its_pauses(pause_s: float) -> None:
    results = run([chain("a", 1.0, 5, pause_s)])
    assert results.total.mean("job_s") == pytest.approx(5 * alone_s(256, 16) + 4 * pause_s)
    assert results.total.calls == 5
    # A call's own times begin when its pause is over.
    assert results.total.quantile("ttft_s", 1.0) == pytest.approx(step(256, 0))
    assert results.total.mean("call_s") == pytest.approx(alone_s(256, 16))
    assert results.total.mean("ms_per_token") == pytest.approx(1000 * alone_s(256, 16) / 16)


def test_what_the_scheduler_knows() -> None:
    calls = (
        call(0, [("system", 64)], 4, template="map", objective=THROUGHPUT, successors=1,
             groups=(GroupRef("g", 1),)),
        call(1, [("other", 64)], 4, after=(0,), objective=LATENCY),
    )  # fmt: skip
    log = Recorded()
    run([ApplicationPlan("a", 0.0, calls)], observe=log)
    first, second = (event.task for event in log.all(TaskSubmitted))
    assert first.application == second.application == "a"
    assert (first.groups, first.successors) == ((GroupRef("a/g", 1),), 1)
    assert (first.template, first.template_tokens) == ("map", 64)
    assert (first.objective, second.objective) == (THROUGHPUT, LATENCY)
    assert len(first.prefix) == 4


def test_reports_come_at_their_interval() -> None:
    plans = [ApplicationPlan(f"a{i}", i / 10, (call(0, [(i, 16)], 2),)) for i in range(100)]
    log = Recorded()
    run(plans, observe=log)
    assert 9 <= len(log.all(EngineReport)) <= 11


def test_without_any_engine_calls_are_refused() -> None:
    results = run([chain("a", 0.0, 3)], engines=0)
    assert results.failures == {"no_engine": 1}
    assert results.total.failed == 1


def test_too_large_for_every_engine() -> None:
    large = ApplicationPlan("a", 0.0, (call(0, [("x", 20_000)], 5),))
    results = run([large, chain("b", 0.0, 1)])
    assert sum(results.failures.values()) == 1
    assert results.total.applications - results.total.failed == 1


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ((), "no calls"),
        ((call(1, [("a", 1)], 1),), "index 1"),
        ((call(0, [("a", 1)], 1, after=(0,)),), "earlier"),
        ((call(0, [("a", 0)], 1),), "prompt"),
        ((call(0, [("a", 1)], 2, max_tokens=1),), "max_tokens"),
    ],
)
def test_senseless_plans(calls: tuple[CallPlan, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run([ApplicationPlan("bad", 0.0, calls)])


def test_tenants_share_no_prefixes() -> None:
    plans = [
        ApplicationPlan(name, at, (call(0, [("system", 1024), (name, 4)], 2),), tenant=tenant)
        for at, name, tenant in ((0.0, "a", "t1"), (9.0, "b", "t2"), (18.0, "c", "t2"))
    ]
    assert run(plans).total.cached_tokens == 1024


PROGRAM = """
import hashlib, sys
from parrot_bench.policies import PRESETS
from parrot_bench.simulator.profiles import PROFILES
from parrot_bench.simulator.simulation import simulate
from parrot_bench.simulator.workloads import gpts

digest = hashlib.sha256()
results = simulate(
    gpts(8.0, 60, scale=1.0, seed=0), PROFILES["H200-8B"], engines=3, config=PRESETS[sys.argv[1]],
    observe=lambda *step: digest.update(repr(step).encode()))
print(digest.hexdigest(), results.total.applications, results)
"""


@pytest.mark.parametrize("policy", ["least-loaded", "parrot"])
def test_same_seed_same_run_in_every_process(policy: str) -> None:
    outputs = []
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, policy],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert outputs[0].split()[1] == "60"


@st.composite
def applications(draw: st.DrawFn, index: int) -> ApplicationPlan:
    calls: list[CallPlan] = []
    for i in range(draw(st.integers(1, 5))):
        after = tuple(sorted(draw(st.sets(st.integers(0, i - 1))))) if i else ()
        prompt = [
            (draw(st.sampled_from("abc")), draw(st.sampled_from([8, 64, 300]))),
            *(
                (("output", f"app{index}", producer), calls[producer].output_tokens)
                for producer in after
                if calls[producer].output_tokens
            ),
        ]
        calls.append(
            call(i, prompt, draw(st.integers(0, 30)), max_tokens=draw(st.integers(30, 60)),
                 after=after, pause_s=draw(st.sampled_from([0.0, 0.0, 0.5])),
                 objective=draw(st.sampled_from([LATENCY, THROUGHPUT])),
                 groups=(GroupRef("g", 2),) if draw(st.booleans()) else ())
        )  # fmt: skip
    tenant = draw(st.sampled_from("xy"))
    return ApplicationPlan(f"app{index}", draw(st.floats(0, 3)), tuple(calls), tenant=tenant)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    count=st.integers(1, 8),
    preset=st.sampled_from(sorted(PRESETS)),
    capacity=st.sampled_from([1024, 4096]),
    engines=st.integers(1, 3),
)
def test_every_call_ends_once(
    data: st.DataObject, count: int, preset: str, capacity: int, engines: int
) -> None:
    drawn = [data.draw(applications(i)) for i in range(count)]
    plans = sorted(drawn, key=lambda plan: plan.arrival_s)
    log = Recorded()
    small = ENGINE.with_(capacity_tokens=capacity, max_batch=4, max_batch_tokens=256)
    results = run(plans, profile=small, engines=engines, config=PRESETS[preset], observe=log)
    total = results.total
    assert total.applications == count
    assert total.failed == sum(results.failures.values())
    finished = [event.task_id for event in log.all(TaskFinished)]
    assert len(finished) == len(set(finished))
    if not total.failed:
        assert total.calls == len(finished) == sum(len(plan.calls) for plan in plans)
        assert total.output_tokens == sum(c.output_tokens for plan in plans for c in plan.calls)


def test_measures_of_kinds_add_up() -> None:
    one, other = Measures(applications=1, values={"job_s": [3.0, 1.0]}), Measures(applications=2)  # type: ignore[arg-type]
    other.values["job_s"] += [2.0, 4.0]
    other.add(one)
    assert other.applications == 3
    assert [other.quantile("job_s", q) for q in (0.0, 0.5, 0.75, 0.99)] == [1.0, 2.0, 3.0, 4.0]
    assert other.mean("job_s") == 2.5
    assert str(other.mean("call_s")) == str(other.quantile("call_s", 0.5)) == "nan"


def test_sums_of_tokens_are_kept() -> None:
    """Tokens filled and found by calls are what engines filled and found."""
    plans = [chain(f"a{i}", i * 0.01, 4) for i in range(20)]
    results = run(plans, engines=2, config=SchedulerConfig())
    uses, total = results.engines.values(), results.total
    assert sum(use.prefilled_tokens for use in uses) == total.prefilled_tokens
    assert sum(use.generated_tokens for use in uses) == total.output_tokens
    assert total.prefilled_tokens + total.cached_tokens == total.prompt_tokens


def test_profiles_say_where_their_numbers_are_from() -> None:
    for name, each in PROFILES.items():
        assert each.name == name
        assert len(each.source) > 50
