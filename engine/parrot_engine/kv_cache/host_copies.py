"""Copies of KV blocks between the cache and slots in host memory.

On a GPU they run beside the steps: one stream out, one in. A chunk of blocks is gathered into a
buffer on the device, each as one run of bytes over all layers. From there it goes to pinned memory,
in one transfer per run of slots; the way back is the reverse. So transfers are megabytes long for
any model's shape. On a CPU a copy is done when it is requested.

`parrot_engine.kv_cache.host_tier` decides which blocks to copy and when. Bits are preserved.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from parrot_engine.exceptions import SettingsError
from parrot_engine.runner.memory import free_memory_bytes, staging_blocks

#: Launches with marks kept: a step in flight, the one behind it, and one more.
_MARKS = 3


class Copy(Protocol):
    """Copies in progress."""

    def is_read(self) -> bool:
        """Return true if the source blocks may be overwritten."""
        ...

    def is_done(self) -> bool:
        """Return true if the copies can be read at their targets."""
        ...


class BlockCopies(Protocol):
    """Copies blocks between the device and slots."""

    #: Number of blocks that the host memory holds.
    num_slots: int
    #: Maximum blocks copied at once.
    chunk: int

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Copy:
        """Copy blocks, which all steps applied so far have written, into slots."""
        ...

    def load(
        self, slots: Sequence[int], blocks: Sequence[int], *, after: int, behind: Sequence[Copy]
    ) -> Copy:
        """Copy slots into blocks.

        Args:
            slots: sources.
            blocks: targets.
            after: nothing is written before the launches up to this one (from 1) have been
                computed.
            behind: nothing is read or written before these are done.
        """
        ...

    def before_launch(self, behind: Sequence[Copy]) -> None:
        """Order all later launches behind these copies, because they overwrite the copies'
        sources.
        """
        ...

    def after_launch(self, number: int) -> None:
        """Note that step `number`, from 1, was launched."""
        ...

    def close(self) -> None:
        """Wait for copies in progress, and release the memory."""
        ...


def make_copies(kv_cache: Tensor, num_slots: int) -> BlockCopies:
    """Make copies between a KV cache, `[layers, 2, num_blocks, …]`, and `num_slots` slots.

    Raises:
        SettingsError: the host has no memory for them.
    """
    pieces = pieces_of(kv_cache)
    shape = (num_slots, pieces.shape[0], pieces.shape[2])
    num_bytes = shape[0] * shape[1] * shape[2] * pieces.element_size()
    memory = HostMemory(num_bytes, is_pinned=kv_cache.is_cuda)
    slots = memory.tensor.view(pieces.dtype).view(shape)
    return (CudaCopies if kv_cache.is_cuda else CpuCopies)(pieces, slots, memory)


def pieces_of(kv_cache: Tensor) -> Tensor:
    """Return the cache as `[2 * layers, num_blocks, width]`, in units of eight bytes if
    possible.
    """
    if kv_cache.shape[-1] * kv_cache.element_size() % 8 == 0:
        kv_cache = kv_cache.view(torch.int64)
    layers, _, num_blocks = kv_cache.shape[:3]
    return kv_cache.view(2 * layers, num_blocks, -1)


class Rows:
    """Blocks as rows of one matrix.

    NOTE: a matrix, because torch splits an operation on a tensor of more than 2 GB with more
    dimensions into one per 2 GB.
    """

    def __init__(self, pieces: Tensor) -> None:
        """Take the result of `pieces_of`."""
        count, self._num_blocks, width = pieces.shape
        self._matrix = pieces.view(-1, width)
        self._first = self._num_blocks * np.arange(count, dtype=np.int64)

    def places(self, blocks: Sequence[int]) -> Tensor:
        """Return the rows of blocks, block by block; int64, on the host."""
        return torch.from_numpy(np.add.outer(np.array(blocks, np.int64), self._first).ravel())

    def gather(self, places: Tensor, out: Tensor) -> None:
        torch.index_select(self._matrix, 0, places, out=out.view(len(places), -1))

    def scatter(self, places: Tensor, source: Tensor) -> None:
        """Copy `source`, of the same shape, into rows."""
        self._matrix.index_copy_(0, places, source.view(len(places), -1))


class HostMemory:
    """Host memory as bytes, which a GPU can read and write if it is pinned.

    Pinned in place: torch's own allocator of pinned memory rounds up to a power of two, up to twice
    the size.
    """

    def __init__(self, num_bytes: int, *, is_pinned: bool) -> None:
        """Allocate the memory; pinned memory is resident at once, other memory on use.

        Raises:
            SettingsError: the host has too little memory.
        """
        free = free_memory_bytes(torch.device("cpu"))
        if num_bytes > free:
            raise SettingsError(
                "host_memory_gb",
                f"{num_bytes / 1e9:.3g} GB are asked for, {free / 1e9:.3g} GB of the host's memory "
                "are free",
            )
        self._is_pinned = False
        if not is_pinned:
            self.tensor = torch.empty(num_bytes, dtype=torch.uint8)
            return
        try:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise SettingsError(
                "host_memory_gb", f"the host gives no {num_bytes / 1e9:.3g} GB: {error}"
            ) from error
        # Pinning takes a page at a time, so ask for large pages; no effect on systems without them.
        with suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        problem = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), num_bytes, 0)
        if int(problem) != 0:
            raise SettingsError(
                "host_memory_gb",
                f"{num_bytes / 1e9:.3g} GB of host memory cannot be pinned ({problem}): give less, "
                "or raise the limit of locked memory",
            )
        self._is_pinned = True

    def close(self) -> None:
        """Release the memory; nothing may use it any more. May be called twice."""
        if self._is_pinned:
            self._is_pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        self.tensor = torch.empty(0, dtype=torch.uint8)


class _Done:
    """A finished copy; implements `Copy`."""

    def is_read(self) -> bool:
        return True

    def is_done(self) -> bool:
        return True


class CpuCopies:
    """Copies within host memory; implements `BlockCopies`."""

    def __init__(self, pieces: Tensor, slots: Tensor, memory: HostMemory) -> None:
        self.num_slots = len(slots)
        self.chunk = staging_blocks(slots[0].nbytes)
        self._blocks = pieces.transpose(0, 1)
        self._slots = slots
        self._memory = memory

    @torch.inference_mode()
    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Copy:
        for block, slot in zip(blocks, slots, strict=True):
            self._slots[slot] = self._blocks[block]
        return _Done()

    @torch.inference_mode()
    def load(
        self, slots: Sequence[int], blocks: Sequence[int], *, after: int, behind: Sequence[Copy]
    ) -> Copy:
        del after, behind
        for slot, block in zip(slots, blocks, strict=True):
            self._blocks[block] = self._slots[slot]
        return _Done()

    def before_launch(self, behind: Sequence[Copy]) -> None:
        """Nothing is in progress."""

    def after_launch(self, number: int) -> None:
        """Nothing depends on launches."""

    def close(self) -> None:
        del self._blocks, self._slots
        self._memory.close()


class _CudaCopy:
    """Marks in a stream; implements `Copy`."""

    def __init__(self) -> None:
        self.read = torch.cuda.Event()
        self.done = torch.cuda.Event()

    def is_read(self) -> bool:
        return bool(self.read.query())

    def is_done(self) -> bool:
        return bool(self.done.query())


class CudaCopies:
    """Copies that run concurrently with a GPU's steps; implements `BlockCopies`.

    Steps are launched on the current stream of the calling thread.
    """

    def __init__(self, pieces: Tensor, slots: Tensor, memory: HostMemory) -> None:
        self.num_slots = len(slots)
        self.chunk = staging_blocks(slots[0].nbytes)
        self._rows = Rows(pieces)
        self._slots = slots
        self._memory = memory
        self._device = pieces.device
        self._out, self._in = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        shape = (self.chunk, *slots.shape[1:])
        # NOTE: permanent buffers, because the allocator's memory belongs to one stream.
        self._leaving = torch.empty(shape, dtype=pieces.dtype, device=self._device)
        self._coming = torch.empty(shape, dtype=pieces.dtype, device=self._device)
        #: Marks behind the last steps' launches, with the steps' numbers.
        self._marks: deque[tuple[int, torch.cuda.Event]] = deque(maxlen=_MARKS)

    @torch.inference_mode()
    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Copy:
        """Start copying blocks out; see `BlockCopies`.

        Blocks need no mark to wait for: the host has seen the results of the steps that wrote them.
        """
        copy = _CudaCopy()
        with torch.cuda.stream(self._out):
            gathered = self._leaving[: len(blocks)]
            self._rows.gather(self._places(blocks), gathered)
            copy.read.record()
            for first, slot, count in _runs(slots):
                target = self._slots[slot : slot + count]
                target.copy_(gathered[first : first + count], non_blocking=True)
            copy.done.record()
        return copy

    @torch.inference_mode()
    def load(
        self, slots: Sequence[int], blocks: Sequence[int], *, after: int, behind: Sequence[Copy]
    ) -> Copy:
        copy = _CudaCopy()
        with torch.cuda.stream(self._in):
            for other in behind:
                assert isinstance(other, _CudaCopy)
                self._in.wait_event(other.done)
            arrived = self._coming[: len(slots)]
            for first, slot, count in _runs(slots):
                source = self._slots[slot : slot + count]
                arrived[first : first + count].copy_(source, non_blocking=True)
            places = self._places(blocks)
            # The results of launches without a mark were seen.
            for number, mark in self._marks:
                if number <= after:
                    self._in.wait_event(mark)
            self._rows.scatter(places, arrived)
            copy.read.record()
            copy.done.record()
        return copy

    def before_launch(self, behind: Sequence[Copy]) -> None:
        current = torch.cuda.current_stream(self._device)
        for other in behind:
            assert isinstance(other, _CudaCopy)
            current.wait_event(other.read)

    def after_launch(self, number: int) -> None:
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self._device))
        self._marks.append((number, mark))

    def close(self) -> None:
        self._out.synchronize()
        self._in.synchronize()
        del self._rows, self._slots, self._leaving, self._coming
        self._memory.close()

    def _places(self, blocks: Sequence[int]) -> Tensor:
        """Return the rows of blocks on the device, in the order of the current stream."""
        return self._rows.places(blocks).pin_memory().to(self._device, non_blocking=True)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of consecutive numbers: position of the start, first number, and length."""
    first = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield first, numbers[first], index - first
            first = index
