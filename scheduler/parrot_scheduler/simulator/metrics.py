"""What a simulation measures, in memory that does not grow with its length.

Times are seconds. A call's latency begins when it could have been sent: at the client, or, inside
the server, when the last of its inputs was ready; it ends with its last token, at the client if
that waits for it. Its time to first token begins there too. An application's time is from its
arrival at its client to the last of its answers there.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parrot_scheduler.simulator.plan import ApplicationPlan

#: Buckets of a sketch grow by this factor: quantiles are within half of a percent.
_GROWTH = 1.01
_LOG_GROWTH = math.log(_GROWTH)
#: Values that a sketch keeps as they are.
_EXACT = 1000
#: Tenants and kinds with figures of their own; later ones are counted together.
MAX_GROUPS = 200
OTHERS = "(others)"


class Sketch:
    """A distribution of numbers >= 0: exact while it is small, then in buckets of one percent."""

    __slots__ = ("_buckets", "_exact", "count", "maximum", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.maximum = 0.0
        self._exact: list[float] | None = []
        self._buckets: dict[int, int] = {}

    def add(self, value: float) -> None:
        """Count one more."""
        self.count += 1
        self.total += value
        if value > self.maximum:
            self.maximum = value
        if self._exact is not None:
            insort(self._exact, value)
            if len(self._exact) > _EXACT:
                exact, self._exact = self._exact, None
                for each in exact:
                    self._put(each)
        else:
            self._put(value)

    @property
    def mean(self) -> float:
        """NaN when nothing was counted."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, q: float) -> float:
        """The smallest value that at least a share `q` of all do not exceed; NaN without any."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(q * self.count - 1e-9))
        if self._exact is not None:
            return self._exact[rank - 1]
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank <= 0:
                return min(self.maximum, _middle(bucket))
        return self.maximum

    def cdf(self) -> list[tuple[float, float]]:
        """Points (value, share of all up to it), in order."""
        if self._exact is not None:
            return [(value, (i + 1) / self.count) for i, value in enumerate(self._exact)]
        points, seen = [], 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            points.append((_middle(bucket), seen / self.count))
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

    def _put(self, value: float) -> None:
        bucket = math.floor(math.log(value) / _LOG_GROWTH) if value > 1e-9 else -(10**6)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1


def _middle(bucket: int) -> float:
    return 0.0 if bucket == -(10**6) else math.exp((bucket + 0.5) * _LOG_GROWTH)


@dataclass(frozen=True, slots=True)
class CallTimes:
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
    #: In the scheduler's queue, and in the engine's.
    held_s: float
    queued_s: float


class Measures:
    """Figures of some applications: of all, of one kind, or of one tenant."""

    def __init__(self) -> None:
        self.applications = 0
        self.failed = 0
        #: With a goal; and those of them that met it.
        self.with_goal = 0
        self.good = 0
        self.calls = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.prefilled_tokens = 0
        self.output_tokens = 0
        self.job_s = Sketch()
        self.latency_s = Sketch()
        self.ttft_s = Sketch()
        self.tpot_s = Sketch()
        #: Latency per output token.
        self.normalised_s = Sketch()
        self.held_s = Sketch()
        self.queued_s = Sketch()

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
        """Count a finished call."""
        self.calls += 1
        self.prompt_tokens += call.prompt_tokens
        self.output_tokens += call.output_tokens
        self.cached_tokens += call.cached_tokens
        self.prefilled_tokens += call.prefilled_tokens
        self.latency_s.add(call.latency_s)
        self.ttft_s.add(call.ttft_s)
        if call.tpot_s is not None:
            self.tpot_s.add(call.tpot_s)
        if call.output_tokens:
            self.normalised_s.add(call.latency_s / call.output_tokens)
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        distributions = {
            name: getattr(self, name).summary()
            for name in (
                "job_s", "latency_s", "ttft_s", "tpot_s", "normalised_s", "held_s", "queued_s",
            )
        }  # fmt: skip
        return {
            "applications": self.applications,
            "failed": self.failed,
            "with_goal": self.with_goal,
            "good": self.good,
            "calls": self.calls,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "prefilled_tokens": self.prefilled_tokens,
            "output_tokens": self.output_tokens,
            "hit_rate": self.hit_rate if self.prompt_tokens else None,
            **distributions,
        }


def jain(values: Iterable[float]) -> float:
    """Jain's index of fairness: 1 when all are equal, 1/n when one has everything."""
    values = list(values)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


@dataclass(frozen=True, slots=True)
class EngineUse:
    """What one engine did."""

    id: str
    busy_s: float
    steps: int
    prefilled_tokens: int
    generated_tokens: int
    preemptions: int
    reloaded_tokens: int
    evicted_tokens: int
    #: Over its busy time.
    mean_batch: float
    mean_kv_tokens: float
    capacity_tokens: int


@dataclass(slots=True)
class Course:
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
    """What a simulation found. `settings` says of what, in words and numbers."""

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
    #: By engine id; empty unless they were asked for.
    courses: dict[str, Course] = field(default_factory=dict)

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
        """Plain data, for JSON."""
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
            "engines": [
                {name: getattr(engine, name) for name in EngineUse.__slots__}
                for engine in self.engines
            ],
            "failures": dict(sorted(self.failures.items())),
            "actions": dict(sorted(self.actions.items())),
            "ignored": dict(sorted(self.ignored.items())),
            "events": self.events,
            "scheduler_steps": self.scheduler_steps,
        }


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
