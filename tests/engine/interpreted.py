"""Triton's kernels in its interpreter, on the CPU.

Import this before anything of `parrot_engine.kernels`: what a kernel is gets decided when it is
defined. On a machine with a GPU the modules that need the interpreter are skipped; there
`tests/gpu` runs the same cases on the device.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs the kernels themselves: tests/gpu", allow_module_level=True)
# NOTE: triton's own functions too are what they are from its first import on.
assert "triton" not in sys.modules or "TRITON_INTERPRET" in os.environ
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="the kernels' interpreter comes with triton")

from parrot_engine.kernels import launch  # noqa: E402

#: Tiles small enough for an interpreter; all loops still take several turns.
TUNINGS = launch.Tunings(
    narrow=launch.Tuning(16, 16, 4, 1, 1),
    wide=launch.Tuning(32, 16, 4, 1, 1),
    prefill=launch.Tuning(32, 16, 4, 1),
)
CHUNK = 32
