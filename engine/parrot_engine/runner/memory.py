"""Memory of a device: the free part, the rest of a share, and the size of the KV cache on a GPU."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

from parrot_engine.exceptions import SettingsError

#: Size of each of the two device buffers through which blocks go to and from host memory, unless a
#: single block is larger.
STAGING_BYTES = 64 << 20


#: GPU memory of CUDA's context and libraries, besides torch's allocations.
_CONTEXT_BYTES = 768 << 20


def staging_blocks(bytes_per_block: int) -> int:
    return max(1, STAGING_BYTES // bytes_per_block)


def free_memory_bytes(device: torch.device) -> int:
    """Return the memory that is still available on `device`.

    On a GPU the driver reports it; on a CPU it is the kernel's estimate, within the container's
    limit.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    limits = [_host_available(), _container_available()]
    return min(limit for limit in limits if limit is not None)


def share_left_bytes(device: torch.device, share: float) -> int:
    """Return the bytes of its share of a device that this process can still take.

    Other processes' memory does not count, unless they take more than is left beside this share. On
    a CPU the device is the host, within the container's limit.
    """
    if device.type == "cuda":
        free, total = map(int, torch.cuda.mem_get_info(device))
        used = int(torch.cuda.memory_reserved(device)) + _CONTEXT_BYTES
    else:
        free, total = free_memory_bytes(device), _host_total()
        used = _resident_bytes()
    return max(0, min(free, int(share * total) - used))


def gpu_cache_blocks(
    *,
    bytes_per_block: int,
    total_bytes: int,
    free_bytes: int,
    step_bytes: int,
    graph_bytes: int,
    utilization: float,
    setting: str = "gpu_memory_utilization",
) -> int:
    """Return the blocks of the KV cache on a GPU that fit into the usable share.

    Args:
        bytes_per_block: bytes over all layers, keys and values.
        total_bytes: memory of the GPU.
        free_bytes: free part of it once the weights are loaded; others may use it too.
        step_bytes: memory of the largest step besides weights and cache.
        graph_bytes: reserved for CUDA graphs.
        utilization: share of the GPU's memory that may be used in total.
        setting: setting to name if there is no room.

    Raises:
        SettingsError: there is no room for a single block.
    """
    usable = free_bytes - int((1 - utilization) * total_bytes) - step_bytes - graph_bytes
    blocks = usable // bytes_per_block
    if blocks < 1:
        raise SettingsError(
            setting,
            f"it leaves nothing for the KV cache: of {total_bytes} bytes {free_bytes} "
            f"are free beside the weights, the largest step takes {step_bytes}, CUDA graphs "
            f"{graph_bytes}, and one block {bytes_per_block}; raise it, lower max_batch_tokens, "
            "or take a smaller model",
        )
    return blocks


def _host_available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _container_available(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes left by a cgroup v2 limit; None without a limit."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def _host_total(root: Path = Path("/sys/fs/cgroup")) -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = (root / "memory.max").read_text().strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))


def _resident_bytes() -> int:
    """Return this process's resident memory on the host."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")
