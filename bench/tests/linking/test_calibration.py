"""Forecasts are compared with the truth that the scripts of applications know."""

from __future__ import annotations

from dataclasses import replace

import pytest
from parrot_bench.linking.applications import applications
from parrot_bench.linking.calibration import calibrate
from parrot_bench.linking.schedule import schedule


def test_maps_and_reduces_are_foretold() -> None:
    scripts = applications(40, seed=1, only="map_reduce")
    roles = {each.role: each for each in calibrate(schedule(scripts, live=5), scripts)}
    assert list(roles) == ["map", "reduce", "all"]
    part, join = roles["map"], roles["reduce"]
    assert part.calls + join.calls == roles["all"].calls
    assert part.foretold > 0.8
    assert part.exact is not None
    assert part.exact > 0.9
    assert part.fan_in_true == pytest.approx(1.0)
    assert part.fan_in is not None
    assert part.fan_in > 0.9
    assert join.fan_in_true == 0.0
    assert part.length_p90 is not None
    assert 0.75 < part.length_p90 <= 1.0
    assert part.to_dict()["role"] == "map"


def test_roles_that_are_not_known_are_not_judged() -> None:
    scripts = applications(20, seed=2, only="chat")
    for script in scripts:
        for name, call in list(script.calls.items()):
            script.calls[name] = replace(call, role="")
    (every,) = calibrate(schedule(scripts, live=5), scripts)
    assert every.role == "all"
    assert every.exact is None
    assert every.successor is None
    assert every.returns_true is not None
