"""Turns a checkpoint directory into a runner: loads the model, sizes the KV cache, captures
graphs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from parrot_engine.adapters.slots import AdapterSlots
from parrot_engine.attention.storage import is_quantized
from parrot_engine.exceptions import SettingsError
from parrot_engine.kernels.selection import Kernels, check_kv_cache_dtype, resolve_kernels
from parrot_engine.models.config import GenerationDefaults
from parrot_engine.models.decoder import Decoder
from parrot_engine.models.loader import Progress, build_empty, load_model, resolve_device
from parrot_engine.models.sharding import Collective, Shard
from parrot_engine.progress import ProgressLines
from parrot_engine.runner.memory import (
    free_memory_bytes,
    gpu_cache_blocks,
    share_left_bytes,
    staging_blocks,
)
from parrot_engine.runner.model_runner import ModelRunner, kv_bytes_per_block
from parrot_engine.runner.paged_model import ModelShape, PagedModel
from parrot_engine.runner.profiling import step_bytes
from parrot_engine.settings import BuiltinSettings, kv_blocks

_log = logging.getLogger(__name__)


class RankCollective(Collective, Protocol):
    """The operations that ranks use to load together."""

    def use_peer_memory(self, hidden_size: int, dtype: torch.dtype) -> bool:
        """Use peer memory for sums over few tokens, if that works for every rank."""
        ...

    def least(self, value: int) -> int: ...


def load_runner(
    path: Path,
    settings: BuiltinSettings,
    progress: Progress | None = None,
    *,
    collective: RankCollective | None = None,
    make: Callable[..., ModelRunner] = ModelRunner,
) -> ModelRunner:
    """Load the checkpoint in directory `path` and make this process's runner with a KV cache.

    With `collective` the runner is one rank's; all ranks must load at the same time. `make` is
    `ModelRunner`, or makes a subclass of it from the same arguments.

    Sets torch's thread count for the process when the device is the CPU, and the thread's current
    device when it is a GPU.

    Raises:
        UnsupportedModelError: this engine cannot run the model.
        CheckpointError: files are missing, broken, or do not fit the configuration.
        SettingsError: device, dtype or cache size is not available.
    """
    device, kernels = prepare_device(settings)
    try:
        with _timed("reading the weights"):
            model, defaults, spec = load_model(
                path,
                device,
                settings.dtype,
                progress,
                kernels=kernels,
                dummy_seed=(settings.seed or 0) if settings.dummy_weights else None,
                collective=collective,
                expert_parallel=settings.enable_expert_parallel,
                deterministic=settings.deterministic,
            )
    except torch.cuda.OutOfMemoryError as error:
        raise SettingsError(
            "device", f"the weights do not fit into the memory of {device}: {error}"
        ) from error

    whole = None
    if collective is not None and settings.max_loras:
        whole = build_empty(path), collective.shard
    adapters = adapter_slots(model, settings, device, spec.dtype, whole)
    if collective is not None and settings.peer_memory and kernels == "triton":
        collective.use_peer_memory(model.config.hidden_size, spec.dtype)
    return runner_of(
        model,
        defaults,
        settings,
        device,
        spec.dtype,
        kernels,
        collective=collective,
        adapters=adapters,
        make=make,
    )


def prepare_device(settings: BuiltinSettings) -> tuple[torch.device, Kernels]:
    """Choose the device and kernels of a model; see `load_runner` for side effects.

    Raises:
        SettingsError: device, kernels or dtype of the cache is not available.
    """
    device = resolve_device(settings.device)
    if device.type == "cpu":
        torch.set_num_threads(settings.num_threads)
    else:
        # Graphs are captured on this thread's current device.
        torch.cuda.set_device(device)
    kernels = resolve_kernels(settings.kernels, device)
    check_kv_cache_dtype(settings.kv_cache_dtype, kernels, device)
    if settings.deterministic and kernels != "triton":
        raise SettingsError("deterministic", "needs Triton's kernels, which need a GPU")
    return device, kernels


def runner_of(
    model: PagedModel,
    defaults: GenerationDefaults,
    settings: BuiltinSettings,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Kernels,
    *,
    collective: RankCollective | None = None,
    adapters: AdapterSlots | None = None,
    make: Callable[..., ModelRunner] = ModelRunner,
    tries_graphs: bool = False,
) -> ModelRunner:
    """Make a runner for a loaded model, with a KV cache sized by settings or memory.

    With `tries_graphs`, a model that cannot be captured runs without graphs.

    Raises:
        SettingsError: there is no room for the cache or for steps.
    """

    def make_runner(num_blocks: int, make: Callable[..., ModelRunner] = ModelRunner) -> ModelRunner:
        return make(
            model,
            defaults,
            num_blocks=num_blocks,
            block_size=settings.block_size,
            device=device,
            dtype=dtype,
            kv_cache_dtype=settings.kv_cache_dtype,
            kernels=kernels,
            collective=collective,
            adapters=adapters,
            deterministic=settings.deterministic,
        )

    config = model.config
    longest = min(config.max_position, settings.max_context_tokens or config.max_position)
    with_graphs = device.type == "cuda" and kernels == "triton" and settings.cuda_graphs != "off"
    quantized = is_quantized(settings.kv_cache_dtype, config.head_dim)
    per_block = kv_bytes_per_block(config, settings.block_size, dtype, quantized=quantized)
    if device.type == "cuda" and settings.num_blocks is None and settings.kv_cache_bytes is None:
        with _timed("trying the largest step"):
            in_step = step_bytes(make_runner, settings, longest, device)
        if settings.has_host_tier:
            # Copies pass through two buffers on the device.
            in_step += 2 * staging_blocks(per_block) * per_block
        free, total = torch.cuda.mem_get_info(device)
        utilization, setting = settings.gpu_memory_utilization, "gpu_memory_utilization"
        if settings.memory_share is not None:
            free, utilization = share_left_bytes(device, settings.memory_share), 1.0
            setting = "memory_share"
        num_blocks = gpu_cache_blocks(
            bytes_per_block=per_block,
            total_bytes=total,
            free_bytes=free,
            step_bytes=in_step,
            graph_bytes=_graph_bytes(config, settings, in_step) if with_graphs else 0,
            utilization=utilization,
            setting=setting,
        )
    else:
        num_blocks = kv_blocks(
            settings,
            bytes_per_block=per_block,
            max_position=config.max_position,
            **_free_share(device, settings),
        )
    if collective is not None:
        num_blocks = collective.least(num_blocks)
    try:
        runner = make_runner(num_blocks, make)
    except torch.cuda.OutOfMemoryError as error:
        free = free_memory_bytes(device)
        raise SettingsError(
            "num_blocks",
            f"{num_blocks} blocks of {per_block} bytes do not fit into the {free} bytes that are "
            f"free beside the weights; {free // per_block} would",
        ) from error
    if with_graphs:
        longest = min(longest, num_blocks * settings.block_size)
        _use_graphs(runner, settings, longest, device, collective, tries=tries_graphs)
    return runner


def adapter_slots(
    model: Decoder,
    settings: BuiltinSettings,
    device: torch.device,
    dtype: torch.dtype,
    whole: tuple[Decoder, Shard] | None = None,
) -> AdapterSlots | None:
    """Reserve adapter slots for a model, or for its part of `whole`, if settings ask for any.

    Raises:
        SettingsError: there is not enough memory.
    """
    if not settings.max_loras:
        return None
    try:
        rank = settings.max_lora_rank
        return AdapterSlots(model, settings.max_loras, rank, device, dtype, whole)
    except torch.cuda.OutOfMemoryError as error:
        raise SettingsError(
            "max_loras",
            f"{settings.max_loras} adapters of rank {settings.max_lora_rank} do not fit into the "
            f"memory of {device} beside the weights: {error}",
        ) from error


def _free_share(device: torch.device, settings: BuiltinSettings) -> dict[str, Any]:
    """Return the memory for a cache without a set size, as arguments of `kv_blocks`."""
    if settings.memory_share is None:
        return {"free_bytes": free_memory_bytes(device)}
    # A tenth is left for steps.
    return {"free_bytes": share_left_bytes(device, settings.memory_share), "memory_share": 0.9}


def _graph_bytes(config: ModelShape, settings: BuiltinSettings, in_step: int) -> int:
    from parrot_engine.runner.graphs import graph_bytes

    return graph_bytes(
        settings.max_batch_tokens,
        vocab_size=config.vocab_size,
        step_bytes=in_step,
        slot_bytes=4 * config.num_heads * (config.head_dim + 1),
        with_adapters=settings.max_loras > 0,
    )


def _use_graphs(
    runner: ModelRunner,
    settings: BuiltinSettings,
    longest: int,
    device: torch.device,
    collective: RankCollective | None,
    *,
    tries: bool,
) -> None:
    from parrot_engine.runner.graphs import Capture, CudaCapture, RequiredCapture, TriedCapture

    capture: Capture = CudaCapture(device)
    if tries:
        capture = TriedCapture(capture)
    if collective is not None:
        # Without a graph on one rank, the others would wait for its launches.
        capture = RequiredCapture(capture)
    graphs = runner.use_graphs(
        capture,
        max_rows=settings.max_batch_size,
        max_context=longest,
        max_tokens=settings.max_batch_tokens,
    )
    if graphs is None:
        return
    graphs.ahead = settings.cuda_graphs == "auto" and collective is None
    # Ranks must capture together, and an idle rank cannot tell the others.
    if settings.cuda_graphs == "start" or (settings.cuda_graphs == "auto" and not graphs.ahead):
        is_first = collective is None or collective.shard.rank == 0
        with _timed("capturing CUDA graphs"):
            graphs.capture_all(ProgressLines("capturing CUDA graphs") if is_first else None)


@contextmanager
def _timed(work: str) -> Iterator[None]:
    """Log the time of a part of loading."""
    began = time.perf_counter()
    yield
    _log.info("%s took %.1f s", work, time.perf_counter() - began)
