"""How much memory a device has left, for sizing the KV cache."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def free_memory_bytes(device: torch.device) -> int:
    """Memory that may still be taken on `device`.

    On a GPU what the driver reports; on the CPU what the kernel thinks available, within the
    limit of the container.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    limits = [_host_available(), _container_available()]
    return min(limit for limit in limits if limit is not None)


def _host_available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _container_available(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a cgroup v2 limit leaves; None without one."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)
