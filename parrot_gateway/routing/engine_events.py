"""Forwards engine events to the scheduler: joins, departures, cached blocks, step times."""

from __future__ import annotations

from parrot_engine.protocol import BlockChanges, EngineInfo
from parrot_scheduler.events import (
    BlocksEvicted,
    BlocksStored,
    EngineDraining,
    EngineJoined,
    EngineResumed,
)
from parrot_scheduler.events import EngineReport as Report
from parrot_scheduler.task import DEFAULT_STEP_MODEL, EngineDescription, StepModel

from parrot_gateway.backends.own.registry import Change, EngineRegistry
from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.routing.placer import POOLING_STEPS, SchedulerRunner, capacity_tokens
from parrot_gateway.routing.step_times import Scale, StepTimes

#: What an engine on a CPU is taken for until it has been measured: the demo model's figures, from
#: processor time of one thread with 1 to 16 contexts of 64 to 1,500 tokens. A row of a step costs
#: there what it never does on a GPU.
CPU_STEP_MODEL = StepModel(
    weights_s=4e-3, context_token_s=2e-6, prefill_token_s=2e-4, overhead_s=1e-3, sequence_s=3.6e-4
)

#: Kinds of engines whose step times are remembered.
_MAX_KINDS = 256


class EngineEventForwarder:
    """Listens to a registry and notifies the scheduler.

    Args:
        registry: of the engines.
        runner: the scheduler.
    """

    def __init__(self, registry: EngineRegistry, runner: SchedulerRunner) -> None:
        self._runner = runner
        self._step_times: dict[str, StepTimes] = {}
        #: By model, device and dtype; the oldest goes when there are too many.
        self._scales: dict[tuple[str, str, str], Scale] = {}
        registry.subscribe(self._changed)
        registry.observe(self)

    def _changed(self, change: Change, engine: RemoteEngine) -> None:
        if change == "joined":
            guess = _step_model(engine.info)
            info = engine.info
            self._step_times[engine.id] = StepTimes(
                guess, info.num_blocks * info.block_size, info.block_size, self._scale_of(info)
            )
            self._runner.notify(EngineJoined(describe(engine.id, engine.info, guess)))
        elif change in ("draining", "drained"):
            self._runner.notify(EngineDraining(engine.id))
        elif change == "resumed":
            self._runner.notify(EngineResumed(engine.id))
        else:
            self._step_times.pop(engine.id, None)
            self._runner.engine_left(engine.id)

    def _scale_of(self, info: EngineInfo) -> Scale:
        """Return the scale that engines of its kind share."""
        kind = (info.model, info.device.partition(":")[0], info.dtype)
        if kind not in self._scales and len(self._scales) >= _MAX_KINDS:
            del self._scales[next(iter(self._scales))]
        return self._scales.setdefault(kind, Scale())

    def blocks_changed(self, engine: RemoteEngine, changes: BlockChanges) -> None:
        if changes.evicted:
            self._runner.notify(BlocksEvicted(engine.id, tuple(changes.evicted)))
        if changes.stored:
            self._runner.notify(BlocksStored(engine.id, tuple(changes.stored)))

    def stats_changed(self, engine: RemoteEngine) -> None:
        times = self._step_times.get(engine.id)
        stats, info = engine.stats, engine.info
        model = None if times is None else times.note(stats)
        used = (info.num_blocks - stats.free_blocks) * info.block_size
        self._runner.notify(Report(engine.id, stats.running, stats.waiting, max(0, used), model))


def describe(engine_id: str, info: EngineInfo, step_model: StepModel) -> EngineDescription:
    """The engine as the scheduler's type."""
    return EngineDescription(
        id=engine_id,
        model=info.model,
        capacity_tokens=capacity_tokens(info),
        max_batch=info.max_batch_size * (1 if info.generates else POOLING_STEPS),
        max_batch_tokens=info.max_batch_tokens or info.max_context_tokens,
        block_tokens=info.block_size,
        reports_blocks=info.reports_blocks,
        host_tokens=info.host_blocks * info.block_size,
        step_model=step_model,
    )


def _step_model(info: EngineInfo) -> StepModel:
    return CPU_STEP_MODEL if info.device.startswith("cpu") else DEFAULT_STEP_MODEL
