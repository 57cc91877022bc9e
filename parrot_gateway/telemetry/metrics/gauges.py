"""Reads gauges from the parts of a gateway at each scrape of the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol, TypeAlias

from parrot_gateway import __version__
from parrot_gateway.backends.own.registry import EngineRegistry
from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.backends.own.supervisor import EngineSupervisor
from parrot_gateway.backends.upstreams.client import Upstream
from parrot_gateway.calls.responses.store import ResponseStore
from parrot_gateway.routing.fleet.fleet import UpstreamFleet
from parrot_gateway.routing.placer import SchedulerRunner
from parrot_gateway.telemetry.call_record import CallRecords
from parrot_gateway.telemetry.metrics import definitions as d
from parrot_gateway.telemetry.metrics.definitions import Definition
from parrot_gateway.telemetry.metrics.labels import (
    MAX_ENGINES,
    MAX_MODELS,
    OTHER,
    label_text,
    within,
)

#: Label value for calls that wait in the gateway and have no engine yet.
IN_GATEWAY = "gateway"
_BREAKER = {"closed": 0.0, "half_open": 0.5, "open": 1.0}
#: Longest wait for the linking process; beyond it the last figures are shown.
_LINKING_WAIT_S = 0.05
#: Engines read in one turn of the event loop.
_ENGINES_AT_ONCE = 20


class RequestCounts(Protocol):
    """Counts of requests, as `CallGate` has them."""

    running: int
    accepted: int
    refused: int

    @property
    def is_draining(self) -> bool:
        """Return true if new calls are refused."""


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a gateway that gauges are read from."""

    _: KW_ONLY
    is_ready: Callable[[], bool]
    requests: RequestCounts
    calls: CallRecords
    registry: EngineRegistry
    supervisor: EngineSupervisor
    upstreams: Mapping[str, Upstream | UpstreamFleet]
    scheduling: SchedulerRunner
    responses: ResponseStore
    #: Counts of sessions and their calls, and of batches.
    semantic: Callable[[], Mapping[str, Any]]
    batches: Callable[[], Mapping[str, Any]]
    #: Returns counters of linking; may wait for another process.
    linking: Callable[[], Awaitable[Mapping[str, Any]]]

    def serves(self, model: str) -> bool:
        """Return true if an engine, an engine process or an upstream has a model of that name."""
        return (
            model in self.registry.serving
            or model in self.supervisor.served
            or any(model in upstream.models() for upstream in self.upstreams.values())
        )


class Samples:
    """Values by metric and labels."""

    def __init__(self) -> None:
        self._values: dict[Definition, dict[str, float]] = {}

    def add(self, definition: Definition, value: float, *labels: str) -> None:
        """Add a value; values with equal labels are summed."""
        text = label_text(definition.labels, labels)
        values = self._values.setdefault(definition, {})
        values[text] = values.get(text, 0) + value

    def of(self, definition: Definition) -> Mapping[str, float]:
        """Return the values by labels, in the form of `label_text`."""
        return self._values.get(definition, {})


#: Reads one part; its yields let other work run.
_Reader: TypeAlias = Callable[[Parts, Samples], Iterator[None]]


