"""The comparison of arms: by policy and by linking, and what its figures say."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import msgspec
import pytest
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess, run_cli
from parrot_bench.applications.description import Application, Call, Output
from parrot_bench.apps import arms, command, comparison
from parrot_bench.apps.measure import in_round
from parrot_bench.apps.recipes import BY_WAY, MANY
from parrot_bench.apps.runner import GatewayClient, JobResult, RunResult, run_workload
from parrot_bench.apps.workload import NAMED, SEMANTIC, Size, Workload
from parrot_bench.servers import BenchmarkError

SALT = "Copy 000000000001."


def build(app: str, count: int, scale: float = 0.1) -> Workload:
    return MANY[app].build(Size(count, scale), SALT)


def test_applications_that_run_by_themselves_have_recipes() -> None:
    for compared, names in command.DEFAULTS.items():
        assert set(names) <= set(BY_WAY if compared is command.Compared.WAYS else MANY)


def test_each_arm_takes_each_place_equally_often() -> None:
    for names in (["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"]):
        rounds = [in_round(names, number) for number in range(2 * len(names))]
        for place in zip(*rounds, strict=True):
            assert sorted(place) == sorted(names * 2)


def test_no_two_rounds_have_the_same_salt() -> None:
    """Caches still hold what the load and the delay before have filled."""
    of = list(product((1, 2.5), (0.0, 250.0), (0, 1), (0, 1)))
    salts = [comparison.salt_of("agents", *each) for each in of]
    assert len(set(salts)) == len(of)
    assert {len(salt) for salt in salts} == {len(SALT)}


def test_a_common_beginning_counts_once() -> None:
    calls = (
        Call("a", ("x" * 640,), 10, seed=0),
        Call("b", ("x" * 640,), 20, seed=1),
        Call("c", ("y" * 640, Output("a")), 10, seed=2),
    )
    workload = Workload("w", (Application("w", "w", calls, ("b", "c")),))
    distinct, longest = comparison.distinct_tokens(workload, 1.0)
    assert distinct == 640 + 10 + 20 + 640 + 10 + 10
    assert longest == 640 + 10 + 10


def test_arms_differ_by_linking_alone() -> None:
    off, linking, declared = comparison.linking_arms("multi-agent", ())
    assert (off.way, linking.way, declared.way) == ("parallel", "parallel", SEMANTIC)
    assert not off.settings["linking"]["enabled"]
    assert linking.settings["linking"]["enabled"]
    assert not declared.settings["linking"]["enabled"]
    names = [arm.name for arm in comparison.linking_arms("sessions", ())]
    assert names == ["off", "linking", "declared", "lmetric", "prefix-linear"]
    *_, last = comparison.linking_arms("sessions", ("round-robin",))
    assert (last.policy, last.settings) == ("round-robin", off.settings)


def a_run(workload: Workload, seconds: float) -> RunResult:
    return RunResult(tuple(JobResult(job, seconds, ("x",)) for job in workload.jobs), 1)


def a_round(prefilled: int) -> arms.Work:
    return arms.Work(prefilled + 100, 100, 40, 0, 1.0, 50)


def outcomes_of(app: str, *rounds: tuple[float, float]) -> list[comparison.ArmOutcome]:
    """Outcomes of two arms, each with the same time for all applications of a round."""
    workload = build(app, 4)
    return [
        comparison.outcome(
            name, workload, [(a_run(workload, s), a_round(tokens)) for s in seconds], 2
        )
        for name, tokens, seconds in zip(
            ("first", "other"), (300, 100), zip(*rounds, strict=True), strict=True
        )
    ]


def test_ratios_are_of_the_first_arm_round_by_round() -> None:
    first, other = outcomes_of("gpts", (3.0, 1.0), (2.0, 2.0))
    faster, fewer = comparison.ratios([first, other])
    assert (faster.arm, faster.figure) == ("other", "gpts")
    assert (faster.least, faster.of_all, faster.largest) == pytest.approx((1.0, 5 / 3, 3.0))
    assert faster.is_noise
    assert (fewer.figure, fewer.least, fewer.of_all, fewer.largest) == ("computed", 3.0, 3.0, 3.0)
    assert not fewer.is_noise
    (times,) = first.times
    assert times.unit == "ms/token"
    assert times.jobs == 8
    assert times.least_mean == pytest.approx(times.largest_mean * 2 / 3)
    assert times.mean == pytest.approx((times.least_mean + times.largest_mean) / 2)
    assert (first.computed, first.hit_rate) == (300, 0.25)


def test_rounds_on_both_sides_of_one_are_noise() -> None:
    near, _ = comparison.ratios(outcomes_of("map-reduce", (2.0, 1.99), (2.0, 2.01)))
    clear, _ = comparison.ratios(outcomes_of("map-reduce", (3.0, 2.0), (3.1, 2.0)))
    assert near.is_noise
    assert not clear.is_noise


def test_kinds_are_compared_one_by_one() -> None:
    found = comparison.ratios(outcomes_of("mixed", (2.0, 3.0)))
    assert [each.figure for each in found] == ["chat", "map-reduce", "computed"]


def test_texts_that_differ_are_named_with_the_place() -> None:
    workload = build("gpts", 4)
    job = workload.jobs[0]

    def run(text: str) -> RunResult:
        return RunResult((JobResult(job, 1.0, (text,)),), 1)

    assert comparison.differing({"a": [run("abc")], "b": [run("abc")]}) == []
    found = comparison.differing({"a": [run("x"), run("abcd")], "b": [run("x"), run("abXd")]})
    assert found == [f"{job.calls[0].name}, round 2: b from character 2 of 4 on"]


async def test_agents_run_with_a_session_and_without(demo: GatewayProcess) -> None:
    async with GatewayClient(demo.base_url, DEMO_MODEL, API_KEY) as client:
        workload = build("agents", 2, 0.005)
        plain = await run_workload(client, workload, "parallel", "")
        named = await run_workload(client, workload, NAMED, "bench-agents", own_sessions=True)
    assert [job.texts for job in plain.jobs] == [job.texts for job in named.jobs]
    assert plain.requests == named.requests == len(workload.calls)
    for done, job in zip(plain.jobs, workload.jobs, strict=True):
        assert done.seconds > job.pauses_s > 0


def test_the_command_compares_ways(tmp_path: Path) -> None:
    path = tmp_path / "ways.json"
    run = run_cli(
        *("bench", "apps", "--app", "chain", "--count", "3", "--scale", "0.04"),
        *("--network-delay", "0", "--network-delay", "50", "--rounds", "1", "--json", str(path)),
        environment={"COLUMNS": "80"},
    )
    assert run.returncode == 0, run.stderr
    for word in ("one by one", "semantic variables", "network 50 ms", "the same in all arms"):
        assert word in run.stdout
    near, far = msgspec.json.decode(path.read_bytes())["apps"]
    assert (near["delay_ms"], far["delay_ms"]) == (0, 50)
    (ratio, _) = far["ratios"]
    first, semantic = (arm["times"][0]["mean"] for arm in far["arms"])
    assert ratio["of_all"] == pytest.approx(first / semantic)
    # Three round trips one after the other, and one.
    assert first > 0.15
    assert semantic > 0.05


def test_the_command_compares_linking(tmp_path: Path) -> None:
    path = tmp_path / "gain.json"
    run = run_cli(
        *("bench", "apps", "--compare", "linking", "--app", "mixed"),
        *("--count", "2", "--scale", "0.01", "--engines", "1", "--rounds", "1"),
        *("--kv-share", "0.5", "--json", str(path)),
        environment={"COLUMNS": "80"},
        deadline_s=200.0,
    )
    assert run.returncode == 0, run.stderr
    for word in ("chat ms/token", "map-reduce s", "linking", "declared", "computed"):
        assert word in run.stdout
    assert "…" not in run.stdout, "a table that is cut"
    content = msgspec.json.decode(path.read_bytes())
    assert content["machine"]["cores"] >= 1
    (app,) = content["apps"]
    assert app["same_texts"]
    assert [arm["arm"] for arm in app["arms"]] == ["off", "linking", "declared"]
    for arm in app["arms"]:
        (work,) = arm["work"]
        assert work["generated_tokens"] == app["tokens"]
        assert {times["kind"] for times in arm["times"]} == {"chat", "map-reduce"}
    assert app["linking"]["off"]["sent"] == 0
    # Two runs, a request and an answer of each call.
    assert app["linking"]["linking"]["sent"] >= 4 * app["calls"]


def test_the_command_compares_policies(tmp_path: Path) -> None:
    path = tmp_path / "policies.json"
    run = run_cli(
        *(
            "bench",
            "apps",
            "--compare",
            "policies",
            "--app",
            "gpts",
            "--engines",
            "2",
            "--count",
            "4",
            "--scale",
            "0.02",
        ),
        *("--policy", "parrot", "--policy", "round-robin", "--rounds", "1", "--json", str(path)),
        *("--load", "8", "--load", "9", "--seed", "1", "--seed", "2", "--set", "num_blocks=512"),
        environment={"COLUMNS": "80"},
    )
    assert run.returncode == 0, run.stderr
    assert "round-robin" in run.stdout
    assert "…" not in run.stdout, "a table that is cut"
    app, faster = msgspec.json.decode(path.read_bytes())["apps"]
    assert (app["load"], faster["load"], app["seeds"]) == (8, 9, [1, 2])
    assert app["same_texts"]
    assert faster["same_texts"]
    assert {each["arm"] for each in app["ratios"]} == {"round-robin"}
    assert [each["arm"] for each in app["arms"]] == ["parrot", "round-robin"]
    for each in app["arms"]:
        for work in each["work"]:
            assert work["generated_tokens"] == app["tokens"]
            assert work["filled_tokens"] > work["cached_tokens"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--app", "chain"), "sessions"),
        (("--policy", "best"), "best"),
        (("--kv-share", "0"), "--kv-share"),
    ],
)
def test_what_a_comparison_of_linking_refuses(arguments: tuple[str, ...], why: str) -> None:
    run = run_cli("bench", "apps", "--compare", "linking", *arguments)
    assert run.returncode == 2
    assert why in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--policy", "best"), "best"),
        (("--app", "chains"), "map-reduce"),
        (("--compare", "policies", "--app", "poker"), "poker"),
        (("--compare", "policies", "--load", "0"), "--load"),
        (("--compare", "policies", "--set", "device"), "NAME=VALUE"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], why: str) -> None:
    run = run_cli("bench", "apps", *arguments)
    assert run.returncode == 2
    assert why in run.stderr
    assert "Traceback" not in run.stderr


def test_too_many_engines_for_the_memory_are_refused() -> None:
    with pytest.raises(BenchmarkError, match="memory"):
        arms.check_memory(10**6)
