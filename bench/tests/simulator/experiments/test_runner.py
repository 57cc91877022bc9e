"""The prepared experiments: complete, runnable, and reported as they came out."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parrot_bench.simulator.experiments import runner
from parrot_bench.simulator.experiments.definitions import (
    OURS,
    ROUND_TRIPS_S,
    VARIANTS,
    Experiment,
    Point,
)
from parrot_bench.simulator.experiments.fleet import FLEET
from parrot_bench.simulator.experiments.knowledge import KNOWLEDGE
from parrot_bench.simulator.experiments.paper import PAPER
from parrot_bench.simulator.profiles import PROFILES
from parrot_bench.simulator.reports.plots import draw_experiment
from parrot_bench.simulator.reports.tables import experiment_table, losses
from parrot_bench.simulator.workloads import build
from parrot_scheduler.config import PRESETS
from parrot_scheduler.scheduler import policies_of
from typer.testing import CliRunner

from parrot_gateway.cli.main import app

EVERYTHING = [*PAPER, *FLEET]


def tiny() -> Experiment:
    """Figure 17 with few branches and short texts."""
    figure = runner.EXPERIMENTS["17"]
    point = figure.points[0]
    parameters = {**point.parameters, "branches": 2, "scale": 0.1}
    return replace(figure, points=(replace(point, parameters=parameters),))


def test_every_figure_of_the_paper_is_there() -> None:
    figures = {experiment.figure for experiment in PAPER}
    assert figures == {"10", "11", "12a", "12b", "13", "14", "15", "16", "17", "18"}


@pytest.mark.parametrize("experiment", EVERYTHING, ids=lambda e: e.figure)
def test_experiments_name_things_that_exist(experiment: Experiment) -> None:
    labels = [point.label for point in experiment.points]
    assert len(set(labels)) == len(labels)
    names = {arm.name for arm in experiment.arms}
    assert OURS.name in names
    assert len(names) == len(experiment.arms)
    for point in experiment.points:
        build(experiment.workload, point.parameters)
        assert {*point.printed, *point.measured} <= names
    for arm in experiment.arms:
        policies_of(PRESETS[arm.preset])
        PROFILES[experiment.profile].with_(**arm.engine)


def test_round_trips_are_as_recorded() -> None:
    assert fmean(ROUND_TRIPS_S) == pytest.approx(0.244, abs=0.001)
    assert pstdev(ROUND_TRIPS_S) == pytest.approx(0.021, abs=0.002)
    assert min(ROUND_TRIPS_S) >= 0.218
    assert max(ROUND_TRIPS_S) <= 0.345


def test_arms_are_compared_with_ours_and_what_loses_is_said() -> None:
    experiment = tiny()
    outcomes = list(runner.run(experiment, seeds=2))
    assert [o.arm for o in outcomes] == [arm.name for arm in experiment.arms]
    comparisons = runner.compare(experiment, outcomes)
    by_name = {c.baseline: c for c in comparisons}
    assert OURS.name not in by_name
    latency = by_name["vLLM 2023, latency"]
    assert latency.printed == 2.96
    assert latency.ratio == pytest.approx(latency.theirs / latency.ours)
    text = experiment_table(experiment, outcomes, comparisons)
    assert f"| {latency.point} | {latency.baseline} |" in text
    worse = replace(latency, ratio=0.5)
    assert "vLLM 2023, latency" in losses([worse, latency])
    assert "nowhere" in losses([latency])


def test_arms_see_the_same_applications() -> None:
    experiment = tiny()
    point = experiment.points[0]
    runs = [runner.run_once(experiment, point, arm, seed=1) for arm in experiment.arms]
    assert len({(r.total.calls, r.total.prompt_tokens, r.total.output_tokens) for r in runs}) == 1


@given(st.lists(st.floats(0.1, 1000), min_size=1, max_size=6, unique=True), st.floats(0.2, 900))
def test_the_rate_at_a_bound_is_between_the_points_around_it(
    values: list[float], bound: float
) -> None:
    points = [(float(2**i), value) for i, value in enumerate(sorted(values))]
    rate = runner.rate_at(points, bound)
    below = [r for r, value in points if value <= bound]
    above = [r for r, value in points if value > bound]
    if not below:
        assert rate == 0
    else:
        assert rate >= max(below) * (1 - 1e-9)
        assert rate <= (min(above) if above else max(below)) * (1 + 1e-9)


def test_the_rate_at_a_bound_is_read_between_logarithms() -> None:
    assert runner.rate_at([(1, 10), (4, 1000)], 100) == pytest.approx(2)


def test_experiments_are_chosen_by_figure() -> None:
    assert [e.figure for e in runner.select(["12", "17"])] == ["12a", "12b", "17"]
    assert runner.select(["fleet"]) == list(FLEET)
    assert runner.select([]) == EVERYTHING
    with pytest.raises(ValueError, match=r"no figure '9'; there are 10, 11, 12a"):
        runner.select(["9"])


@pytest.mark.parametrize("experiment", KNOWLEDGE, ids=lambda e: e.points[0].label)
def test_calls_ask_for_more_than_they_generate(experiment: Experiment) -> None:
    """Otherwise `max_tokens` would be the length itself, and there would be nothing to predict."""
    assert experiment.max_tokens is not None
    workload = build(experiment.workload, experiment.points[0].parameters)
    asking = runner.asking_for(workload, experiment.max_tokens)
    for plan, asked in islice(zip(workload.arrivals(), asking.arrivals(), strict=True), 50):
        for call, more in zip(plan.calls, asked.calls, strict=True):
            assert more.max_tokens >= experiment.max_tokens
            assert more == replace(call, max_tokens=more.max_tokens)
    shares = [
        c.output_tokens / c.max_tokens for p in islice(asking.arrivals(), 50) for c in p.calls
    ]
    assert fmean(shares) < 0.4


def test_what_the_paper_measured_stands_beside() -> None:
    figure = runner.EXPERIMENTS["17"]
    point = figure.points[-1]
    assert point.measured == {
        "vLLM 2023, latency": 2533,
        "vLLM 2023, throughput": 529,
        OURS.name: 216,
        VARIANTS[0].name: 252,
    }
    experiment = tiny()
    outcomes = list(runner.run(experiment, seeds=1))
    table = experiment_table(experiment, outcomes, runner.compare(experiment, outcomes))
    (row,) = (line for line in table.splitlines() if "| vLLM 2023, latency |" in line)
    assert row.endswith("| 2.96x | 554 |")


@pytest.mark.parametrize("experiment", PAPER, ids=lambda e: e.figure)
def test_printed_ratios_are_those_of_measured_times(experiment: Experiment) -> None:
    """Two sources of one number; figure 18's throughput baseline and 12b are printed rounded."""
    for point in experiment.points:
        ours = point.measured.get(OURS.name)
        for arm, ratio in point.printed.items():
            theirs = point.measured.get(arm)
            if ours is not None and theirs is not None:
                assert theirs / ours == pytest.approx(ratio, rel=0.07)


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "paper.json"
    arguments = ["simulate", "paper", "--figure", "17", "--quick", "--json", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Figure 17: multi-agent coding" in result.output
    (data,) = json.loads(path.read_text(encoding="utf-8"))
    assert {o["point"] for o in data["outcomes"]} == {"4 branches", "16 branches"}
    assert data["seeds"] == 1


def test_figures_come_in_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    path = tmp_path / "paper.json"
    figures = ["--figure", "18", "--figure", "14", "--figure", "17"]
    arguments = ["simulate", "paper", *figures, "--quick", "--json", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text(encoding="utf-8"))
    assert [found["figure"] for found in data] == ["18", "14", "17"]


def test_the_command_tells_what_knowledge_is_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mixed,) = runner.select_knowledge(["mixed"])
    point = Point("mixed", {"count": 6, "summaries": 1, "scale": 0.2})
    monkeypatch.setattr(runner, "KNOWLEDGE", (replace(mixed, points=(point,), engines=2),))
    path = tmp_path / "knowledge.json"
    result = CliRunner().invoke(app, ["simulate", "knowledge", "--json", str(path)])
    assert result.exit_code == 0, result.output
    (data,) = json.loads(path.read_text(encoding="utf-8"))
    arms = [outcome["arm"] for outcome in data["outcomes"]]
    assert {"LMetric", "none", "declared", "inferred"} < {*arms}


def test_the_command_refuses_unknown_figures() -> None:
    result = CliRunner().invoke(app, ["simulate", "paper", "--figure", "99"])
    assert result.exit_code == 2
    assert "no figure '99'" in result.output
    result = CliRunner().invoke(app, ["simulate", "knowledge", "--workload", "nope"])
    assert result.exit_code == 2


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    experiment = tiny()
    path = draw_experiment(experiment, list(runner.run(experiment, seeds=1)), tmp_path)
    assert path.name == "figure-17.svg"
    assert path.read_text(encoding="utf-8").startswith("<?xml")
