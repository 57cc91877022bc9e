"""The measures of a simulation.

Times are seconds. A call's latency begins when the last of its inputs was ready (or its pause was
over), and ends with its last token. An application's time is from its arrival to its last answer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, TypeAlias

#: `job_s`: seconds of an application; of calls: `call_s`, `ttft_s` to the first token,
#: `ms_per_token` milliseconds of a call over its output tokens.
Metric: TypeAlias = Literal["job_s", "call_s", "ttft_s", "ms_per_token"]


@dataclass(slots=True)
class Measures:
    """Figures of some applications: of all, or of one kind."""

    applications: int = 0
    failed: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    #: Those filled again after a preemption included.
    prefilled_tokens: int = 0
    output_tokens: int = 0
    values: defaultdict[Metric, list[float]] = field(default_factory=lambda: defaultdict(list))

    def mean(self, metric: Metric) -> float:
        """The mean of a metric; NaN where nothing was measured."""
        return fmean(self.values[metric]) if self.values[metric] else math.nan

    def quantile(self, metric: Metric, q: float) -> float:
        """The smallest value that at least a share `q` of all do not exceed; NaN without any."""
        values = sorted(self.values[metric])
        return values[max(1, math.ceil(q * len(values) - 1e-9)) - 1] if values else math.nan

    def add(self, other: Measures) -> None:
        """Count the applications of another kind here, too."""
        for name in self.__slots__:
            if name != "values":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        for metric, values in other.values.items():
            self.values[metric] += values


@dataclass(slots=True)
class EngineUse:
    """The work of one engine."""

    steps: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class Results:
    """Results of a simulation."""

    total: Measures
    kinds: dict[str, Measures]
    #: By engine id.
    engines: dict[str, EngineUse]
    #: Virtual seconds in all.
    duration_s: float
    #: Applications that failed, by code.
    failures: dict[str, int]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of an application: the mean or a quantile of a metric of a kind."""

    label: str
    metric: Metric
    #: None: of all kinds.
    kind: str | None = None
    #: None: the mean.
    quantile: float | None = None

    def of(self, results: Results) -> float:
        """In the metric's unit; NaN where nothing was measured."""
        measures = results.total if self.kind is None else results.kinds.get(self.kind, Measures())
        if self.quantile is None:
            return measures.mean(self.metric)
        return measures.quantile(self.metric, self.quantile)
