"""What a simulation measures, in memory that does not grow with its length.

Times are seconds. A call's latency begins when it could have been sent: at the client, or, inside
the server, when the last of its inputs was ready; it ends with its last token, at the client if
that waits for it. Its time to first token begins there too. An application's time is from its
arrival at its client to the last of its answers there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from parrot_bench.simulator.plan import ApplicationPlan

#: `job_s`: seconds from arrival to the last answer at the client; `ms_per_token`: that time over
#: all output tokens of the application, in ms; `decode_ms_per_token`: between its first and last
#: token; `call_s`: seconds of one call, so that the pauses between calls do not count.
Metric: TypeAlias = Literal["job_s", "ms_per_token", "decode_ms_per_token", "call_s"]

#: Buckets of a sketch grow by this factor: quantiles are within half of a percent.
_GROWTH = 1.01
_LOG_GROWTH = math.log(_GROWTH)
#: Anything below counts as 0.
_SMALLEST = 1e-9
#: Values that a sketch keeps as they are.
_EXACT = 1000
#: Tenants and kinds with figures of their own; later ones are counted together.
MAX_GROUPS = 200
OTHERS = "(others)"


class Sketch:
    """A distribution of numbers >= 0: exact while it is small, then in buckets of one percent."""

    __slots__ = ("_buckets", "_count", "_latest", "_maximum", "_total")

    def __init__(self) -> None:
        #: What is not in buckets yet.
        self._latest: list[float] = []
        self._buckets: dict[int, int] = {}
        self._count = 0
        self._total = 0.0
        self._maximum = 0.0

    def add(self, value: float) -> None:
        self._latest.append(value)
        if len(self._latest) > _EXACT:
            self._fold()

    def merge(self, other: Sketch) -> None:
        self._latest += other._latest
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self._count += other._count
        self._total += other._total
        self._maximum = max(self._maximum, other._maximum)
        if self._buckets or len(self._latest) > _EXACT:
            self._fold()

    @property
    def count(self) -> int:
        return self._count + len(self._latest)

    @property
    def total(self) -> float:
        return self._total + math.fsum(self._latest)

    @property
    def maximum(self) -> float:
        """The largest; 0 without any."""
        return max(self._maximum, max(self._latest, default=0.0))

    @property
    def mean(self) -> float:
        """NaN when nothing was counted."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, q: float) -> float:
        """The smallest value that at least a share `q` of all do not exceed; NaN without any."""
        count = self.count
        if not count:
            return math.nan
        rank = max(1, math.ceil(q * count - 1e-9))
        if not self._buckets:
            return sorted(self._latest)[rank - 1]
        self._fold()
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank <= 0:
                return min(self._maximum, _middle(bucket))
        return self._maximum

    def cdf(self) -> list[tuple[float, float]]:
        """Points (value, share of all up to it), in order."""
        count = self.count
        if not self._buckets:
            return [(value, (i + 1) / count) for i, value in enumerate(sorted(self._latest))]
        self._fold()
        points, seen = [], 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            points.append((min(self._maximum, _middle(bucket)), seen / count))
        return points

    def summary(self) -> dict[str, float | None]:
        """Mean and the usual quantiles."""
        if not self.count:
            return dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
        return {
            "mean": self.mean,
            "p50": self.quantile(0.5),
            "p90": self.quantile(0.9),
            "p99": self.quantile(0.99),
            "max": self.maximum,
        }

    def _fold(self) -> None:
        latest, self._latest = self._latest, []
        if not latest:
            return
        self._count += len(latest)
        self._total += math.fsum(latest)
        self._maximum = max(self._maximum, *latest)
        values = np.maximum(np.array(latest), _SMALLEST)
        buckets, counts = np.unique(
            np.floor(np.log(values) / _LOG_GROWTH).astype(np.int64), return_counts=True
        )
        for bucket, count in zip(buckets.tolist(), counts.tolist(), strict=True):
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count


def _middle(bucket: int) -> float:
    value = math.exp((bucket + 0.5) * _LOG_GROWTH)
    return value if value > _SMALLEST * _GROWTH else 0.0


