"""The scheduler, clients and engines together on the virtual clock."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_bench.simulator.metrics import Results, Sketch, Timeline, jain
from parrot_bench.simulator.options import EngineChange, Network, SimulationOptions, Staleness
from parrot_bench.simulator.plan import ApplicationPlan, CallPlan, ClientMode, Segment
from parrot_bench.simulator.profiles import PROFILES, EngineProfile
from parrot_bench.simulator.simulation import simulate
from parrot_scheduler.actions import Action, Place
from parrot_scheduler.config import PRESETS, SchedulerConfig
from parrot_scheduler.events import EngineReport, Event, TaskFinished, TaskSubmitted
from parrot_scheduler.task import LATENCY, THROUGHPUT, GroupRef, StepModel

MODEL = StepModel(
    weights_s=2.0**-8, context_token_s=2.0**-26, prefill_token_s=2.0**-16, overhead_s=2.0**-10
)
ENGINE = EngineProfile(
    name="test", step_model=MODEL, capacity_tokens=16_384, max_batch=64, max_batch_tokens=2048
)
FCFS = PRESETS["least-loaded"]


class Listed:
    """A workload of given plans; each is followed by `rounds` more of its kind."""

    name = "listed"

    def __init__(self, plans: Sequence[ApplicationPlan], rounds: int = 0) -> None:
        self.plans = plans
        self.rounds = rounds

    def arrivals(self) -> Iterator[ApplicationPlan]:
        return iter(sorted(self.plans, key=lambda plan: plan.arrival_s))

    def successor(self, finished: ApplicationPlan, now: float) -> ApplicationPlan | None:
        name, _, number = finished.id.partition("#")
        done = int(number or 0)
        if done >= self.rounds:
            return None
        return ApplicationPlan(f"{name}#{done + 1}", now, finished.calls, finished.tenant)


class Recorded:
    """Keeps every step of the scheduler."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, list[Event], list[Action]]] = []

    def record(self, now: float, events: Sequence[Event], actions: Sequence[Action]) -> None:
        self.steps.append((now, list(events), list(actions)))

    def all(self, kind: type) -> list:  # type: ignore[type-arg]
        return [
            item for _, events, actions in self.steps for item in (*events, *actions)
            if isinstance(item, kind)
        ]  # fmt: skip


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
    decode = sum(ENGINE.step_s(context_tokens=prompt + g) for g in range(1, output))
    return ENGINE.step_s(prefill_tokens=prompt) + decode


def run(workload: Listed, mode: ClientMode = "graph", **more: object) -> Results:
    more.setdefault("engines", [ENGINE])
    more.setdefault("config", FCFS)
    return simulate(workload, SimulationOptions(mode=mode, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "pause_s", "trips", "pauses"),
    [("plain", 0.0, 5, 0), ("session", 0.0, 5, 0), ("graph", 0.0, 1, 0), ("graph", 2.0, 5, 4)],
)
def test_round_trips(mode: ClientMode, pause_s: float, trips: int, pauses: int) -> None:
    """A plain client pays the network for each call; the graph once, or for each pause."""
    results = run(Listed([chain("a", 1.0, 5, pause_s)]), mode, network=Network(0.25, 0.25))
    expected = 5 * alone_s(256, 16) + trips * 0.25 + pauses * pause_s
    assert results.total.job_s.mean == pytest.approx(expected, abs=1e-9)
    assert results.total.calls == 5
    half = 0.125 if trips == 1 else 0.25
    first = ENGINE.step_s(prefill_tokens=256)
    # With the graph the inner calls' first tokens stay inside.
    assert results.total.ttft_s.maximum == pytest.approx(first + half, abs=1e-9)


def test_network_is_the_same_for_every_policy() -> None:
    network = Network(0.1, 0.9)
    plans = [chain(f"a{i}", i * 100.0, 3) for i in range(5)]
    jobs = [
        sorted(
            value
            for value, _ in run(
                Listed(plans), "plain", network=network, config=PRESETS[name]
            ).total.job_s.cdf()
        )
        for name in ("round-robin", "least-loaded")
    ]
    assert jobs[0] == jobs[1]
    assert len(set(jobs[0])) == 5


