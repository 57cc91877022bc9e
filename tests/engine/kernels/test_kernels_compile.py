"""Every kernel compiles, and fits, for GPUs that this machine does not have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels' compiler comes with triton")

SCRIPT = Path(__file__).parents[1] / "compile_kernels.py"


@pytest.mark.parametrize(
    ("arguments", "capabilities"),
    [([], {80, 89, 90}), (["fp8"], {89, 90}), (["packed"], {80, 89, 90})],
    ids=["all", "fp8", "packed"],
)
def test_every_kernel_compiles_for_every_target(
    arguments: list[str], capabilities: set[int]
) -> None:
    # A process of its own: here the kernels may be those of the interpreter.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {entry["capability"] for entry in compiled} == capabilities
    for entry in compiled:
        assert entry["cubin"] > 0
        assert entry["shared"] <= entry["limit"], entry
        # Many rows a tile must reach the matrix instructions that Hopper is fast with.
        if entry["capability"] == 90 and entry["name"].startswith(("wide", "prefill")):
            assert entry["wgmma"], entry
