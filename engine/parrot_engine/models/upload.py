"""Copies weights from memory-mapped files to a GPU, reading on all cores of the host."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import torch
from torch import Tensor

#: Size of each of two pinned buffers: one is filled while the other is sent to the device.
_BUFFER_BYTES = 64 << 20
#: Smaller tensors are copied directly.
_MIN_BYTES = 1 << 20


class Upload:
    """Copies tensors of the host to a device, through pinned memory if it is a GPU.

    A plain copy reads a mapped file on one core, while torch fills pinned buffers on all cores.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = _BUFFER_BYTES) -> None:
        """Make a copier; the first large tensor allocates the buffers."""
        self.device = device
        self._buffer_bytes = buffer_bytes
        self._buffers: Iterator[tuple[Tensor, torch.cuda.Event]] | None = None

    def fill(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` into `target` of the same shape, converting its dtype.

        The copy runs on the current stream. `source` may be released at once, but not changed.
        """
        bytes_of_row = source[0].nbytes if source.ndim and len(source) else 0
        is_plain = source.device.type != "cpu" or target.device.type == "cpu"
        if is_plain or source.nbytes < _MIN_BYTES or bytes_of_row > self._buffer_bytes:
            target.copy_(source)
            return
        rows = self._buffer_bytes // bytes_of_row
        for into, part in zip(target.split(rows), source.split(rows), strict=True):
            buffer, sent = self._next_buffer()
            sent.synchronize()
            staged = buffer[: part.nbytes].view(part.dtype).view(part.shape)
            staged.copy_(part)
            # A converting copy would convert on the host.
            into.copy_(staged.to(into.device, non_blocking=True))
            sent.record()

    def to_device(self, source: Tensor) -> Tensor:
        """Return `source` on the device; the tensor itself if it is there."""
        if source.device.type == self.device.type:
            return source
        target = torch.empty_like(source, device=self.device)
        self.fill(target, source)
        return target

    def _next_buffer(self) -> tuple[Tensor, torch.cuda.Event]:
        if self._buffers is None:
            self._buffers = cycle(
                [
                    (
                        torch.empty(self._buffer_bytes, dtype=torch.uint8, pin_memory=True),
                        torch.cuda.Event(),
                    )
                    for _ in range(2)
                ]
            )
        return next(self._buffers)