def test_samples_of_the_network() -> None:
    assert [Network(samples_s=(1.0, 2.0)).round_trip_s(x) for x in (0, 0.49, 0.5, 0.99)] == [
        1.0,
        1.0,
        2.0,
        2.0,
    ]
    with pytest.raises(ValueError, match="network"):
        Network(2.0, 1.0)


def test_what_the_scheduler_knows() -> None:
    calls = (
        call(0, [("system", 64)], 4, template="map", objective=THROUGHPUT, successors=1,
             groups=(GroupRef("g", 1),)),
        call(1, [("other", 64)], 4, after=(0,), objective=LATENCY),
    )  # fmt: skip
    tasks = {}
    for mode in ("plain", "session", "graph"):
        log = Recorded()
        run(Listed([ApplicationPlan("a", 0.0, calls)]), mode, log=log)  # type: ignore[arg-type]
        tasks[mode] = [event.task for event in log.all(TaskSubmitted)]
    assert len({task.application for task in tasks["plain"]}) == 2
    assert {task.application for task in tasks["session"]} == {"a"}
    assert tasks["plain"][0].groups == tasks["session"][0].groups == ()
    assert tasks["graph"][0].groups == (GroupRef("a/g", 1),)
    assert tasks["graph"][0].successors == 1
    assert tasks["graph"][0].template == "map"
    # The prompt itself is known in all modes.
    assert len({tuple(task.prefix for task in tasks[mode]) for mode in tasks}) == 1


def test_closed_loop() -> None:
    results = run(Listed([chain("a", 0.0, 2), chain("b", 0.5, 2)], rounds=3))
    assert results.total.applications == 8
    assert results.total.calls == 16
    assert run(Listed([chain("a", 0.0, 2)], rounds=99), max_applications=4).total.applications == 4


def test_warm_up_does_not_count() -> None:
    plans = [chain(f"a{i}", float(i), 1) for i in range(10)]
    results = run(Listed(plans), warm_up=0.3)
    assert results.total.applications == 7
    assert results.measured_s == pytest.approx(results.duration_s - 3.0)
    assert run(Listed(plans), warm_up=0.5, max_applications=4).total.applications == 2
    with pytest.raises(ValueError, match="warm_up"):
        run(Listed(plans), warm_up=1.0)


def test_goodput_counts_goals() -> None:
    def plan(name: str, job_s: float | None) -> ApplicationPlan:
        calls = (call(0, [(name, 64)], 100),)
        return ApplicationPlan(name, 0.0, calls, job_s=job_s, kind=name)

    results = run(Listed([plan("fast", 1e-3), plan("slow", 60.0), plan("free", None)]))
    assert (results.total.good, results.total.with_goal) == (1, 2)
    assert results.kinds["slow"].good == 1
    assert results.good_share == 0.5
    assert results.goodput == pytest.approx(1 / results.measured_s)


def test_late_news() -> None:
    """What the scheduler is told late it does not know before."""
    plans = [
        ApplicationPlan(f"a{i}", i * 1.0, (call(0, [("system", 1024), (i, 16)], 2),))
        for i in range(4)
    ]
    expected = {}
    for blocks_s in (0.0, 100.0):
        log = Recorded()
        run(Listed(plans), log=log, staleness=Staleness(blocks_s=blocks_s))
        places = [place.reasons.expected_cached_tokens for place in log.all(Place)]
        expected[blocks_s] = places
        assert [e.cached_tokens for e in log.all(TaskFinished)][1:] == [1024] * 3
    assert expected[0.0][1:] == [1024] * 3
    assert expected[100.0] == [0] * 4


def test_reports_come_at_their_interval() -> None:
    plans = [ApplicationPlan(f"a{i}", i / 10, (call(0, [(i, 16)], 2),)) for i in range(100)]
    log = Recorded()
    run(Listed(plans), log=log, staleness=Staleness(report_interval_s=1.0))
    assert 9 <= len(log.all(EngineReport)) <= 11


