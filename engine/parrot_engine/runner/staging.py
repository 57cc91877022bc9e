"""Buffers through which the host fills a device tensor, step after step.

The host fills one buffer while the device still uses earlier ones; a buffer is reused only after
its copy has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BufferT = TypeVar("BufferT")

#: Steps with concurrent plans: one being computed, one waiting for it, and one being filled by the
#: host.
DEPTH = 3


class Event(Protocol):
    """A mark in the device's work, such as `torch.cuda.Event`."""

    def record(self) -> None:
        """Set the mark behind all work launched so far."""
        ...

    def synchronize(self) -> None:
        """Wait for the work before the mark; return at once if it was never set."""
        ...


class Ring(Generic[BufferT]):
    """Buffers used in turn, each only after its last use has ended."""

    def __init__(self, buffers: Sequence[BufferT], make_event: Callable[[], Event]) -> None:
        self._buffers = list(buffers)
        self._events = [make_event() for _ in self._buffers]
        self._index = 0

    def take(self) -> BufferT:
        """Return the next buffer; waits for its last use."""
        self._index = (self._index + 1) % len(self._buffers)
        self._events[self._index].synchronize()
        return self._buffers[self._index]

    def release(self) -> None:
        """Note that the work launched so far includes all uses of the last buffer."""
        self._events[self._index].record()


class _Pair(NamedTuple):
    host: Tensor
    device: Tensor


class _NoEvent:
    """On the CPU a copy is over when the call returns."""

    def record(self) -> None:
        """Do nothing; see `Event`."""

    def synchronize(self) -> None:
        """Do nothing; see `Event`."""


class _StreamEvent:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        self._event.synchronize()


class Staging:
    """Brings 32-bit integers into a tensor that the device's work reads.

    On CUDA they travel on a separate stream while earlier work runs; the work's stream only copies
    within the device.
    """

    def __init__(self, target: Tensor, depth: int = DEPTH) -> None:
        """Make buffers of the size of `target`, an int32 tensor with one axis."""
        on_cuda = target.device.type == "cuda"
        self._target = target
        self._stream = torch.cuda.Stream(target.device) if on_cuda else None
        pairs = [
            _Pair(
                torch.zeros(target.shape, dtype=torch.int32, pin_memory=on_cuda),
                torch.empty_like(target) if on_cuda else target,
            )
            for _ in range(depth)
        ]
        make_event = partial(_StreamEvent, target.device) if on_cuda else _NoEvent
        self._ring = Ring(pairs, make_event)
        self._taken = pairs[0]

    def take(self) -> npt.NDArray[np.int32]:
        """Return an array as long as the target, to be filled and then sent; its content is
        arbitrary.
        """
        self._taken = self._ring.take()
        array: npt.NDArray[np.int32] = self._taken.host.numpy()
        return array

    def send(self, begin: int, end: int) -> None:
        """Copy elements `begin` … `end` - 1 of the last array to the same place in the target."""
        host, device = self._taken.host[begin:end], self._taken.device[begin:end]
        target = self._target[begin:end]
        if self._stream is None:
            target.copy_(host)
            return
        with torch.cuda.stream(self._stream):
            device.copy_(host, non_blocking=True)
        torch.cuda.current_stream(target.device).wait_stream(self._stream)
        target.copy_(device)
        self._ring.release()
