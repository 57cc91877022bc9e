"""Profiles fitted to event logs."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from parrot_bench.simulator.fitting import Fit, fit_log
from parrot_bench.simulator.options import SimulationOptions
from parrot_bench.simulator.profiles import PROFILES, EngineProfile
from parrot_bench.simulator.recording import LogFile
from parrot_bench.simulator.simulation import simulate
from parrot_bench.simulator.workloads import build

H200 = PROFILES["H200-8B"]


def recorded(profile: EngineProfile) -> str:
    """The log of a run of two engines."""
    options = SimulationOptions(engines=[profile] * 2)
    file = io.StringIO()
    simulate(
        build("mixed", {"rate": 2, "count": 30, "summaries": 6}),
        replace(options, log=LogFile(file, options.config)),
    )
    return file.getvalue()


@pytest.fixture(scope="module")
def log() -> str:
    return recorded(H200)


@pytest.fixture(scope="module")
def fit(log: str) -> Fit:
    return fit_log(log.splitlines())


def test_finds_the_terms_of_the_engines_that_ran(fit: Fit) -> None:
    found, true = fit.profile.step_model, H200.step_model
    assert found.prefill_token_s == pytest.approx(true.prefill_token_s, rel=0.1)
    assert found.context_token_s == pytest.approx(true.context_token_s, rel=0.1)
    assert fit.profile.step_model.sequence_s == pytest.approx(H200.step_model.sequence_s, rel=0.15)
    constant_s = found.weights_s + found.overhead_s
    assert constant_s == pytest.approx(true.weights_s + true.overhead_s, rel=0.03)
    assert fit.median_error < 0.01


def test_tells_what_it_rests_on(fit: Fit) -> None:
    assert fit.engines == 2
    assert fit.calls >= fit.observations > 100
    assert sum(each.observations for each in fit.residuals) == fit.observations
    for each in fit.residuals:
        assert each.fitted_ms == pytest.approx(each.measured_ms, rel=0.05)


def test_limits_are_those_of_the_engines(fit: Fit) -> None:
    for name in ("capacity_tokens", "max_batch", "max_batch_tokens", "block_tokens", "model"):
        assert getattr(fit.profile, name) == getattr(H200, name)


def test_a_fitted_engine_takes_as_long_as_the_recorded_one(fit: Fit) -> None:
    """On a workload that it was not fitted to."""
    times = [
        simulate(
            build("gpts", {"count": 60}), SimulationOptions(engines=[profile])
        ).total.job_s.mean
        for profile in (H200, fit.profile)
    ]
    assert times[1] == pytest.approx(times[0], rel=0.03)


def test_pauses_of_the_machine_move_it_little(log: str, fit: Fit) -> None:
    """For a twentieth of all lines the clock stands still for 50 ms more."""
    lost_s, lines = 0.0, []
    for number, line in enumerate(log.splitlines()):
        if line.startswith('{"now":'):
            lost_s += 0.05 if number % 20 == 0 else 0.0
            now, _, rest = line.removeprefix('{"now":').partition(",")
            line = f'{{"now":{float(now) + lost_s!r},{rest}'
        lines.append(line)
    found = fit_log(lines).profile
    assert found.step_s(sequences=30, context_tokens=20_000) == pytest.approx(
        fit.profile.step_s(sequences=30, context_tokens=20_000), rel=0.1
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no engine joins"),
        (["{}"], "line 1: the first line"),
        (['{"config":{}}', "no JSON"], "line 2"),
        (['{"config":{}}', '{"now":0,"events":[]}', '{"actions":3}'], "line 3"),
    ],
)
def test_what_is_no_log_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_log(lines)


def test_too_few_tokens_are_refused_with_what_to_do(log: str) -> None:
    lines = log.splitlines()[:60]
    with pytest.raises(ValueError, match="record more calls"):
        fit_log(lines)


def test_engines_of_another_model_are_not_taken(log: str) -> None:
    with pytest.raises(ValueError, match="no engine of other joins"):
        fit_log(log.splitlines(), model="other")