def test_an_engine_that_leaves_loses_nothing() -> None:
    plans = [chain(f"a{i}", 0.0, 3) for i in range(12)]
    changes = [EngineChange(0.05, 0, "leave"), EngineChange(0.2, 0, "join")]
    log = Recorded()
    results = run(Listed(plans), engines=[ENGINE] * 2, changes=changes, log=log)
    assert results.total.applications == 12
    assert results.failures == {}
    assert results.total.calls == 36
    # Some were placed twice.
    assert len(log.all(Place)) > 36
    assert len(results.engines) == 3


def test_without_any_engine_calls_are_refused() -> None:
    results = run(Listed([chain("a", 0.0, 3)]), engines=[])
    assert results.failures == {"no_engine": 1}
    assert results.total.failed == 1


def test_too_large_for_every_engine() -> None:
    plans = [ApplicationPlan("a", 0.0, (call(0, [("x", 20_000)], 5),)), chain("b", 0.0, 1)]
    results = run(Listed(plans))
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
        run(Listed([ApplicationPlan("bad", 0.0, calls)]))


def test_blocks_of_one_size() -> None:
    with pytest.raises(ValueError, match="one size"):
        run(Listed([]), engines=[ENGINE, ENGINE.with_(block_tokens=32)])


def test_tenants_share_only_when_they_are_let() -> None:
    plans = [
        ApplicationPlan(name, at, (call(0, [("system", 1024), (name, 4)], 2),), tenant=name)
        for at, name in ((0.0, "t1"), (9.0, "t2"))
    ]
    assert run(Listed(plans)).total.cached_tokens == 0
    assert run(Listed(plans), share_tenants=True).total.cached_tokens == 1024


