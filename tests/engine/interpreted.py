"""Tiles for Triton's kernels in its interpreter, on the CPU (see `conftest.py`).

On a machine with a GPU the modules that need the interpreter are skipped; there `tests/gpu` runs
the same cases on the device.
"""

from __future__ import annotations

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs the kernels themselves: tests/gpu", allow_module_level=True)
pytest.importorskip("triton", reason="the kernels' interpreter comes with triton")

import quick_interpreter
from parrot_engine.attention import launch

quick_interpreter.install()

#: Tiles small enough for an interpreter; all loops still take several turns.
TUNINGS = launch.Tunings(
    narrow=launch.Tuning(16, 16, 4, 1, 1),
    wide=launch.Tuning(32, 16, 4, 1, 1),
    prefill=launch.Tuning(32, 16, 4, 1),
)
CHUNK = 32
