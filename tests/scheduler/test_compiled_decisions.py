"""The compiled scheduler decides as the plain one does, step by step, on recorded events.

Runs where `tools/compile_scheduler.py` has made `build/compiled` (or the folder that
PARROT_COMPILED names), and is skipped otherwise: it needs a C compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
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

pytestmark = pytest.mark.skipif(
    not any((COMPILED / "parrot_scheduler").glob("scheduler.*.*")),
    reason="the scheduler has not been compiled (tools/compile_scheduler.py)",
)


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
    ran = subprocess.run(
        [sys.executable, "-c", REPLAY, str(path)],
        env={**os.environ, "PYTHONPATH": str(COMPILED)},
        capture_output=True,
        text=True,
        check=True,
    )
    is_compiled, steps, differs_at = ran.stdout.split()
    assert (is_compiled, differs_at) == ("True", "None")
    assert int(steps) > 50
