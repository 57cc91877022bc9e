"""How fast the device can be at all, and how long something takes on it.

Limits are measured in the same run as what is compared with them: bytes by a large copy,
arithmetic by a large matrix product, both on random data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Limits(NamedTuple):
    """Measured limits of one device."""

    #: Bytes read plus bytes written per second of a large copy.
    bytes_per_s: float
    #: bf16 matrix product of 8,192 cubed.
    flops_per_s: float


def time_s(work: Callable[[], Any], *, repeats: int = 20, calls: int = 1) -> float:
    """Seconds of one call of `work` on the device: the median over replays of a CUDA graph.

    The graph holds `calls` calls: starting one costs some microseconds.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    for _ in range(3):
        graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return sorted(times)[len(times) // 2] / calls


def measure_limits() -> Limits:
    """Limits of the current device; takes some 10 GB of its memory while it runs."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    # NOTE: not in a graph, where a copy takes another way at two thirds of the speed.
    copy_s = _eager_s(lambda: target.copy_(source))
    size = 8192
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    matmul_s = _eager_s(lambda: torch.mm(a, b, out=product))
    return Limits(2 * source.nbytes / copy_s, 2 * size**3 / matmul_s)


def _eager_s(work: Callable[[], Any], calls: int = 20) -> float:
    for _ in range(3):
        work()
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / calls
