"""Sums the shares of device memory that models are given (`memory_share`), by device.

Models without a share do not count: they take what is free when they are loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

#: Rounding error of a sum of shares such as 0.7 + 0.2 + 0.1.
_ROUNDING = 1e-9


class SharedModel(Protocol):
    """The settings of a model that determine its shares."""

    @property
    def served_name(self) -> str: ...
    @property
    def memory_share(self) -> float | None: ...
    @property
    def engines(self) -> int: ...
    @property
    def tensor_parallel(self) -> int | None: ...
    @property
    def device(self) -> str: ...


def share_conflict(models: Iterable[SharedModel]) -> str | None:
    """Return the reason why models do not fit together by their shares; None if they do.

    Names the first device whose shares exceed 1, and the models' shares of it.
    """
    shares: dict[str, list[tuple[str, float]]] = {}
    for model in models:
        if model.memory_share is not None:
            for device in _devices(model):
                shares.setdefault(device, []).append((model.served_name, model.memory_share))
    for device, taken in shares.items():
        total = sum(share for _, share in taken)
        if total > 1 + _ROUNDING:
            shown = ", ".join(f"{name} {share:g}" for name, share in taken)
            return f"the memory shares on {device} come to {total:g}, more than 1: {shown}"
    return None


def _devices(model: SharedModel) -> list[str]:
    """Return the device of each process that computes for a model."""
    settings = model.device.split(",")
    found = []
    for index in range(model.engines):
        device = settings[index % len(settings)].strip()
        device = _default_device() if device == "auto" else device
        first = re.fullmatch(r"cuda(?::(\d+))?", device)
        if first is None:
            found.append(device)
        else:
            number = int(first[1] or 0)
            found += [f"cuda:{number + rank}" for rank in range(model.tensor_parallel or 1)]
    return found


def _default_device() -> str:
    """Guess the kind of device that engines use for `auto`, without torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    return "cuda:0" if Path("/dev/nvidiactl").exists() and not hidden else "cpu"
