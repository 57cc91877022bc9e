"""Tiles for Triton's kernels in its interpreter, on the CPU (see `conftest.py`).

On a machine with a GPU the modules that need the interpreter are skipped; there `tests/gpu` runs
the same cases on the device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU runs the kernels themselves: tests/gpu", allow_module_level=True)
pytest.importorskip("triton", reason="the kernels' interpreter comes with triton")

from parrot_engine.attention import launch
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.policy import Cuts
from parrot_engine.attention.triton_backend import TritonAttention

from harness.engine import quick_interpreter

quick_interpreter.install()

#: Tiles small enough for an interpreter; all loops still take several turns.
TUNINGS = launch.Tunings(
    narrow=launch.Tuning(16, 16, 4, 1, 1),
    wide=launch.Tuning(32, 16, 4, 1, 1),
    prefill=launch.Tuning(32, 16, 4, 1),
)
CHUNK = 32


def interpreted_backend(
    shape: AttentionShape,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> TritonAttention:
    """Attention of one kind of layer with these tiles; `options` go first."""
    return TritonAttention(
        shape,
        windows=[window],
        device=torch.device("cpu"),
        dtype=dtype,
        **{"tunings": TUNINGS, "cuts": Cuts(CHUNK), **options},
    )


def take_natural_logarithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug for controls: parts of a row are merged by logarithms to another base than 2."""
    run_merge = launch.run_merge

    def natural(call: launch.AttentionCall, *args: Any, **kw: Any) -> None:
        partials = call.partials._replace(lse2=call.partials.lse2 * 0.6931471805599453)
        run_merge(call._replace(partials=partials), *args, **kw)

    monkeypatch.setattr(launch, "run_merge", natural)