PROGRAM = """
import hashlib, json, sys
from parrot_scheduler.config import PRESETS
from parrot_bench.simulator.profiles import PROFILES
from parrot_bench.simulator.options import Network, SimulationOptions
from parrot_bench.simulator.simulation import simulate
from parrot_bench.simulator.workloads import build

class Log:
    def __init__(self):
        self.digest = hashlib.sha256()
    def record(self, now, events, actions):
        self.digest.update(repr((now, events, actions)).encode())

log = Log()
options = SimulationOptions(
    engines=[PROFILES["H200-8B"]] * 3, config=PRESETS[sys.argv[1]], network=Network(0.1, 0.3),
    max_applications=60, log=log)
results = simulate(build("gpts"), options)
print(log.digest.hexdigest(), json.dumps(results.to_dict(), sort_keys=True))
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
    digest, _, results = outputs[0].partition(" ")
    assert len(digest) == 64
    assert json.loads(results)["total"]["applications"] == 60


@st.composite
def applications(draw: st.DrawFn, index: int) -> ApplicationPlan:
    name = f"app{index}"
    calls = []
    for i in range(draw(st.integers(1, 5))):
        after = tuple(sorted(draw(st.sets(st.integers(0, i - 1))))) if i else ()
        prompt = [
            (draw(st.sampled_from("abc")), draw(st.sampled_from([8, 64, 300]))),
            *((("output", name, producer), calls[producer].output_tokens) for producer in after),
        ]
        prompt = [segment for segment in prompt if segment[1]]
        calls.append(
            call(i, prompt, draw(st.integers(0, 30)), max_tokens=draw(st.integers(30, 60)),
                 after=after, pause_s=draw(st.sampled_from([0.0, 0.0, 0.5])),
                 template=draw(st.sampled_from(["", "t"])),
                 objective=draw(st.sampled_from([LATENCY, THROUGHPUT])),
                 groups=(GroupRef("g", 2),) if draw(st.booleans()) else ())
        )  # fmt: skip
    return ApplicationPlan(
        name, draw(st.floats(0, 3)), tuple(calls), tenant=draw(st.sampled_from("xy"))
    )


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    count=st.integers(1, 8),
    mode=st.sampled_from(["plain", "session", "graph"]),
    preset=st.sampled_from(sorted(PRESETS)),
    capacity=st.sampled_from([1024, 4096]),
    num_engines=st.integers(1, 3),
    caching=st.booleans(),
    stale=st.sampled_from([0.0, 0.3]),
    leaves=st.booleans(),
)
def test_every_call_ends_once(
    data: st.DataObject,
    count: int,
    mode: ClientMode,
    preset: str,
    capacity: int,
    num_engines: int,
    caching: bool,
    stale: float,
    leaves: bool,
) -> None:
    plans = [data.draw(applications(i)) for i in range(count)]
    log = Recorded()
    changes = [EngineChange(0.3, 0, "leave"), EngineChange(1.0, 0, "join")] if leaves else []
    options = SimulationOptions(
        engines=[
            ENGINE.with_(
                capacity_tokens=capacity, max_batch=4, max_batch_tokens=256, prefix_caching=caching
            )
        ]
        * num_engines,
        config=PRESETS[preset],
        mode=mode,
        network=Network(0.0, 0.2),
        staleness=Staleness(blocks_s=stale, progress_s=stale),
        changes=changes,
        log=log,
    )
    results = simulate(Listed(plans), options)
    total = results.total
    assert total.applications == count
    assert total.failed == sum(results.failures.values())
    finished = [event.task_id for event in log.all(TaskFinished)]
    assert len(finished) == len(set(finished))
    if not total.failed:
        assert total.calls == sum(len(plan.calls) for plan in plans)
        assert len(finished) == total.calls
        assert total.output_tokens == sum(c.output_tokens for plan in plans for c in plan.calls)
        assert total.prompt_tokens == sum(
            segment.tokens for plan in plans for c in plan.calls for segment in c.prompt
        )


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=3000))
@settings(max_examples=30, deadline=None)
def test_sketch_is_close(values: list[float]) -> None:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    ordered = sorted(values)
    assert sketch.mean == pytest.approx(math.fsum(values) / len(values), rel=1e-9)
    for q in (0.0, 0.5, 0.9, 0.99, 1.0):
        exact = ordered[max(1, math.ceil(q * len(values) - 1e-9)) - 1]
        assert sketch.quantile(q) == pytest.approx(exact, rel=0.0051, abs=1e-9)
    shares = [share for _, share in sketch.cdf()]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)


def test_a_large_sketch_is_close_and_small() -> None:
    sketch = Sketch()
    for i in range(1, 100_001):
        sketch.add(i / 1000)
    assert sketch.quantile(0.5) == pytest.approx(50, rel=0.0051)
    assert sketch.quantile(0.99) == pytest.approx(99, rel=0.0051)
    assert len(sketch.cdf()) < 1500


def test_jain() -> None:
    assert jain([3, 3, 3]) == pytest.approx(1.0)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)
    assert jain([]) == 1.0


def test_course_keeps_its_sums_as_it_widens() -> None:
    timeline = Timeline(bins=8, width_s=0.5)
    for i in range(100):
        timeline.add(float(i), i + 0.75, 4, 100, 12)
    assert len(timeline.batch) == 8
    assert sum(timeline.batch) == pytest.approx(100 * 0.75 * 4)
    assert sum(timeline.kv) == pytest.approx(100 * 0.75 * 100)
    assert sum(timeline.filled) == pytest.approx(1200)


def test_profiles_say_where_their_numbers_are_from() -> None:
    for name, profile in PROFILES.items():
        assert profile.name == name
        assert len(profile.source) > 50


def test_sums_of_tokens_are_kept() -> None:
    """Tokens filled and found by calls are what engines filled and found."""
    plans = [chain(f"a{i}", i * 0.01, 4) for i in range(20)]
    results = run(Listed(plans), engines=[ENGINE] * 2, config=SchedulerConfig())
    assert sum(e.prefilled_tokens for e in results.engines) == results.total.prefilled_tokens
    assert sum(e.generated_tokens for e in results.engines) == results.total.output_tokens
    assert results.total.prefilled_tokens + results.total.cached_tokens == (
        results.total.prompt_tokens
    )
