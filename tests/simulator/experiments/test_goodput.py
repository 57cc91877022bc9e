"""Goodput: the search finds thresholds, objectives are applied, and what is shown is what ran."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parrot_simulator.experiments import goodput
from parrot_simulator.experiments.goodput import ARMS, BASELINE, CASES, OBJECTIVES, GoodputCase
from parrot_simulator.reports.tables import goodput_table, objectives_table
from parrot_simulator.workloads import build
from typer.testing import CliRunner

from parrot_gateway.cli.main import app

#: Chats for 4 s, on one slow engine.
TINY = GoodputCase(
    "calibration",
    "chats/s",
    lambda load: {"rate": load, "count": max(1, round(4 * load))},
    first=16.0,
    engines=1,
    profile="A6000-7B-2024",
    note="arrivals for 4 s",
)


def below(threshold: int, asked: list[int]) -> Callable[[int], bool]:
    """Passes up to a threshold; notes what was asked."""

    def passes(step: int) -> bool:
        asked.append(step)
        return step <= threshold

    return passes


@given(
    threshold=st.integers(-30, 30),
    start=st.integers(-20, 20),
    stride=st.integers(1, 9),
    finest=st.integers(1, 4),
)
def test_the_search_finds_a_threshold(threshold: int, start: int, stride: int, finest: int) -> None:
    asked: list[int] = []
    level = goodput.search(
        below(threshold, asked), start, lowest=-20, highest=20, stride=stride, finest=finest
    )
    assert level.runs == len(asked) == len(set(asked))
    assert all(-20 <= step <= 20 for step in asked)
    assert len(asked) <= 40 / stride + stride.bit_length() + 2
    if threshold < -20:
        assert (level.passed, level.failed) == (None, -20)
    elif threshold >= 20:
        assert (level.passed, level.failed) == (20, None)
    else:
        assert level.passed is not None
        assert level.failed is not None
        assert level.passed <= threshold < level.failed
        assert level.failed - level.passed <= finest


def test_the_search_refuses_what_makes_no_sense() -> None:
    for arguments in ({"start": 99}, {"start": 0, "stride": 0}, {"start": 0, "finest": 0}):
        with pytest.raises(ValueError, match="cannot search from"):
            goodput.search(lambda step: True, **arguments)


def test_the_grid_is_geometric() -> None:
    assert goodput.load_of(TINY, 0) == 16.0
    assert goodput.load_of(TINY, goodput.STEPS) == pytest.approx(32.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.workload)
def test_every_application_has_an_objective(case: GoodputCase) -> None:
    # The smallest load of the grid, and the first one.
    for step in (goodput.LOWEST, 0):
        workload = build(case.workload, case.parameters(goodput.load_of(case, step)))
        kinds = {plan.kind for plan in workload.arrivals()}
        assert kinds
        for kind in kinds:
            objective = OBJECTIVES[kind]
            assert objective.why
            assert objective.times_alone is None or case.alone
    names = [arm.name for arm in (*ARMS, *case.more)]
    assert len(set(names)) == len(names)
    assert names[0] == BASELINE.name == "LMetric"


def test_a_job_may_take_times_what_it_takes_alone() -> None:
    case = GoodputCase(
        "mixed",
        "",
        lambda load: {"rate": load, "count": 3, "summaries": 2, "scale": 0.2},
        first=1.0,
        alone={"count": 1, "summaries": 1, "scale": 0.2},
        engines=2,
    )
    alone = goodput.jobs_alone(case)
    assert set(alone) == {"chat", "map-reduce"}
    assert alone["map-reduce"] > 0
    bound = goodput.with_objectives(build("mixed", case.parameters(1.0)), alone)
    plans = {plan.kind: plan for plan in bound.arrivals()}
    assert plans["map-reduce"].job_s == pytest.approx(3 * alone["map-reduce"])
    assert plans["map-reduce"].ttft_s is None
    chat = plans["chat"]
    assert (chat.ttft_s, chat.tpot_s, chat.job_s) == (2.0, 0.05, None)
    assert goodput.jobs_alone(TINY) == {}


def test_agents_that_follow_have_the_objective_too() -> None:
    workload = build("agents", {"clients": 1, "count": 2, "turns_scale": 0.01})
    bound = goodput.with_objectives(workload, {})
    (first,) = bound.arrivals()
    second = bound.successor(first, 10.0)
    assert second is not None
    assert first.ttft_s == second.ttft_s == 5.0
    assert bound.successor(second, 20.0) is None


def test_goodput_is_where_objectives_begin_to_fail() -> None:
    found = list(goodput.run(TINY))
    assert [f.arm for f in found] == [arm.name for arm in ARMS]
    base = found[0].load
    assert base is not None
    for result, arm in zip(found, ARMS, strict=True):
        assert result.load is not None
        assert result.beyond is not None
        assert result.ratio == pytest.approx(result.load / base)
        assert result.beyond == pytest.approx(result.load * 2 ** (1 / goodput.STEPS))
        assert result.limit == "chat"
        for load, share in ((result.load, result.share), (result.beyond, result.share_beyond)):
            measures = goodput.run_once(TINY, arm, load, {}, 0).kinds["chat"]
            assert share is not None
            assert share == pytest.approx(measures.good / measures.applications)
            assert (share >= goodput.SHARE) == (load == result.load)
    assert found == list(goodput.run(TINY))
    text = goodput_table(TINY, found)
    assert f"| LMetric | {base:.3g} |" in text
    assert "1 engine;" in text


def test_what_never_passes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "ARMS", ARMS[:1])
    monkeypatch.setattr(goodput, "SHARE", 1.1)
    case = replace(TINY, first=1.0)
    (result,) = goodput.run(case)
    assert result.load is None
    assert result.ratio is None
    assert result.beyond == pytest.approx(goodput.load_of(case, goodput.LOWEST))
    assert "| LMetric | none | - |" in goodput_table(case, [result])


def test_one_kind_that_fails_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "ARMS", ARMS[:1])
    monkeypatch.setattr(goodput, "jobs_alone", lambda case: {"map-reduce": 1e-6})
    case = GoodputCase(
        "mixed", "", lambda load: {"rate": 1, "count": 40, "summaries": 1, "scale": 0.1}, first=1.0
    )
    (result,) = goodput.run(case)
    assert (result.load, result.limit, result.share_beyond) == (None, "map-reduce", 0.0)


def test_the_command_searches_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "CASES", (TINY,))
    path = tmp_path / "goodput.json"
    arguments = ["simulate", "paper", "--figure", "fleet goodput", "--quick", "--json", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "fleet goodput: calibration (1 engine; arrivals for 4 s)" in result.output
    assert "Figure " not in result.output
    assert objectives_table() in result.output
    (data,) = json.loads(path.read_text(encoding="utf-8"))
    assert data["figure"] == "fleet goodput"
    assert [found["arm"] for found in data["found"]] == [arm.name for arm in ARMS]
