"""Transfers between host and device that the host does not wait for.

`Upload` and `Download` carry the arrays of one step. `Staging` holds buffers that are filled again
and again: the host fills one while the device still works on earlier ones, and none is filled again
before the copy from it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

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


BufferT = TypeVar("BufferT")

#: Steps whose plans may be under way at once: one that is computed, one that waits for it, and
#: one that the host is filling.
DEPTH = 3


class Event(Protocol):
    """A mark in the device's work; what `torch.cuda.Event` is."""

    def record(self) -> None:
        """Set the mark behind all work launched so far."""
        ...

    def synchronize(self) -> None:
        """Wait for the work before the mark; return at once when it was never set."""
        ...


class Ring(Generic[BufferT]):
    """Buffers used in turn, each only when its last use is over."""

    def __init__(self, buffers: Sequence[BufferT], make_event: Callable[[], Event]) -> None:
        self._buffers = list(buffers)
        self._events = [make_event() for _ in self._buffers]
        self._index = 0

    def take(self) -> BufferT:
        """The next buffer; waits for its last use."""
        self._index = (self._index + 1) % len(self._buffers)
        self._events[self._index].synchronize()
        return self._buffers[self._index]

    def release(self) -> None:
        """The work launched so far holds all uses of the buffer taken last."""
        self._events[self._index].record()


class _Pair(NamedTuple):
    """One buffer on the host and one on the device."""

    host: Tensor
    device: Tensor


class _NoEvent:
    """On the CPU a copy is over when the call returns."""

    def record(self) -> None:
        """See `Event`."""

    def synchronize(self) -> None:
        """See `Event`."""


class _StreamEvent:
    """An event on the stream of a device's work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        self._event.synchronize()


class Staging:
    """Brings 32-bit integers into a tensor that the device's work reads.

    On CUDA they travel on a stream of their own while earlier work runs; what is left for the
    stream of the work is a copy within the device.
    """

    def __init__(self, target: Tensor, depth: int = DEPTH) -> None:
        """`target` is an int32 tensor with one axis; buffers of its size are made."""
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
        """An array as long as the target, to be filled and then sent; its content is arbitrary."""
        self._taken = self._ring.take()
        array: npt.NDArray[np.int32] = self._taken.host.numpy()
        return array

    def send(self, begin: int, end: int) -> None:
        """Copy elements `begin` … `end` - 1 of the array taken last to the same place."""
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