class CallTimes(NamedTuple):
    """One finished call."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    #: Tokens that were filled for it, those filled again after a preemption included.
    prefilled_tokens: int
    latency_s: float
    ttft_s: float
    #: Seconds per token after the first; None for fewer than two.
    tpot_s: float | None
    #: Latency per output token; None without any.
    normalised_s: float | None
    #: In the scheduler's queue, and in the engine's.
    held_s: float
    queued_s: float


@dataclass(slots=True)
class Measures:
    """Figures of some applications: of all, of one kind, or of one tenant."""

    applications: int = 0
    failed: int = 0
    #: With a goal; and those of them that met it.
    with_goal: int = 0
    good: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    output_tokens: int = 0
    job_s: Sketch = field(default_factory=Sketch)
    #: Of calls: see `CallTimes`.
    latency_s: Sketch = field(default_factory=Sketch)
    ttft_s: Sketch = field(default_factory=Sketch)
    tpot_s: Sketch = field(default_factory=Sketch)
    normalised_s: Sketch = field(default_factory=Sketch)
    held_s: Sketch = field(default_factory=Sketch)
    queued_s: Sketch = field(default_factory=Sketch)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found in a cache; NaN without any."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else math.nan

    @property
    def speed(self) -> float:
        """Tokens (prompts and outputs) per second of application time."""
        tokens = self.prompt_tokens + self.output_tokens
        return tokens / self.job_s.total if self.job_s.total else 0.0

    def add_call(self, call: CallTimes) -> None:
        self.calls += 1
        self.prompt_tokens += call.prompt_tokens
        self.output_tokens += call.output_tokens
        self.cached_tokens += call.cached_tokens
        self.prefilled_tokens += call.prefilled_tokens
        self.latency_s.add(call.latency_s)
        self.ttft_s.add(call.ttft_s)
        if call.tpot_s is not None:
            self.tpot_s.add(call.tpot_s)
        if call.normalised_s is not None:
            self.normalised_s.add(call.normalised_s)
        self.held_s.add(call.held_s)
        self.queued_s.add(call.queued_s)

    def add_application(
        self, plan: ApplicationPlan, job_s: float, ttft_s: float, tpot_s: float, *, failed: bool
    ) -> None:
        """Count an ended application: its slowest first token, its mean time per token."""
        self.applications += 1
        goals = ((plan.ttft_s, ttft_s), (plan.tpot_s, tpot_s), (plan.job_s, job_s))
        if any(goal is not None for goal, _ in goals):
            self.with_goal += 1
            if not failed and all(goal is None or is_ <= goal for goal, is_ in goals):
                self.good += 1
        if failed:
            self.failed += 1
        else:
            self.job_s.add(job_s)

    def merge(self, other: Measures) -> None:
        for name in (each.name for each in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, Sketch):
                mine.merge(theirs)
            else:
                setattr(self, name, mine + theirs)

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            if isinstance(value, Sketch):
                plain.setdefault("hit_rate", self.hit_rate if self.prompt_tokens else None)
                value = value.summary()
            plain[name] = value
        return plain


def jain(values: Iterable[float]) -> float:
    """Jain's index of fairness: 1 when all are equal, 1/n when one has everything."""
    values = list(values)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


@dataclass(slots=True)
class EngineUse:
    """What one engine did."""

    id: str
    capacity_tokens: int
    busy_s: float = 0.0
    steps: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    reloaded_tokens: int = 0
    evicted_tokens: int = 0
    #: Integrals over busy time: of sequences and of KV tokens in use.
    batch_seconds: float = 0.0
    kv_seconds: float = 0.0

    @property
    def mean_batch(self) -> float:
        """Sequences, over its busy time."""
        return self.batch_seconds / (self.busy_s or 1.0)

    def to_dict(self) -> dict[str, Any]:
        names = (
            "id", "busy_s", "steps", "prefilled_tokens", "generated_tokens", "preemptions",
            "reloaded_tokens", "evicted_tokens", "mean_batch",
        )  # fmt: skip
        return {
            **{name: getattr(self, name) for name in names},
            "mean_kv_tokens": self.kv_seconds / (self.busy_s or 1.0),
            "capacity_tokens": self.capacity_tokens,
        }


@dataclass(slots=True)
class Timeline:
    """How an engine was used over time, in a fixed number of equal bins that widen as it goes."""

    bins: int = 400
    width_s: float = 0.05
    #: Seconds of sequences, seconds of KV tokens, tokens filled; one number a bin.
    batch: list[float] = field(default_factory=list)
    kv: list[float] = field(default_factory=list)
    filled: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch = [0.0] * self.bins
        self.kv = [0.0] * self.bins
        self.filled = [0.0] * self.bins

    def add(self, start: float, end: float, batch: int, kv_tokens: int, filled: int) -> None:
        """Between two times: sequences in work, KV tokens in use, tokens filled."""
        while end >= self.width_s * self.bins:
            self._widen()
        first, last = int(start / self.width_s), int(end / self.width_s)
        whole = end - start
        for index in range(first, last + 1):
            part = min(end, (index + 1) * self.width_s) - max(start, index * self.width_s)
            self.batch[index] += batch * part
            self.kv[index] += kv_tokens * part
            if whole > 0:
                self.filled[index] += filled * part / whole

    def _widen(self) -> None:
        for name in ("batch", "kv", "filled"):
            old = getattr(self, name)
            merged = [old[i] + old[i + 1] for i in range(0, self.bins, 2)]
            setattr(self, name, merged + [0.0] * (self.bins - len(merged)))
        self.width_s *= 2


