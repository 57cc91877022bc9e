"""The engines of one simulation: they join, report to the scheduler, now or late, and leave."""

from __future__ import annotations

from typing import Protocol

from parrot_scheduler.events import (
    BlocksEvicted,
    BlocksStored,
    EngineDraining,
    EngineJoined,
    EngineLeft,
    EngineReport,
    Event,
    TaskProgress,
)
from parrot_scheduler.task import EngineId

from parrot_bench.simulator.clock import Clock
from parrot_bench.simulator.engines.engine import SimulatedEngine
from parrot_bench.simulator.engines.sequences import EngineSequence
from parrot_bench.simulator.metrics import EngineUse, Timeline
from parrot_bench.simulator.options import EngineChange, SimulationOptions


class Gateway(Protocol):
    """Receives what engines do."""

    def notify(self, event: Event, _: object = None) -> None:
        """An event for the scheduler, at once."""
        ...

    def ended(self, sequence: EngineSequence) -> None:
        """A sequence is done, or `failed`."""
        ...

    def lost(self, sequence: EngineSequence) -> None:
        """A sequence was on an engine that has left."""
        ...


class Fleet:
    """The engines, by id; implements `engine.Listener`.

    Args:
        options: profiles, of which each is an engine that has joined by the time this returns;
            staleness, changes, and whether timelines are recorded.
        clock: the simulation's.
        gateway: receives what they do.
    """

    def __init__(self, options: SimulationOptions, clock: Clock, gateway: Gateway) -> None:
        self._options = options
        self._staleness = options.staleness
        self._clock = clock
        self._gateway = gateway
        self.engines: dict[EngineId, SimulatedEngine] = {}
        self.timelines: dict[str, Timeline] = {}
        self._reported_at: dict[EngineId, float] = {}
        self._left: list[EngineUse] = []
        for index in range(len(options.engines)):
            self._join(index)
        for change in options.changes:
            clock.at(change.at_s, self._apply, change)

    def uses(self) -> list[EngineUse]:
        """What each engine did until now or until it left, those that have left first."""
        return [*self._left, *(engine.use for engine in self.engines.values())]

    def _join(self, index: int) -> None:
        profile = self._options.engines[index]
        engine_id = f"engine-{index}"
        timeline = None
        if self._options.timelines:
            timeline = self.timelines.setdefault(engine_id, Timeline())
        engine = SimulatedEngine(engine_id, profile, self, timeline)
        self.engines[engine_id] = engine
        self._reported_at[engine_id] = float("-inf")
        self._gateway.notify(EngineJoined(profile.description(engine_id)))

    def _apply(self, change: EngineChange, _: object) -> None:
        engine_id = f"engine-{change.engine}"
        engine = self.engines.get(engine_id)
        if change.what == "join":
            if engine is None:
                self._join(change.engine)
        elif engine is None:
            return
        elif change.what == "drain":
            self._gateway.notify(EngineDraining(engine_id))
        else:
            lost = engine.stop(self._clock.now)
            self._left.append(engine.use)
            del self.engines[engine_id]
            self._gateway.notify(EngineLeft(engine_id))
            for sequence in lost:
                self._gateway.lost(sequence)

    def _notify(self, event: Event, delay_s: float) -> None:
        if delay_s > 0:
            self._clock.at(self._clock.now + delay_s, self._gateway.notify, event)
        else:
            self._gateway.notify(event)

    # Events of engines

    def wake_engine(self, engine: SimulatedEngine, time: float, version: int) -> None:
        self._clock.at(time, self._wake, engine, version)

    def _wake(self, engine: SimulatedEngine, version: int) -> None:
        engine.wake(self._clock.now, version)

    def loaded(self, engine: SimulatedEngine, sequence: EngineSequence, time: float) -> None:
        self._clock.at(time, self._finish_loading, engine, sequence)

    def _finish_loading(self, engine: SimulatedEngine, sequence: EngineSequence) -> None:
        engine.finish_loading(self._clock.now, sequence)

    def filled(self, engine: SimulatedEngine, sequence: EngineSequence, now: float) -> None:
        event = TaskProgress(
            sequence.task_id,
            min(sequence.computed, sequence.prompt.tokens),
            sequence.cached,
            sequence.generated,
        )
        self._notify(event, self._staleness.progress_s)

    def ended(self, engine: SimulatedEngine, sequence: EngineSequence, now: float) -> None:
        self._gateway.ended(sequence)

    def stepped(self, engine: SimulatedEngine, now: float) -> None:
        staleness = self._staleness
        for is_stored, hashes in engine.cache.take_changes():
            kind = BlocksStored if is_stored else BlocksEvicted
            self._notify(kind(engine.id, hashes), staleness.blocks_s)
        if now - self._reported_at[engine.id] >= staleness.report_interval_s:
            self._reported_at[engine.id] = now
            report = EngineReport(engine.id, engine.running, engine.waiting, engine.used_tokens)
            if engine.profile.claims_idle:
                report = EngineReport(engine.id, 0, 0, 0)
            self._notify(report, staleness.report_s)
