"""Which kernels run on a device: Triton's on an NVIDIA GPU, torch's operators elsewhere.

Does not import triton.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, TypeAlias, cast

import torch

from parrot_engine.exceptions import SettingsError

Kernels: TypeAlias = Literal["torch", "triton"]

#: Compute capability from which on the kernels are written for: bfloat16 matrix instructions.
MIN_CAPABILITY = (8, 0)


def resolve_kernels(name: str, device: torch.device) -> Kernels:
    """The kernels for a setting.

    `auto` takes Triton on a GPU that is new enough where triton is installed, else torch.
    `triton` on a CPU is for tests: it works in Triton's interpreter only.

    Raises `SettingsError` for an unknown name, or where triton is asked for and not installed.
    """
    if name not in ("auto", "torch", "triton"):
        raise SettingsError("kernels", f"{name!r} is none of auto, torch, triton")
    installed = find_spec("triton") is not None
    if name == "triton" and not installed:
        raise SettingsError("kernels", "triton is not installed")
    if name != "auto":
        return cast(Kernels, name)
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
    return "triton" if able and installed else "torch"
