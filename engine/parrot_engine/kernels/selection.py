"""Chooses the kernels for a device: Triton's on an NVIDIA GPU, torch's operators elsewhere.

Does not import triton.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, TypeAlias, cast

import torch

from parrot_engine.exceptions import SettingsError

Kernels: TypeAlias = Literal["torch", "triton"]

#: Minimum compute capability of the kernels: bfloat16 matrix instructions.
MIN_CAPABILITY = (8, 0)
#: Minimum capability for a float8_e4m3fn cache: Triton has no conversion below it.
MIN_FP8_CAPABILITY = (8, 9)


def resolve_kernels(name: str, device: torch.device) -> Kernels:
    """Return the kernels for a setting.

    `auto` means Triton if triton is installed and the GPU is new enough, otherwise torch. `triton`
    on a CPU is for tests: it works only in Triton's interpreter.

    Raises `SettingsError` for an unknown name, or if triton is required but not installed.
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


def reads_float8(device: torch.device) -> bool:
    """Return true if Triton's kernels can read float8 on a device."""
    if device.type != "cuda":
        return True
    return bool(torch.cuda.get_device_capability(device) >= MIN_FP8_CAPABILITY)


def check_kv_cache_dtype(kv_cache_dtype: str, kernels: Kernels, device: torch.device) -> None:
    """Raise `SettingsError` unless these kernels can read a cache of this setting on a device."""
    if kv_cache_dtype == "auto" or kernels == "torch" or device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_FP8_CAPABILITY:
        raise SettingsError(
            "kv_cache_dtype",
            f"{kv_cache_dtype} needs compute capability 8.9 or later, {device} has "
            f"{capability[0]}.{capability[1]}; take auto, or kernels: torch",
        )
