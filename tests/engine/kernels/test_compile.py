"""Every kernel compiles, and fits, for GPUs that this machine does not have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels' compiler comes with triton")

SCRIPT = Path(__file__).parents[2] / "harness" / "engine" / "compile_kernels.py"


#: Sets of variants, and the targets that each is compiled for.
TARGETS = {"common": {80, 89, 90}, "fp8": {89, 90}, "packed": {80, 89, 90}}


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """Compile all variants in one process, as half of its work is to import the compiler."""
    # A process of its own: here the kernels may be those of the interpreter.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *TARGETS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(840)
@pytest.mark.parametrize("name", list(TARGETS))
def test_every_kernel_compiles_for_every_target(name: str, compiled: list[dict[str, Any]]) -> None:
    entries = [entry for entry in compiled if entry["set"] == name]
    assert {entry["capability"] for entry in entries} == TARGETS[name]
    for entry in entries:
        assert entry["cubin"] > 0
        assert entry["shared"] <= entry["limit"], entry
        # Many rows a tile must reach the matrix instructions that Hopper is fast with.
        if entry["capability"] == 90 and entry["name"].startswith(("wide", "prefill")):
            assert entry["wgmma"], entry
