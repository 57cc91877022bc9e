"""Kernels that start before the one they depend on has ended (programmatic dependent launch).

From compute capability 9.0 on a kernel may be launched while its predecessor in the stream still
runs: its programs take whatever room there is, fetch what no kernel of a step writes (weights,
the plan), and wait only then. In a chain of kernels of some microseconds each this hides the
launches, the first loads, and the time in which the last programs of a kernel leave the device
idle. Captured graphs keep such edges.

NOTE: rules for a kernel that is launched so. Every program calls `wait_for_predecessor`, on all
paths, for a kernel that ends without having waited lets its successor run before its predecessor
has ended. Before that it writes nothing, and reads nothing that a kernel of the same step may
write: its predecessor's own predecessors may still be running too. Fetching into the L2 cache is
always allowed: that is where all writes go.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a triton that does not know how
    _SUPPORTED = False
else:
    _SUPPORTED = not triton.knobs.runtime.interpret

#: Bytes that one request brings into the L2 cache.
LINE_BYTES = 128


class Chaining(NamedTuple):
    """How kernels of a step overlap."""

    #: When a kernel lets its successor start: at its own beginning, or when it has read all.
    trigger: Literal["off", "early", "late"]
    #: Bytes of its weight that a product of few tokens fetches before it waits, all programs.
    ahead_bytes: int = 0
    #: Whether attention of few queries fetches the first chunk of keys before it waits.
    keys_ahead: bool = False


OFF = Chaining("off")
#: What is used where the device can; see docs/engine-performance.md.
CHAINING = OFF


@cache
def _is_able(device: torch.device) -> bool:
    return (
        _SUPPORTED and device.type == "cuda" and torch.cuda.get_device_properties(device).major >= 9
    )


def chaining_on(x: Tensor) -> Chaining:
    """How kernels on the device of `x` overlap."""
    return CHAINING if CHAINING.trigger != "off" and _is_able(x.device) else OFF


def launch_options(chaining: Chaining) -> dict[str, Any]:
    """The constant `CHAIN` of a kernel (0, 1 early, 2 late), and how it is launched."""
    if chaining.trigger == "off":
        return {"CHAIN": 0}
    return {"CHAIN": 1 if chaining.trigger == "early" else 2, "launch_pdl": True}


@triton.jit
def wait_for_predecessor(CHAIN: tl.constexpr):
    """What follows sees all that the kernel before has written."""
    if CHAIN == 1:
        gdc_launch_dependents()
    if CHAIN != 0:
        gdc_wait()


@triton.jit
def let_successor_start(CHAIN: tl.constexpr):
    """All that takes long has been read; what is written until the end is still seen."""
    if CHAIN == 2:
        gdc_launch_dependents()


@triton.jit
def fetch_lines(pointers):
    """Bring the lines that `pointers` point to into the L2 cache; does not wait for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
