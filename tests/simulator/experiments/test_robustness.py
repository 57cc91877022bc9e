"""Bad input: a workload each, small; what the scheduler is held to under it."""

from __future__ import annotations

import json
from itertools import chain, islice
from pathlib import Path

import pytest
from parrot_scheduler.config import PRESETS
from parrot_simulator.experiments import robustness
from parrot_simulator.experiments.robustness import CASES, Case, RobustnessFigure
from parrot_simulator.options import SimulationOptions
from parrot_simulator.plan import ApplicationPlan
from parrot_simulator.profiles import PROFILES
from parrot_simulator.simulation import simulate
from parrot_simulator.workloads import build
from typer.testing import CliRunner

from parrot_gateway.cli.main import app

#: Of the usual number of applications.
SHARE = 0.15


@pytest.fixture(scope="module")
def ran() -> dict[str, list[RobustnessFigure]]:
    """The figures of every case, at a small size."""
    found: dict[str, list[RobustnessFigure]] = {}
    for figure in robustness.run(CASES, seeds=1, share=SHARE):
        found.setdefault(figure.case, []).append(figure)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_application_fails(case: Case, ran: dict[str, list[RobustnessFigure]]) -> None:
    figures = ran[case.name]
    assert [figure.figure for figure in figures] == [figure.label for figure in case.figures]
    assert all(figure.failed == 0 and figure.policy > 0 for figure in figures)
    # No tenant pays for it.
    assert all(figure.fairness >= figure.baseline_fairness - 0.05 for figure in figures)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_not_behind_the_baseline(case: Case, ran: dict[str, list[RobustnessFigure]]) -> None:
    assert all(figure.ratio >= 0.95 for figure in ran[case.name])


def test_one_tenant_with_a_thousand_sessions_takes_nothing_from_others() -> None:
    """Twenty tenants with one session each take at most three times what they take alone."""
    engine = PROFILES["H200-8B"].with_(capacity_tokens=40_000)
    options = SimulationOptions(engines=[engine], config=PRESETS["parrot"])
    times = {}
    for sessions in (0, 300):
        results = simulate(build("sessions", {"sessions": sessions, "tenants": 6}), options)
        times[sessions] = results.kinds["tenant"].latency_s
        assert not results.failures
    assert times[300].mean <= 3 * times[0].mean
    assert times[300].maximum <= 6 * times[0].maximum


def test_lengths_are_wrong_by_ten() -> None:
    def calls(case: str) -> list[ApplicationPlan]:
        (found,) = robustness.select_cases([case])
        return list(islice(found.workload(0, SHARE).arrivals(), 200))

    long = list(chain.from_iterable(p.calls for p in calls("lengths 10x too long, mixed")))
    assert all(call.max_tokens == 10 * call.output_tokens for call in long)
    assert len({call.template for call in long}) == len(long)
    short = list(chain.from_iterable(p.calls for p in calls("lengths 10x too short, mixed")))
    usual = list(chain.from_iterable(p.calls for p in calls("two speeds, mixed")))
    cut = [
        call.output_tokens <= max(1, asked.output_tokens // 10)
        for call, asked in zip(short, usual, strict=True)
    ]
    assert 0.8 < sum(cut) / len(cut) < 0.97


def test_an_engine_may_lie_about_its_speed_and_its_load() -> None:
    (case,) = robustness.select_cases(["idle and slow, gpts"])
    honest, liar = case.engines[0], case.engines[-1]
    assert liar.description("x") == honest.description("x")
    assert liar.step_s(sequences=1) == pytest.approx(4 * honest.step_s(sequences=1))


def test_the_command_prints_every_case(tmp_path: Path) -> None:
    path = tmp_path / "robustness.json"
    arguments = ["--case", "two speeds", "--case", "a thousand", "--seeds", "1", "--share", "0.05"]
    result = CliRunner().invoke(app, ["simulate", "robustness", *arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text(encoding="utf-8"))
    assert {found["case"] for found in data["figures"]} == {
        "two speeds, gpts", "two speeds, mixed", "two speeds, multi-agent", "a thousand sessions"
    }  # fmt: skip
    for found in data["figures"]:
        assert found["ratio"] == pytest.approx(found["baseline"] / found["policy"])
        assert f"| {found['figure']} |" in result.stdout
    assert "- two speeds: two engines of four take three times as long" in result.stdout
    unknown = CliRunner().invoke(app, ["simulate", "robustness", "--case", "good news"])
    assert unknown.exit_code == 2
    assert "no case 'good news'; there are idle and slow, gpts;" in unknown.stderr
