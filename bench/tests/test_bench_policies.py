"""The comparison of policies: its applications, its figures, and the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from harness.processes import run_cli
from parrot_bench.apps import arms, command, policies
from parrot_bench.apps.recipes import BY_POLICY as RECIPES
from parrot_bench.apps.runner import JobResult, RunResult
from parrot_bench.apps.workload import Size, Workload

SALT = "Copy 000000000001."


def build(app: str, count: int | None = None, scale: float = 1.0, seed: int = 0) -> Workload:
    recipe = RECIPES[app]
    return recipe.build(Size(count or recipe.count, scale, seed=seed), SALT)


# -- applications -------------------------------------------------------------------------


def test_the_command_knows_their_names() -> None:
    assert set(command.UNDER_POLICIES) == set(RECIPES)
    assert set(command.MATRIX) <= set(RECIPES)


@pytest.mark.parametrize("app", command.MATRIX)
def test_a_salt_comes_before_all_else(app: str) -> None:
    """And is the same for all calls: what they share within a round stays shared."""
    plain = build(app, 4, 0.1)
    salted = arms.salted(plain, "Salt")
    for call, before in zip(salted.calls, plain.calls, strict=True):
        (first, *others), (was, *rest) = (c.messages("<{}>".format) for c in (call, before))
        assert first == {**was, "content": "Salt\n" + was["content"]}
        assert others == rest
        assert replace(call, prompt=(), history=()) == replace(before, prompt=(), history=())


def test_no_two_rounds_have_the_same_salt() -> None:
    """Whatever their load: caches still hold what the load before has filled."""
    of = [(load, seed, number) for load in (1, 2.5) for seed in (0, 1) for number in (0, 1)]
    salts = [arms.salt_of("agents", *each) for each in of]
    assert len(set(salts)) == len(of)
    assert {len(salt) for salt in salts} == {len(SALT)}


@pytest.mark.parametrize("app", ["gpts", "mixed", "agents", "map-reduce"])
def test_a_seed_draws_lengths_or_arrivals(app: str) -> None:
    def shape(workload: Workload) -> list[object]:
        return [(job.arrives_s, [call.tokens for call in job.calls]) for job in workload.jobs]

    assert shape(build(app, 8)) == shape(build(app, 8, seed=0))
    assert shape(build(app, 8)) != shape(build(app, 8, seed=1))


def test_documents_are_summaries_one_after_the_other() -> None:
    workload = build("map-reduce")
    assert len(workload.jobs) == 24
    names = [call.name for call in workload.calls]
    assert len(set(names)) == len(names) == 24 * 17
    arrivals = [job.arrives_s for job in workload.jobs]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(23 * 2.0, rel=0.5)
    twice = arms.at_load(workload, 2.0)
    assert [job.arrives_s for job in twice.jobs] == [seconds / 2 for seconds in arrivals]


def test_gpts() -> None:
    workload = build("gpts")
    calls = workload.calls
    assert len(calls) == 40
    kinds = {call.name.rpartition("_")[0].rpartition("_")[0] for call in calls}
    assert kinds == {"productivity", "image_generation", "programming", "data_analysis"}
    for kind, system, answer in (("productivity", 7437, 704), ("image_generation", 1116, 89)):
        alike = [call for call in calls if call.name.startswith(kind)]
        assert len(alike) == 10
        assert {call.tokens for call in alike} == {answer}
        texts = [call.text(str).rpartition("\n") for call in alike]
        assert len({head for head, _, _ in texts}) == 1, "the system prompt is shared"
        assert len({query for _, _, query in texts}) == 10
        assert len(texts[0][0]) / 3.6 == pytest.approx(system, rel=0.02)
    arrivals = [job.arrives_s for job in workload.jobs]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(40 / 0.25, rel=0.5)


def test_summaries_beside_chats_are_of_one_document() -> None:
    workload = build("mixed")
    summaries = [job for job in workload.jobs if job.kind == "map-reduce"]
    assert len(summaries) == 9
    for number in range(16):
        alike = [job.calls[number] for job in summaries]
        assert len({call.text(str) for call in alike}) == 1
        assert len({call.seed for call in alike}) == 9
    assert len({job.calls[0].text(str) for job in workload.jobs if job.kind == "chat"}) == 40


def a_run(workload: Workload, seconds: float) -> RunResult:
    return RunResult(tuple(JobResult(job, seconds, ("x",)) for job in workload.jobs), 1)


def a_round(prefilled: int) -> arms.Work:
    return arms.Work(prefilled + 100, 100, 40, 0, 1.0, 50)


def test_speed_ups_are_of_the_first_policy_round_by_round() -> None:
    workload = build("gpts", 4)
    ours = policies.outcome(
        "ours", workload, [a_run(workload, 1.0), a_run(workload, 2.0)], [a_round(10), a_round(20)]
    )
    theirs = policies.outcome(
        "theirs", workload, [a_run(workload, 3.0), a_run(workload, 2.0)], [a_round(50)]
    )
    (found,) = policies.speed_ups([ours, theirs])
    assert (found.kind, found.against) == ("gpts", "theirs")
    assert found.p50 == pytest.approx((3.0 + 1.0) / 2)
    assert (found.least, found.largest) == pytest.approx((1.0, 3.0))
    assert found.of_all == pytest.approx(5.0 / 3.0)
    assert ours.prefilled() == 15
    (times,) = ours.times
    assert times.unit == "ms/token"
    assert times.end_to_end_p50_s == 1.5
    assert times.jobs == 2 * len(workload.jobs)
    assert times.least_mean == pytest.approx(times.largest_mean / 2)
    assert times.mean == pytest.approx((times.least_mean + times.largest_mean) / 2)


def outcomes_of(app: str, *rounds: tuple[float, float]) -> list[policies.PolicyOutcome]:
    """Of two policies, each with the same time for all jobs of a round."""
    workload = build(app, 4, 0.1)
    return [
        policies.outcome(name, workload, [a_run(workload, s) for s in seconds], [a_round(1)])
        for name, seconds in zip(("ours", "theirs"), zip(*rounds, strict=True), strict=True)
    ]


def test_a_verdict_is_beside_the_best_of_the_others_and_says_noise() -> None:
    both = outcomes_of("map-reduce", (2.0, 3.0), (2.0, 3.1))
    slow = msgspec.structs.replace(
        outcomes_of("map-reduce", (2.0, 9.0), (2.0, 9.0))[1], policy="slow"
    )
    mean, p99 = policies.verdicts([*both, slow])
    assert (mean.figure, p99.figure) == ("mean", "p99")
    assert (mean.policy, mean.unit, mean.is_noise) == ("theirs", "s", False)
    assert (mean.ratio, mean.least, mean.largest) == pytest.approx((1.525, 1.5, 1.55))
    (far, _) = policies.verdicts(outcomes_of("map-reduce", (2.0, 3.0), (2.0, 4.0)))
    (near, _) = policies.verdicts(outcomes_of("map-reduce", (2.0, 1.99), (2.0, 2.01)))
    assert far.is_noise
    assert near.is_noise
    kinds = policies.verdicts(outcomes_of("mixed", (2.0, 3.0)))
    assert [each.kind for each in kinds] == ["chat", "map-reduce"]
    assert {each.figure for each in kinds} == {"mean"}
    assert policies.verdicts(both[:1]) == []


def test_texts_that_differ_are_named_with_the_place() -> None:
    workload = build("gpts", 4)
    job = workload.jobs[0]

    def run(text: str) -> RunResult:
        return RunResult((JobResult(job, 1.0, (text,)),), 1)

    assert arms.differing({"a": [run("abc")], "b": [run("abc")]}) == []
    found = arms.differing({"a": [run("x"), run("abcd")], "b": [run("x"), run("abXd")]})
    assert found == [f"{job.calls[0].name}, round 2: b from character 2 of 4 on"]


def test_the_command_compares_policies(tmp_path: Path) -> None:
    path = tmp_path / "policies.json"
    run = run_cli(
        *("bench", "apps", "--app", "gpts", "--engines", "2", "--count", "4", "--scale", "0.02"),
        *("--policy", "parrot", "--policy", "round-robin", "--rounds", "1", "--json", str(path)),
        *("--load", "8", "--load", "9", "--seed", "1", "--seed", "2", "--set", "num_blocks=512"),
        environment={"COLUMNS": "80"},
    )
    assert run.returncode == 0, run.stderr
    assert "round-robin" in run.stdout
    assert "…" not in run.stdout, "a table that is cut"
    assert all(len(line) <= 80 for line in run.stdout.splitlines())
    app, faster = msgspec.json.decode(path.read_bytes())["apps"]
    assert (app["load"], faster["load"], app["seeds"]) == (8, 9, [1, 2])
    assert app["same_texts"]
    assert faster["same_texts"]
    assert [each["policy"] for each in app["verdicts"]] == ["round-robin"] * 2
    assert [each["policy"] for each in app["policies"]] == ["parrot", "round-robin"]
    for each in app["policies"]:
        for work in each["work"]:
            assert work["generated_tokens"] == app["tokens"]
            assert work["filled_tokens"] > work["cached_tokens"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--app", "gpts", "--policy", "best"), "best"),
        (("--app", "gpts", "--app", "chain"), "--engines"),
        (("--app", "gpts", "--network-delay", "5"), "network"),
        (("--app", "mixed", "--base-url", "http://127.0.0.1:1/v1"), "--base-url"),
        (("--compare", "policies", "--app", "poker"), "poker"),
        (("--compare", "policies", "--load", "0"), "--load"),
        (("--compare", "policies", "--set", "device"), "NAME=VALUE"),
    ],
)
def test_what_a_comparison_of_policies_refuses(arguments: tuple[str, ...], why: str) -> None:
    run = run_cli("bench", "apps", *arguments)
    assert run.returncode == 2
    assert why in run.stderr
    assert "Traceback" not in run.stderr
