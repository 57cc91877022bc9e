"""Rank 0 of a tensor-parallel engine: its runner, and the workers that it leads.

Every step launched here is sent to the workers, which compute their parts; sampling happens on this
rank only.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parrot_engine.batch import Launch, StepBatch
from parrot_engine.distributed.collective import TorchCollective
from parrot_engine.distributed.rank_adapters import LeaderAdapters
from parrot_engine.distributed.step_message import StepMessage
from parrot_engine.distributed.worker_group import LOAD_TIMEOUT_S, START_TIMEOUT_S, WorkerGroup
from parrot_engine.exceptions import SettingsError
from parrot_engine.models.loader import read_model_config, resolve_device
from parrot_engine.models.sharding import Shard, shard_config
from parrot_engine.runner.loader import load_runner
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.runner.sampler import StepLogits
from parrot_engine.settings import BuiltinSettings

_log = logging.getLogger(__name__)

#: Runners whose graphs may still run, in work that waits for a lost rank. Destroying such a graph
#: waits for its end, which never comes, and blocks all other threads. So they are kept until the
#: process ends.
_STUCK: list[LeaderRunner] = []


class RankGroup:
    """The processes of one engine: the workers, and their shared resources with rank 0, this
    process.
    """

    def __init__(self, path: Path, settings: BuiltinSettings, devices: list[str]) -> None:
        """Start the workers, which begin to load the model in `path`."""
        # NOTE: a private folder, because the store's content is trusted.
        self._folder = tempfile.TemporaryDirectory(prefix="parrot-ranks-")
        self._store = Path(self._folder.name) / "store"
        self._collective: TorchCollective | None = None
        self.workers = WorkerGroup(path, settings, self._store, devices)

    def join(self, shard: Shard, device: torch.device) -> TorchCollective:
        """Wait for the workers, and join the collective group with them."""
        self.workers.wait_until("here", START_TIMEOUT_S)
        self._collective = TorchCollective(shard, self._store, device)
        return self._collective

    def close(self) -> None:
        """End the workers, and leave the collective group."""
        # Leaving a group waits for the GPU.
        is_stuck = self.workers.is_stuck
        self.workers.dismiss()
        if self._collective is not None:
            if is_stuck or not self._collective.leave():
                _log.warning("work in which all ranks take part does not end")
            self._collective = None
        self.workers.close()
        self._folder.cleanup()


class LeaderRunner(ModelRunner):
    """Executes rank 0's part of every step, and makes the workers execute theirs."""

    def __init__(self, *model: Any, group: RankGroup, **options: Any) -> None:
        """Make a runner; the workers of `group` have runners with the same settings."""
        super().__init__(*model, **options)
        self.group: RankGroup | None = group
        if self.adapters is not None:
            self.adapters = LeaderAdapters(self.adapters, group.workers)

    def launch(self, batch: StepBatch) -> Launch:
        """Launch a step on all ranks; see `ModelRunner.launch`.

        Raises:
            ShardError: a rank is lost or has failed, so nothing more can be launched.
        """
        step = super().launch(batch)
        return step if self.group is None else self.group.workers.watch(step)

    def share_prefixes(self, enabled: bool) -> bool:
        """Return false: each rank has its own attention, so there is no choice."""
        del enabled
        return False

    def check(self) -> None:
        if self.group is not None:
            self.group.workers.check()

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Register a callback that is called, in any thread, when a worker is lost."""
        if self.group is not None:
            self.group.workers.on_loss(callback)

    def close(self) -> None:
        """End the workers; nothing may be launched afterwards."""
        group, self.group = self.group, None
        if group is None:
            return
        if group.workers.is_stuck:
            _STUCK.append(self)
        else:
            self.forget_graphs()
        group.close()

    def _forward(self, batch: StepBatch) -> StepLogits:
        if self.group is None:
            return super()._forward(batch)
        with self.group.workers.together():
            self.group.workers.send(StepMessage(batch, len(self._sampled)))
            return super()._forward(batch)


def load_leader_runner(
    path: Path, settings: BuiltinSettings, progress: Callable[[int, int], None] | None = None
) -> LeaderRunner:
    """Do the work of `load_runner` over `settings.tensor_parallel` processes.

    Raises:
        ShardError: another rank could not be started or could not load its part.
    """
    size = settings.tensor_parallel
    shard = Shard(0, size)
    shard_config(read_model_config(path), shard, expert_parallel=settings.enable_expert_parallel)
    devices = _devices(settings.device, size)
    group = RankGroup(path, settings, devices)
    try:
        with group.workers.together():
            device = torch.device(devices[0])
            if device.type == "cuda":
                torch.cuda.set_device(device)
            collective = group.join(shard, device)
            own = replace(settings, device=devices[0])
            make = partial(LeaderRunner, group=group)
            runner = load_runner(path, own, progress, collective=collective, make=make)
            group.workers.wait_until("ready", LOAD_TIMEOUT_S)
    except BaseException:
        group.close()
        raise
    assert isinstance(runner, LeaderRunner)
    return runner


def _devices(name: str, size: int) -> list[str]:
    first = resolve_device(name)
    if first.type == "cpu":
        return ["cpu"] * size
    begin, there = first.index, torch.cuda.device_count()
    if begin + size > there:
        raise SettingsError(
            "tensor_parallel", f"{size} GPUs from {first} on are asked for, torch sees {there}"
        )
    return [f"cuda:{index}" for index in range(begin, begin + size)]