@dataclass(slots=True)
class Results:
    """Results of a simulation; `settings` describes its options."""

    settings: dict[str, Any]
    #: Applications that arrived after the warm-up.
    total: Measures
    kinds: dict[str, Measures]
    tenants: dict[str, Measures]
    engines: list[EngineUse]
    #: Virtual seconds in all, and from the end of the warm-up.
    duration_s: float
    measured_s: float
    #: Why applications failed, by code.
    failures: dict[str, int]
    #: Actions of the scheduler, by kind, and events that it ignored.
    actions: dict[str, int]
    ignored: dict[str, int]
    #: Things that happened in the simulation, and steps of the scheduler.
    events: int
    scheduler_steps: int
    #: By engine id; empty unless `timelines` is set.
    timelines: dict[str, Timeline] = field(default_factory=dict)

    def measures_of(self, kind: str | None) -> Measures:
        """Of a kind of application, empty where there was none; None: of all."""
        return self.total if kind is None else self.kinds.get(kind, Measures())

    def distribution(self, kind: str | None, metric: Metric) -> tuple[Sketch, float]:
        """A metric of a kind of application (None: of all), and the factor to its unit."""
        measures = self.measures_of(kind)
        if metric == "job_s":
            return measures.job_s, 1.0
        if metric == "ms_per_token":
            return measures.normalised_s, 1000.0
        if metric == "call_s":
            return measures.latency_s, 1.0
        return measures.tpot_s, 1000.0

    @property
    def goodput(self) -> float:
        """Applications within their goals, per second."""
        return self.total.good / self.measured_s if self.measured_s else 0.0

    @property
    def good_share(self) -> float:
        """Share of applications with a goal that met it; NaN when there are none."""
        return self.total.good / self.total.with_goal if self.total.with_goal else math.nan

    @property
    def fairness(self) -> float:
        """Jain's index over the tenants' speeds (`Measures.speed`)."""
        return jain(m.speed for m in self.tenants.values() if m.applications)

    @property
    def utilisation(self) -> float:
        """Share of the time that engines worked, mean over them."""
        if not self.engines or not self.duration_s:
            return 0.0
        return sum(e.busy_s for e in self.engines) / (len(self.engines) * self.duration_s)

    def to_dict(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "duration_s": self.duration_s,
            "measured_s": self.measured_s,
            "goodput": self.goodput,
            "good_share": self.good_share if self.total.with_goal else None,
            "fairness": self.fairness,
            "utilisation": self.utilisation,
            "total": self.total.to_dict(),
            "kinds": _to_dicts(self.kinds),
            "tenants": _to_dicts(self.tenants),
            "engines": [engine.to_dict() for engine in self.engines],
            "failures": dict(sorted(self.failures.items())),
            "actions": dict(sorted(self.actions.items())),
            "ignored": dict(sorted(self.ignored.items())),
            "events": self.events,
            "scheduler_steps": self.scheduler_steps,
        }


@dataclass(frozen=True, slots=True)
class Figure:
    """What is measured of an application: the mean or a quantile of a metric of a kind."""

    label: str
    metric: Metric
    #: None: of all kinds.
    kind: str | None = None
    #: None: the mean.
    quantile: float | None = None

    def of(self, results: Results) -> float:
        """In the metric's unit; NaN where nothing was measured."""
        distribution, unit = results.distribution(self.kind, self.metric)
        if self.quantile is None:
            return distribution.mean * unit
        return distribution.quantile(self.quantile) * unit


def _to_dicts(groups: Mapping[str, Measures]) -> dict[str, Any]:
    return {name: groups[name].to_dict() for name in sorted(groups)}


def group_of(groups: dict[str, Measures], name: str) -> Measures:
    """The measures of a group, made when it is new; of all others when there are too many."""
    measures = groups.get(name)
    if measures is None:
        if len(groups) >= MAX_GROUPS:
            name = OTHERS
        measures = groups.setdefault(name, Measures())
    return measures
