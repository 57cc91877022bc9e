"""Memory of the host that a GPU can read and write by itself.

Pinned in place: torch's own allocator of pinned memory takes the next power of two, which may be
twice what was asked for.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from parrot_engine.exceptions import SettingsError
from parrot_engine.runner.memory import free_memory_bytes


class HostMemory:
    """A piece of host memory, as bytes."""

    def __init__(self, num_bytes: int, *, is_pinned: bool) -> None:
        """Take the memory; pinned memory is there at once, other memory as it is used.

        Raises:
            SettingsError: the host does not have so much.
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
        # Pinning takes a page at a time. Without effect where the system has no larger ones.
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
        """Give the memory back; nothing may use it any more. May be called twice."""
        if self._is_pinned:
            self._is_pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        self.tensor = torch.empty(0, dtype=torch.uint8)
