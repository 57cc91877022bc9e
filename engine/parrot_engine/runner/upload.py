"""Many small arrays to the device in one transfer that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the thread's current one: Triton launches there, wherever arguments are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Part:
    """One array of an upload."""

    __slots__ = ("_tensor", "array", "is_real")

    def __init__(self, array: npt.NDArray[np.int64], is_real: bool) -> None:
        self.array = array
        self.is_real = is_real
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The array on the device, int64 or float64; once it was sent."""
        assert self._tensor is not None, "not sent yet"
        return self._tensor

    def take(self, sent: Tensor) -> None:
        """This is the array on the device."""
        self._tensor = sent.view(torch.float64) if self.is_real else sent


class Upload:
    """Collects arrays of 64-bit numbers, then sends all of them at once.

    On CUDA the transfer goes through pinned memory and is ordered on the current stream; the host
    goes on at once. (`torch.tensor(values, device=...)` would wait for the stream.)
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []

    def integers(self, values: Sequence[int]) -> Part:
        """Add integers."""
        return self._add(Part(np.array(values, dtype=np.int64), is_real=False))

    def array(self, values: npt.NDArray[np.integer[Any]]) -> Part:
        """Add an array of integers."""
        return self._add(Part(values.astype(np.int64), is_real=False))

    def reals(self, values: Sequence[float]) -> Part:
        """Add real numbers."""
        return self._add(Part(np.array(values, dtype=np.float64).view(np.int64), is_real=True))

    def _add(self, part: Part) -> Part:
        self._parts.append(part)
        return part

    def send(self, device: torch.device) -> None:
        """Start the transfer. Does nothing when there is nothing to send."""
        if not self._parts:
            return
        sizes = [part.array.size for part in self._parts]
        packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        np.concatenate([part.array for part in self._parts], out=packed.numpy())
        for part, sent in zip(
            self._parts, packed.to(device, non_blocking=True).split(sizes), strict=True
        ):
            part.take(sent)


class Download:
    """Tensors on their way to the host.

    On CUDA copies into pinned memory and an event behind them: waiting for the event waits for
    the work before it on this stream, not for the device, and leaves the core to others.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Start copying `tensors`, all on `device`; without any, waits for the work all the same.

        What goes wrong on the device then shows for this step.
        """
        self._event: torch.cuda.Event | None = None
        if device.type != "cuda":
            self._host = list(tensors)
            return
        self._host = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors
        ]
        for host, tensor in zip(self._host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(torch.cuda.current_stream(device))

    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> list[Tensor]:
        """The tensors, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
