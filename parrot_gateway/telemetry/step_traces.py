"""Spans of what engines compute between two of their heartbeats, for a share of these times."""

from __future__ import annotations

import random
import time
from typing import NamedTuple
from weakref import WeakKeyDictionary

from parrot_engine.protocol import BlockChanges, EngineStats

from parrot_gateway.engines.remote import RemoteEngine
from parrot_gateway.telemetry.span_fields import step_attributes
from parrot_gateway.telemetry.span_writer import SpanWriter
from parrot_gateway.telemetry.trace_context import is_sampled


class _Heartbeat(NamedTuple):
    stats: EngineStats
    at_ns: int


class StepTracer:
    """An `EngineObserver`; an engine that computes nothing gets no span.

    Args:
        writer: takes the spans, each a trace of its own.
        ratio: share of the times between heartbeats that get one.
    """

    def __init__(self, writer: SpanWriter, ratio: float) -> None:
        self._writer = writer
        self._ratio = ratio
        self._last: WeakKeyDictionary[RemoteEngine, _Heartbeat] = WeakKeyDictionary()

    def stats_changed(self, engine: RemoteEngine) -> None:
        now = _Heartbeat(engine.stats, time.time_ns())
        last = self._last.get(engine)
        self._last[engine] = now
        trace_id = random.getrandbits(128) or 1
        if (
            last is None
            or now.stats.steps <= last.stats.steps
            or not is_sampled(trace_id, self._ratio)
        ):
            return
        span = self._writer.begin(
            f"steps {engine.name}",
            trace_id,
            random.getrandbits(64) or 1,
            last.at_ns,
            attributes=step_attributes(engine.name, engine.info, last.stats, now.stats),
        )
        span.end(now.at_ns)

    def blocks_changed(self, engine: RemoteEngine, changes: BlockChanges) -> None:
        """Nothing is traced of them."""
