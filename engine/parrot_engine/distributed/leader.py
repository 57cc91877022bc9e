"""A runner whose model is spread over several processes, seen from the first of them."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from parrot_engine.distributed.collective import TorchCollective
from parrot_engine.distributed.worker_group import LOAD_TIMEOUT_S, START_TIMEOUT_S, Followers
from parrot_engine.exceptions import SettingsError
from parrot_engine.models.loader import load_runner, read_model_config, resolve_device
from parrot_engine.models.sharding import Shard, shard_config
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.settings import BuiltinSettings

_log = logging.getLogger(__name__)


class Lead:
    """What rank 0 holds besides its part of the model."""

    def __init__(self, path: Path, settings: BuiltinSettings, devices: list[str]) -> None:
        """Start the others, which begin to load the model in `path`."""
        # NOTE: a folder that nobody else may enter: who writes into the store is believed.
        self._folder = tempfile.TemporaryDirectory(prefix="parrot-ranks-")
        self._store = Path(self._folder.name) / "store"
        self._collective: TorchCollective | None = None
        self.followers = Followers(path, settings, self._store, devices)

    def meet(self, shard: Shard, device: torch.device) -> TorchCollective:
        """Wait for the others, and join them."""
        self.followers.wait_until("here", START_TIMEOUT_S)
        self._collective = TorchCollective(shard, self._store, device)
        return self._collective

    def close(self) -> None:
        """End the others, and what was common with them."""
        # Leaving a group waits for the GPU.
        is_stuck = self.followers.is_stuck
        self.followers.dismiss()
        if self._collective is not None:
            if is_stuck or not self._collective.leave():
                _log.warning("work in which all ranks take part does not end")
            self._collective = None
        self.followers.close()
        self._folder.cleanup()


def load_leading_runner(
    path: Path, settings: BuiltinSettings, progress: Callable[[int, int], None] | None = None
) -> ModelRunner:
    """As `load_runner`, over `settings.tensor_parallel` processes.

    Raises:
        ShardError: another rank could not be started or could not load its part.
    """
    size = settings.tensor_parallel
    shard = Shard(0, size)
    shard_config(read_model_config(path), shard)
    devices = _devices(settings.device, size)
    lead = Lead(path, settings, devices)
    try:
        with lead.followers.together():
            device = torch.device(devices[0])
            if device.type == "cuda":
                torch.cuda.set_device(device)
            collective = lead.meet(shard, device)
            own = replace(settings, device=devices[0])
            runner = load_runner(path, own, progress, collective=collective)
            lead.followers.wait_until("ready", LOAD_TIMEOUT_S)
    except BaseException:
        lead.close()
        raise
    runner.lead(lead)
    return runner


def _devices(name: str, size: int) -> list[str]:
    first = resolve_device(name)
    if first.type == "cpu":
        return ["cpu"] * size
    begin, there = first.index, torch.cuda.device_count()
    if begin + size > there:
        raise SettingsError(
            "tensor_parallel",
            f"{size} GPUs from {first} on are asked for, torch sees {there}",
        )
    return [f"cuda:{index}" for index in range(begin, begin + size)]