class Gauges:
    """Reads the parts of a gateway. Used in the event loop's thread only."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._linking: Mapping[str, Any] = {}
        self._asking: asyncio.Task[Mapping[str, Any]] | None = None

    async def refresh(self) -> None:
        """Ask the linking process, which answers later."""
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._parts.linking())
        await asyncio.wait({self._asking}, timeout=_LINKING_WAIT_S)
        if self._asking.done():
            self._linking = self._asking.result()
            self._asking = None

    def read(self, samples: Samples) -> Iterator[None]:
        """Read everything; yields let other work run."""
        for reader in _READERS:
            yield from reader(self._parts, samples)
            yield
        _read_linking(self._linking, samples)


def _read_gateway(parts: Parts, samples: Samples) -> Iterator[None]:
    samples.add(d.INFO, 1, __version__)
    samples.add(d.READY, parts.is_ready())
    requests = parts.requests
    samples.add(d.DRAINING, requests.is_draining)
    samples.add(d.REQUESTS_RUNNING, requests.running)
    samples.add(d.REQUESTS_ACCEPTED, requests.accepted)
    samples.add(d.REQUESTS_REFUSED, requests.refused)
    yield


def _read_engines(parts: Parts, samples: Samples) -> Iterator[None]:
    engines = list(parts.registry.joined.values())
    names = within(MAX_ENGINES, dict.fromkeys(engine.name for engine in engines))
    models = within(MAX_MODELS, dict.fromkeys(engine.info.model for engine in engines))
    for number, engine in enumerate(engines):
        _read_engine(engine, models[engine.info.model], names[engine.name], samples)
        if number % _ENGINES_AT_ONCE == 0:
            yield
    labels = {engine.id: (models[engine.info.model], names[engine.name]) for engine in engines}
    for engine_id, prefixes in parts.scheduling.shared_prefixes():
        if engine_id in labels:
            shared = sum(tokens * (calls - 1) for tokens, calls in prefixes)
            samples.add(d.ENGINE_SHARED, shared, *labels[engine_id])
        yield


def _read_engine(engine: RemoteEngine, model: str, name: str, samples: Samples) -> None:
    add, stats, info = samples.add, engine.stats, engine.info
    state = "lost" if engine.lost else "ready" if engine.takes_calls else "draining"
    add(d.ENGINES, 1, model, info.kind, state)
    add(d.NUM_RUNNING, stats.running, model, name)
    add(d.NUM_WAITING, stats.waiting, model, name)
    add(d.PREFIX_QUERIES, stats.filled_tokens, model, name)
    add(d.PREFIX_HITS, stats.cached_tokens, model, name)
    add(d.PREEMPTIONS, stats.preemptions, model, name)
    add(d.DRAFTED, stats.proposed_tokens, model, name)
    add(d.ACCEPTED, stats.accepted_tokens, model, name)
    computed = stats.filled_tokens - stats.cached_tokens
    add(d.ENGINE_PROMPT, computed, model, name, "computed")
    add(d.ENGINE_PROMPT, stats.cached_tokens, model, name, "reused")
    add(d.ENGINE_GENERATED, stats.generated_tokens, model, name)
    # Zero, so that the sample exists; shared prefixes add to it.
    add(d.ENGINE_SHARED, 0, model, name)
    add(d.ENGINE_READ_ONCE, stats.read_once_tokens, model, name)
    add(d.ENGINE_STEPS, stats.steps, model, name)
    add(d.ENGINE_BUSY, stats.busy_s, model, name)
    add(d.ENGINE_QUEUED_TOKENS, engine.queued_tokens, model, name)
    if info.num_blocks:
        used = max(0, info.num_blocks - stats.free_blocks)
        add(d.ENGINE_BLOCKS, used, model, name, "used")
        add(d.ENGINE_BLOCKS, stats.cached_blocks, model, name, "cached")
        add(d.ENGINE_BLOCKS, stats.free_blocks - stats.cached_blocks, model, name, "empty")
        if info.host_blocks:
            add(d.ENGINE_BLOCKS, stats.host_blocks, model, name, "host")
            add(d.ENGINE_HOST_MOVES, stats.blocks_to_host, model, name, "out")
            add(d.ENGINE_HOST_MOVES, stats.blocks_from_host, model, name, "in")
        # A share or an age is meaningless as a sum over engines.
        if name != OTHER:
            add(d.KV_USAGE, used / info.num_blocks, model, name)
            add(d.CACHE_CONFIG, 1, model, name, str(info.block_size), str(info.num_blocks))
    if name != OTHER:
        add(d.ENGINE_HEARTBEAT_AGE, engine.stats_age_s, model, name)


def _read_processes(parts: Parts, samples: Samples) -> Iterator[None]:
    processes = parts.supervisor.processes
    models = within(MAX_MODELS, dict.fromkeys(each.model.served_name for each in processes))
    for each in processes:
        model = models[each.model.served_name]
        samples.add(d.PROCESS_STATES, 1, model, each.state)
        samples.add(d.PROCESS_RESTARTS, each.restarts, model)
    losses = parts.registry.losses
    models = within(MAX_MODELS, dict.fromkeys(model for model, _ in losses))
    for (model, kind), count in losses.items():
        samples.add(d.ENGINE_LOSSES, count, models[model], kind)
    yield


def _read_upstreams(parts: Parts, samples: Samples) -> Iterator[None]:
    for upstream in parts.upstreams.values():
        for server in [upstream] if isinstance(upstream, Upstream) else upstream.upstreams():
            _read_upstream(server.name, server.statistics(), samples)
            yield


def _read_upstream(name: str, counts: Mapping[str, Any], samples: Samples) -> None:
    samples.add(d.UPSTREAM_READY, counts["ready"], name)
    samples.add(d.UPSTREAM_BREAKER, _BREAKER[counts["breaker"]], name)
    samples.add(d.UPSTREAM_OPENINGS, counts["breaker_openings"], name)
    samples.add(d.UPSTREAM_RUNNING, counts["running"], name)
    samples.add(d.UPSTREAM_WAITING, counts["waiting"], name)
    samples.add(d.UPSTREAM_RETRIES, counts["retries"], name)
    samples.add(d.UPSTREAM_FAILURES, counts["failures"], name)
    for field, word in (("prompt", "prompt"), ("cached", "cached"), ("completion", "output")):
        samples.add(d.UPSTREAM_TOKENS, counts["usage"][f"{field}_tokens"], name, word)


def _read_scheduler(parts: Parts, samples: Samples) -> Iterator[None]:
    scheduling = parts.scheduling
    queues = scheduling.queues()
    models = within(MAX_MODELS, queues)
    for model, queue in queues.items():
        name = models[model]
        samples.add(d.NUM_WAITING, queue["queued"] + queue["held"], name, IN_GATEWAY)
        samples.add(d.QUEUED, queue["queued"], name)
        samples.add(d.APPLICATIONS, queue["active_applications"], name)
        samples.add(d.HELD_APPLICATIONS, queue["held_applications"], name)
        samples.add(d.HELD_CALLS, queue["held"], name)
        if name != OTHER:
            samples.add(d.OLDEST_WAIT, queue["oldest_wait_s"], name)
            samples.add(d.MEMORY_NEEDED, queue["memory_needed"], name)
    samples.add(d.HOLDS, scheduling.held)
    samples.add(d.GROUPED, scheduling.grouped)
    for reason, count in scheduling.placements.items():
        samples.add(d.PLACEMENTS, count, reason)
    for code, count in scheduling.refusals.items():
        samples.add(d.REFUSALS, count, code)
    yield


def _read_sessions(parts: Parts, samples: Samples) -> Iterator[None]:
    counts = parts.semantic()
    sessions, calls, recorded = counts["sessions"], counts["calls"], counts["recorded_calls"]
    samples.add(d.SESSIONS, sessions["sessions"])
    samples.add(d.SESSIONS_CREATED, sessions["created"])
    for reason in ("closed", "evicted", "expired"):
        samples.add(d.SESSIONS_ENDED, sessions[reason], reason)
    samples.add(d.SESSION_VARIABLES, sessions["variables"])
    samples.add(d.SESSION_BYTES, sessions["value_bytes"])
    samples.add(d.SESSION_READERS, counts["readers"])
    for state in ("waiting", "in_line", "running"):
        samples.add(d.GRAPH_UNFINISHED, calls[state], state)
    for outcome in ("done", "failed", "cancelled"):
        samples.add(d.GRAPH_ENDED, calls[outcome], outcome)
    samples.add(d.DEDUPLICATED, calls["deduplicated"])
    samples.add(d.DEFERRED_RETRIES, calls["retries"])
    samples.add(d.ROUND_TRIPS_SAVED, calls["started_by_inputs"])
    samples.add(d.HEAD_START, calls["head_start_s"])
    for outcome in ("recorded", "skipped"):
        samples.add(d.RECORDED, recorded[outcome], outcome)
    ahead = counts["fill_ahead"]
    if ahead:
        samples.add(d.FILL_AHEAD_HELD, ahead["held_tokens"])
        samples.add(d.FILL_AHEAD_FILLS, ahead["fills"], "done")
        samples.add(d.FILL_AHEAD_FILLS, ahead["cut_off"], "cut_off")
        samples.add(d.FILL_AHEAD_TOKENS, ahead["filled_tokens"])
        samples.add(d.FILL_AHEAD_CACHED, ahead["cached_tokens"])
    yield


def _read_stores(parts: Parts, samples: Samples) -> Iterator[None]:
    samples.add(d.STORED_RESPONSES, parts.responses.statistics().entries)
    batches = parts.batches()
    samples.add(d.BATCHES_RUNNING, batches["running_batches"])
    samples.add(d.BATCH_LINES, batches["running_lines"])
    yield


_READERS: tuple[_Reader, ...] = (
    _read_gateway,
    _read_engines,
    _read_processes,
    _read_upstreams,
    _read_scheduler,
    _read_sessions,
    _read_stores,
)


def _read_linking(counts: Mapping[str, Any], samples: Samples) -> None:
    for definition, name in (
        (d.LINK_CALLS, "linked"),
        (d.LINK_SESSIONS, "sessions"),
        (d.LINK_SKIPPED, "skipped"),
        (d.LINK_BEHIND, "behind_s"),
        (d.LINK_BYTES, "bytes"),
        (d.LINK_RESTARTS, "restarts"),
        (d.LINK_LATE, "late"),
        (d.LINK_TEMPLATES, "templates"),
    ):
        if name in counts:
            samples.add(definition, counts[name])
    for kind, count in counts.get("links_by_kind", {}).items():
        samples.add(d.LINK_EDGES, count, kind)
