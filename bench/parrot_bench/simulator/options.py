"""Options of a simulation: engines, policies, clients, network, and what is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from parrot_scheduler.actions import Action
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.events import Event

from parrot_bench.simulator.plan import ClientMode, Knowledge
from parrot_bench.simulator.profiles import EngineProfile


@dataclass(frozen=True, slots=True)
class Network:
    """Round trips between clients and the server: uniform between two times, or from samples."""

    low_s: float = 0.0
    high_s: float = 0.0
    samples_s: Sequence[float] = ()

    def __post_init__(self) -> None:
        times = (self.low_s, self.high_s, *self.samples_s)
        if not all(0 <= time < float("inf") for time in times) or self.low_s > self.high_s:
            raise ValueError(
                f"network: round trips must be finite, >= 0 and low <= high, not {times[:2]}"
            )

    @property
    def varies(self) -> bool:
        return bool(self.samples_s) or self.low_s < self.high_s

    def round_trip_s(self, where: float) -> float:
        """The round trip at a place of [0, 1)."""
        if self.samples_s:
            return self.samples_s[int(where * len(self.samples_s))]
        return self.low_s + (self.high_s - self.low_s) * where


@dataclass(frozen=True, slots=True)
class Staleness:
    """How late the scheduler learns of things, in seconds. The end of a task is never late."""

    blocks_s: float = 0.0
    progress_s: float = 0.0
    report_s: float = 0.0
    #: Shortest time between two reports of an engine.
    report_interval_s: float = 1.0


class EngineChange(NamedTuple):
    """An engine leaves, drains or joins again; by its place among `engines`."""

    at_s: float
    engine: int
    what: Literal["leave", "drain", "join"]


class StepLog(Protocol):
    """Where steps of the scheduler are recorded."""

    def record(self, now: float, events: Sequence[Event], actions: Sequence[Action]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """How a workload is run.

    Raises:
        ValueError: engines that do not go together, or a share or change that makes no sense.
    """

    #: One profile an engine; all with prefix caching must have blocks of one size.
    engines: Sequence[EngineProfile]
    #: The scheduler's policies and limits.
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    #: How much the server knows of applications.
    mode: ClientMode = "graph"
    #: What it knows of plain clients' calls; None: their beginnings name their templates.
    knowledge: Knowledge | None = None
    #: Round trips of calls.
    network: Network = Network()
    #: Of the network's draws; the workload has its own, the scheduler `config.seed`.
    seed: int = 0
    #: Share of the applications, by order of arrival, that do not count.
    warm_up: float = 0.0
    #: Stop taking in applications after so many.
    max_applications: int | None = None
    #: How late the scheduler learns of what engines do.
    staleness: Staleness = Staleness()
    #: Engines that leave (their tasks are submitted anew), drain or join again.
    changes: Sequence[EngineChange] = ()
    #: Whether tenants share cached prefixes.
    share_tenants: bool = False
    #: Whether each engine's use over time is recorded.
    timelines: bool = False
    #: Receives every step of the scheduler.
    log: StepLog | None = None
    #: Called now and then with applications ended so far and the virtual time.
    progress: Callable[[int, float], None] | None = None

    def __post_init__(self) -> None:
        if len(self.block_sizes) > 1:
            raise ValueError(f"engines' blocks must be of one size, not {sorted(self.block_sizes)}")
        if not 0 <= self.warm_up < 1:
            raise ValueError(f"warm_up must be a share from 0 to below 1, not {self.warm_up}")
        for change in self.changes:
            if not 0 <= change.engine < len(self.engines):
                raise ValueError(f"changes: there is no engine {change.engine}")

    @property
    def block_sizes(self) -> set[int]:
        """Tokens of a block of engines with prefix caching: one size, or none."""
        return {profile.block_tokens for profile in self.engines if profile.prefix_caching}
