"""The benchmark of what linking gains: its applications declare nothing, its arms run the same."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess, run_cli
from parrot_bench.applications.description import Application, Call, Output
from parrot_bench.apps import arms, command, gain, policies
from parrot_bench.apps.recipes import UNDECLARED as RECIPES
from parrot_bench.apps.runner import GatewayClient, JobResult, RunResult, run_workload
from parrot_bench.apps.workload import NAMED, SEMANTIC, Size, Workload
from parrot_bench.servers import BenchmarkError

from parrot_gateway.settings.model import LinkUse

SALT = "Copy 000000000001."
OTHER = "Copy 000000000002."


def build(app: str, salt: str = SALT, count: int = 0, scale: float = 0.0) -> Workload:
    recipe = RECIPES[app]
    return recipe.build(Size(count or recipe.count, scale or recipe.scale), salt)


def sent(workload: Workload) -> list[str]:
    """All calls as text."""
    return [
        "\n".join(message["content"] for message in call.messages("<{}>".format))
        for call in workload.calls
    ]


# -- the applications ---------------------------------------------------------------------


def test_the_command_knows_their_names() -> None:
    assert tuple(RECIPES) == command.UNDECLARED
    assert get_args(LinkUse) == command.USES


@pytest.mark.parametrize("app", RECIPES)
def test_workloads_are_sound(app: str) -> None:
    workload = build(app)
    names = [call.name for call in workload.calls]
    assert len(set(names)) == len(names)
    seeds = [call.seed for call in workload.calls]
    told_apart = set(zip(sent(workload), seeds, strict=True))
    assert len(told_apart) == len(names), "the same call twice could be answered once"
    for job in workload.jobs:
        known: set[str] = set()
        for call in job.calls:
            assert known.issuperset(call.reads), "producers come first"
            known.add(call.name)
        read = {name for call in job.calls for name in call.reads} | set(job.finals)
        assert read == known, "a call whose output nobody reads"
    assert workload == build(app), "the same every time"


@pytest.mark.parametrize("app", RECIPES)
def test_prompts_begin_with_their_templates_words(app: str) -> None:
    """Copies agree up to the salt and nowhere behind it; arrivals and pauses are the same."""
    one, other = build(app), build(app, OTHER)
    for first, second in zip(sent(one), sent(other), strict=True):
        head, _, tail = first.partition(SALT)
        assert head.strip()
        assert second.startswith(head + OTHER)
        assert tail
    assert [job.arrives_s for job in one.jobs] == [job.arrives_s for job in other.jobs]
    assert [call.pause_s for call in one.calls] == [call.pause_s for call in other.calls]


def test_agents_hold_all_that_was_said_before_and_wait_for_their_tools() -> None:
    for app, systems in (("agents", 3), ("sessions", 1)):
        workload = build(app)
        chats = [[call.messages("<{}>".format) for call in job.calls] for job in workload.jobs]
        assert len({turns[0][0]["content"] for turns in chats}) == systems
        for job, turns in zip(workload.jobs, chats, strict=True):
            assert len(turns) >= 2
            for before, after in pairwise(turns):
                assert after[: len(before)] == before
                assert [message["role"] for message in after[len(before) :]] == [
                    "assistant",
                    "user",
                ]
            assert job.calls[0].pause_s == 0
            assert all(call.pause_s > 0 for call in job.calls[1:])
            assert job.calls[-1].reads == tuple(call.name for call in job.calls[:-1])


def test_contexts_fit_the_demo_model() -> None:
    for app, recipe in RECIPES.items():
        _, longest = gain.distinct_tokens(build(app), Size(0, 0).characters_per_token)
        assert longest < 1900, (app, recipe.scale)


# -- what is compared ---------------------------------------------------------------------


def test_a_common_beginning_counts_once() -> None:
    calls = (
        Call("a", ("x" * 640,), 10, seed=0),
        Call("b", ("x" * 640,), 20, seed=1),
        Call("c", ("y" * 640, Output("a")), 10, seed=2),
    )
    workload = Workload("w", (Application("w", "w", calls, ("b", "c")),), ("parallel",))
    distinct, longest = gain.distinct_tokens(workload, 1.0)
    assert distinct == 640 + 10 + 20 + 640 + 10 + 10
    assert longest == 640 + 10 + 10


def test_arms_differ_by_linking_alone() -> None:
    off, linking, declared = gain.arms("multi-agent", ())
    assert (off.way, linking.way, declared.way) == ("parallel", "parallel", SEMANTIC)
    assert not off.settings["linking"]["enabled"]
    assert linking.settings["linking"]["enabled"]
    assert not declared.settings["linking"]["enabled"]
    names = [arm.name for arm in gain.arms("sessions", ())]
    assert names == ["off", "linking", "declared", "lmetric", "prefix-linear"]
    _, _, alone, _ = gain.arms("mixed", (), ("groups",))
    assert (alone.name, alone.settings["linking"]["use"]) == ("groups", ["groups"])
    *_, last = gain.arms("sessions", ("round-robin",))
    assert (last.policy, last.settings) == ("round-robin", off.settings)


def a_run(workload: Workload, seconds: float) -> RunResult:
    return RunResult(tuple(JobResult(job, seconds, ("x",)) for job in workload.jobs), 1)


def test_gains_are_against_the_first_arm_round_by_round() -> None:
    workload = build("agents", count=2)

    def outcome(name: str, *rounds: tuple[float, int, int]) -> policies.PolicyOutcome:
        return policies.outcome(
            name,
            workload,
            [a_run(workload, seconds) for seconds, _, _ in rounds],
            [arms.Work(filled, cached, 40, 0, 1.0, 50) for _, filled, cached in rounds],
        )

    outcomes = [
        outcome("off", (2.0, 1000, 400), (3.0, 1000, 600)),
        outcome("linking", (1.0, 1000, 800), (3.0, 1000, 600)),
    ]
    (faster,) = gain.gains(outcomes)
    assert (faster.against, faster.kind) == ("linking", "agents")
    assert (faster.least, faster.mean, faster.largest) == pytest.approx((1.0, 1.5, 2.0))
    off, linking = gain.savings(outcomes, {"off": 4.0, "linking": 8.0})
    assert (off.busy, linking.busy) == (0.5, 0.25)
    assert (off.computed, off.cached, off.hit_rate, off.ratio) == (500, 500, 0.5, 1.0)
    assert linking.hit_rate == pytest.approx(0.7)
    assert (linking.least, linking.ratio, linking.largest) == pytest.approx((1.0, 2.0, 3.0))


# -- the command --------------------------------------------------------------------------


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
    assert [arm["policy"] for arm in app["arms"]] == ["off", "linking", "declared"]
    assert [saving["arm"] for saving in app["savings"]] == ["off", "linking", "declared"]
    for arm in app["arms"]:
        (work,) = arm["work"]
        assert work["generated_tokens"] == app["tokens"]
        assert {times["kind"] for times in arm["times"]} == {"chat", "map-reduce"}
    assert app["linking"]["off"]["sent"] == 0
    # Two runs, a request and an answer of each call.
    assert app["linking"]["linking"]["sent"] >= 4 * app["calls"]


async def test_agents_run_with_a_session_and_without(demo: GatewayProcess) -> None:
    async with GatewayClient(demo.base_url, DEMO_MODEL, API_KEY) as client:
        workload = build("agents", count=2, scale=0.005)
        plain = await run_workload(client, workload, "parallel", "")
        named = await run_workload(
            client, workload, NAMED, "bench-agents", session_per_job=True, forget_jobs=True
        )
    assert [job.texts for job in plain.jobs] == [job.texts for job in named.jobs]
    assert plain.requests == named.requests == len(workload.calls)
    for done, job in zip(plain.jobs, workload.jobs, strict=True):
        assert done.seconds > job.pauses_s > 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--app", "gpts"), "sessions"),
        (("--policy", "best"), "best"),
        (("--network-delay", "5"), "network"),
        (("--base-url", "http://127.0.0.1:1/v1"), "--base-url"),
        (("--kv-share", "0"), "--kv-share"),
        (("--use", "magic"), "magic"),
    ],
)
def test_what_a_comparison_of_linking_refuses(arguments: tuple[str, ...], why: str) -> None:
    run = run_cli("bench", "apps", "--compare", "linking", *arguments)
    assert run.returncode == 2
    assert why in run.stderr
    assert "Traceback" not in run.stderr


def test_too_many_engines_for_the_memory_are_refused() -> None:
    with pytest.raises(BenchmarkError, match="memory"):
        arms.check_memory(10**6)
