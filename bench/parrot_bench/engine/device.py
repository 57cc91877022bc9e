"""Limits of a device, and the least times that they allow a model.

Limits are measured in the same run as the figures compared with them: bytes by a large copy,
arithmetic by a large matrix product, both on random data.

A decode step takes at least the time to read all weights and keys once, and at least that of its
arithmetic; a prefill at least that of its arithmetic. Activations, norms and new keys are left out:
the bounds are low.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from parrot_engine.attention.storage import is_quantized, token_bytes
from parrot_engine.models.config import ModelConfig

from parrot_bench.machine import describe

#: Packages whose versions move the figures.
_PACKAGES = ("torch", "triton", "numpy", "transformers", "vllm", "parrot-gateway")


class Limits(NamedTuple):
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


class Segment(NamedTuple):
    """A run of prompt tokens that are computed once, behind `start` others."""

    start: int
    length: int


class Bounds(NamedTuple):
    config: ModelConfig
    dtype: torch.dtype
    limits: Limits
    #: Whether the KV cache is of float8 with scales, not of `dtype`.
    kv_quantized: bool = False

    @property
    def layer_weights(self) -> int:
        """Weights that every token meets: all products of all layers, experts left out."""
        config, experts = self.config, self.config.experts
        heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
        num_sparse = 0 if experts is None else len(experts.layers)
        columns = config.num_layers * heads
        columns += (config.num_layers - num_sparse) * 3 * config.intermediate_size
        if experts is not None:
            columns += num_sparse * experts.count
        return config.hidden_size * columns

    def expert_weights(self, experts_met: float) -> float:
        """Weights of `experts_met` experts of each mixture."""
        experts = self.config.experts
        if experts is None:
            return 0
        each = 3 * self.config.hidden_size * experts.intermediate_size
        return len(experts.layers) * experts_met * each

    def experts_met(self, rows: int) -> float:
        """Experts of a mixture that as many tokens need, if all experts are as probable."""
        experts = self.config.experts
        if experts is None:
            return 0
        return float(experts.count * (1 - (1 - experts.top_k / experts.count) ** rows))

    @property
    def _top_k(self) -> int:
        return 0 if self.config.experts is None else self.config.experts.top_k

    @property
    def head_weights(self) -> int:
        """Weights of the output head, which only tokens with logits meet."""
        return self.config.vocab_size * self.config.hidden_size

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token, all layers together."""
        config = self.config
        return config.num_layers * token_bytes(
            config.num_kv_heads, config.head_dim, self.dtype, quantized=self.kv_quantized
        )

    def step_s(self, rows: int, kv_tokens: float, attended: float) -> float:
        """Seconds of a step of `rows` decodes.

        Args:
            rows: decodes, one token each.
            kv_tokens: tokens whose keys and values are read, shared ones once.
            attended: tokens that the rows attend to, summed over rows.
        """
        weights = self.layer_weights + self.head_weights
        itemsize, quantization = int(self.dtype.itemsize), self.config.quantization
        moved = self.head_weights * itemsize + kv_tokens * self.kv_bytes
        moved += (self.layer_weights + self.expert_weights(self.experts_met(rows))) * (
            itemsize if quantization is None else quantization.bytes_per_weight
        )
        flops = 2 * (weights + self.expert_weights(self._top_k)) * rows
        flops += self._attention_flops(attended)
        return max(moved / self.limits.bytes_per_s, flops / self.limits.flops_per_s)

    def prefill_s(self, segments: Sequence[Segment], rows: int) -> float:
        """Seconds to compute segments, `rows` tokens of which get logits."""
        tokens = sum(segment.length for segment in segments)
        attended = sum(s.length * (s.start + (s.length + 1) / 2) for s in segments)
        weights = self.layer_weights + self.expert_weights(self._top_k)
        flops = 2 * (weights * tokens + self.head_weights * rows)
        return (flops + self._attention_flops(attended)) / self.limits.flops_per_s

    def _attention_flops(self, attended: float) -> float:
        config = self.config
        return 4 * config.num_layers * config.num_heads * config.head_dim * attended


def bounds_of(
    config: ModelConfig,
    dtype: str,
    limits: Limits | None,
    devices: int = 1,
    *,
    kv_cache_dtype: str = "auto",
) -> Bounds | None:
    """Bounds of a model on a number of devices that share all work and need no time to talk.

    None without limits, and for models with sliding windows.
    """
    if limits is None or any(window is not None for window in config.windows):
        return None
    together = Limits(*(devices * limit for limit in limits))
    quantized = is_quantized(kv_cache_dtype, config.head_dim)
    return Bounds(config, getattr(torch, dtype), together, quantized)


def machine(device: torch.device) -> dict[str, Any]:
    """The machine, its GPU, and the software."""
    described: dict[str, Any] = {"device": "cpu", **describe(_PACKAGES)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {
            "device": properties.name,
            "device_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return described


def memory(device: torch.device) -> dict[str, int]:
    """Memory in use now, in bytes: of the GPU by all processes, or the peak of this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return {
            "device_bytes": total - free,
            "torch_peak_bytes": torch.cuda.max_memory_reserved(device),
        }
    return {"process_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
