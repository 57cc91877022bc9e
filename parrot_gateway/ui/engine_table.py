"""Engines, upstreams, the scheduler and the gateway in the live page's form."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parrot_engine.protocol import EngineStats

from parrot_gateway.backends.own.registry import EngineRegistry
from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.backends.own.supervisor import EngineSupervisor
from parrot_gateway.backends.upstreams.client import Upstream
from parrot_gateway.routing.fleet.fleet import UpstreamFleet
from parrot_gateway.routing.placer import SchedulerRunner

#: Engines whose views are built in one turn of the event loop.
_AT_ONCE = 32
#: Shortest time over which rates are computed.
_LEAST_S = 0.5


@dataclass(slots=True)
class _Rates:
    """Rates of an engine between two of its heartbeats."""

    stats: EngineStats
    at: float
    prefix_hit_rate: float | None = None
    step_ms: float | None = None
    tokens_per_s: float | None = None
    read_once_per_step: float | None = None


class EngineTable:
    """Builds EngineViews, and the view of the scheduler.

    Args:
        registry: engines that have joined.
        supervisor: engine processes of our own.
        upstreams: by name.
        scheduling: places calls on engines.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        supervisor: EngineSupervisor,
        upstreams: Mapping[str, Upstream | UpstreamFleet],
        scheduling: SchedulerRunner,
    ) -> None:
        self._registry = registry
        self._supervisor = supervisor
        self._upstreams = upstreams
        self._scheduling = scheduling
        self._rates: dict[str, _Rates] = {}
        #: Joined engines, loading models, and upstreams; see `refresh`.
        self.engines: list[dict[str, Any]] = []

    def close(self) -> None:
        """Drop everything when nobody watches."""
        self._rates.clear()
        self.engines = []

    async def refresh(self) -> None:
        """Rebuild `engines`, some in each turn of the event loop."""
        prefixes: dict[str, list[tuple[int, int]]] = {}
        for number, (engine_id, shared) in enumerate(self._scheduling.shared_prefixes(), 1):
            prefixes[engine_id] = shared
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
        now, joined = time.monotonic(), self._registry.joined
        self._rates = {name: self._rates[name] for name in self._rates.keys() & joined.keys()}
        views = []
        for number, engine in enumerate(list(joined.values()), 1):
            views.append(self._engine(engine, now, prefixes.get(engine.id, [])))
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
        served = {engine.info.model for engine in joined.values()}
        views += [
            {**_NOTHING, "id": model, "name": model, "model": model, "kind": "engine",
             "state": "loading"}
            for model in self._supervisor.models()
            if model not in served and self._supervisor.state(model) == "loading"
        ]  # fmt: skip
        for upstream in self._upstreams.values():
            described = upstream.describe()
            views += [
                _upstream(each, upstream.name) for each in described.get("servers", [described])
            ]
        self.engines = views

    def scheduler(self) -> dict[str, Any]:
        """Return queues, and applications that wait for admission."""
        described = self._scheduling.describe()
        now = described["now"]
        return {
            "policy": described["policies"]["place"],
            "policies": described["policies"],
            "queues": [
                {"model": name, "waiting": model["queued"], "held": model["held"],
                 "oldest_s": round(model["oldest_wait_s"], 3)}
                for name, model in described["models"].items()
            ],
            "held": [
                {"application": each["application"], "tenant": each["tenant"], "model": name,
                 "why": each["reason"], "since": time.time() - max(0.0, now - each["since"]),
                 "tasks": each["tasks"]}
                for name, model in described["models"].items()
                for each in model["held_applications"]
            ],
            "decisions": described["placed"],
        }  # fmt: skip

    def _engine(
        self, engine: RemoteEngine, now: float, prefixes: list[tuple[int, int]]
    ) -> dict[str, Any]:
        stats, info, rates = engine.stats, engine.info, self._rates_of(engine, now)
        return {
            **_NOTHING,
            "id": engine.id,
            "name": engine.name,
            "model": info.model,
            "kind": info.kind,
            "state": "lost" if engine.lost else "serving" if engine.takes_calls else "draining",
            "running": engine.running,
            "waiting": stats.waiting,
            # Free blocks whose text can still be found count as cached, not used.
            "kv_used": info.num_blocks - stats.free_blocks if info.num_blocks else None,
            "kv_cached": stats.cached_blocks if info.num_blocks else None,
            "kv_total": info.num_blocks or None,
            "kv_unit": "blocks" if info.num_blocks else None,
            "kv_block_tokens": info.block_size or None,
            "max_batch_size": info.max_batch_size,
            "queued_tokens": engine.queued_tokens,
            "prefix_hit_rate": rates.prefix_hit_rate,
            "step_ms": rates.step_ms,
            "tokens_per_s": rates.tokens_per_s,
            "read_once_per_step": rates.read_once_per_step,
            "shared_prefixes": [{"tokens": tokens, "calls": calls} for tokens, calls in prefixes],
            "device": info.device,
        }

    def _rates_of(self, engine: RemoteEngine, now: float) -> _Rates:
        """Return the rates between the last two heartbeats seen; at first over the engine's whole
        life.
        """
        stats, known = engine.stats, self._rates.get(engine.id)
        if known is None:
            known = self._rates[engine.id] = _Rates(EngineStats(), now)
            _take_rates(known, stats, None)
        elif stats is not known.stats and now - known.at >= _LEAST_S:
            _take_rates(known, stats, now - known.at)
        else:
            return known
        known.stats, known.at = stats, now
        return known


#: The fields of an EngineView, with the values for an unknown engine.
_NOTHING: dict[str, Any] = {
    "id": "",
    "name": "",
    "model": None,
    "kind": "",
    "state": "serving",
    "running": 0,
    "waiting": 0,
    "kv_used": None,
    "kv_cached": None,
    "kv_total": None,
    "kv_unit": None,
    "kv_block_tokens": None,
    "max_batch_size": None,
    "queued_tokens": None,
    "prefix_hit_rate": None,
    "step_ms": None,
    "tokens_per_s": None,
    "read_once_per_step": None,
    "shared_prefixes": [],
    "device": None,
}


def _take_rates(rates: _Rates, stats: EngineStats, seconds: float | None) -> None:
    before = rates.stats
    steps = stats.steps - before.steps
    cached = stats.cached_tokens - before.cached_tokens
    prompt = cached + stats.filled_tokens - before.filled_tokens
    if prompt:
        rates.prefix_hit_rate = round(cached / prompt, 4)
    if steps:
        rates.step_ms = round((stats.busy_s - before.busy_s) / steps * 1000, 3)
        read_once = stats.read_once_tokens - before.read_once_tokens
        rates.read_once_per_step = round(read_once / steps, 1)
    if seconds is not None:
        rates.tokens_per_s = round((stats.generated_tokens - before.generated_tokens) / seconds, 1)


def _upstream(described: dict[str, Any], upstream: str) -> dict[str, Any]:
    return {
        **_NOTHING,
        "id": f"upstream:{described['name']}",
        "name": described["name"],
        "kind": "upstream",
        "upstream": upstream,
        "state": "draining"
        if described["drained"]
        else "serving"
        if described["ready"]
        else "lost",
        "running": described["running"],
        "waiting": described["waiting"],
    }
