"""The compiled scheduler decides as the plain one does, step by step, on recorded events.

All but one run where `make compiled` has made `build/compiled` (or the folder that PARROT_COMPILED
names), and are skipped otherwise: that needs a C compiler.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import runpy
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
from parrot_scheduler.config import PRESETS, SchedulerConfig
from parrot_simulator.options import SimulationOptions
from parrot_simulator.profiles import PROFILES
from parrot_simulator.recording import LogFile
from parrot_simulator.simulation import simulate
from parrot_simulator.workloads import build

ROOT = Path(__file__).parents[2]
COMPILED = Path(os.environ.get("PARROT_COMPILED", ROOT / "build" / "compiled"))
#: Prints where the scheduler is, and at which step it decides otherwise.
REPLAY = """
import sys
from parrot_scheduler import scheduler
from parrot_simulator.recording import compare
with open(sys.argv[1], encoding="utf-8") as log:
    outcome = compare(log)
print(not scheduler.__file__.endswith(".py"), outcome.compared, outcome.differs_at)
"""
#: Prints all figures of a simulation, and whether the simulator is compiled.
SIMULATE = """
import json
from parrot_simulator import simulation
from parrot_simulator.options import SimulationOptions
from parrot_simulator.profiles import PROFILES
from parrot_simulator.workloads import build
options = SimulationOptions(engines=[PROFILES["H200-8B"]] * 20)
results = simulation.simulate(build("mapreduce-fleet", {"count": 340}), options)
print(json.dumps([not simulation.__file__.endswith(".py"), results.to_dict()]))
"""

needs_compiled = pytest.mark.skipif(
    not any((COMPILED / "parrot_scheduler").glob("scheduler.*.*")),
    reason="the scheduler has not been compiled (tools/compile_scheduler.py)",
)


def run(program: str, *arguments: str, compiled: bool = True) -> str:
    """What a program prints."""
    paths = {"PYTHONPATH": str(COMPILED)} if compiled else {}
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout


@needs_compiled
@pytest.mark.parametrize(
    ("workload", "parameters", "engines", "profile", "config"),
    [
        ("mapreduce-fleet", {"count": 340, "rate": 12}, 8, {}, PRESETS["parrot"]),
        ("mixed", {}, 4, {"capacity_tokens": 40_000, "host_tokens": 100_000}, PRESETS["parrot"]),
        ("agents", {"count": 20}, 2, {"capacity_tokens": 150_000}, PRESETS["parrot"]),
        ("tenants", {}, 2, {}, SchedulerConfig(starvation_s=1.0, max_hold_s=2.0, explain=True)),
        *(("gpts", {}, 4, {}, config) for config in PRESETS.values()),
        *(("mixed", {}, 2, {}, SchedulerConfig(order=name)) for name in ("plas", "atlas", "fcfs")),
    ],
)
def test_decisions_are_the_same(
    workload: str,
    parameters: dict[str, float],
    engines: int,
    profile: dict[str, Any],
    config: SchedulerConfig,
    tmp_path: Path,
) -> None:
    path = tmp_path / "events.log"
    with path.open("w", encoding="utf-8") as file:
        options = SimulationOptions(
            engines=[PROFILES["H200-8B"].with_(**profile)] * engines,
            config=config,
            log=LogFile(file, config),
            max_applications=30,
        )
        simulate(build(workload, parameters), options)
    is_compiled, steps, differs_at = run(REPLAY, str(path)).split()
    assert (is_compiled, differs_at) == ("True", "None")
    assert int(steps) > 50


@needs_compiled
def test_simulations_are_the_same() -> None:
    is_compiled, figures = json.loads(run(SIMULATE))
    assert is_compiled
    assert [False, figures] == json.loads(run(SIMULATE, compiled=False))


def test_written_constructors_take_what_those_of_dataclasses_take() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "compile_scheduler.py"))
    compared = 0
    for path in sorted((ROOT / "scheduler").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        text = tool["with_inits"](source)
        if text == source:
            continue
        name = ".".join(path.relative_to(ROOT / "scheduler").with_suffix("").parts)
        module = importlib.import_module(name)
        # NOTE: under the module's own name, where `dataclass` looks up annotations.
        written: dict[str, Any] = {"__name__": name}
        exec(compile(text, path, "exec"), written)
        for each in vars(module).values():
            if isinstance(each, type) and each.__module__ == name and is_dataclass(each):
                real, own = (inspect.signature(c) for c in (each, written[each.__name__]))
                assert list(own.parameters) == list(real.parameters), each
                kinds = [(p.kind, p.default is p.empty) for p in own.parameters.values()]
                assert kinds == [(p.kind, p.default is p.empty) for p in real.parameters.values()]
                compared += 1
    assert compared > 30
