"""Figures of `parrot-gateway bench engine`: what was measured, how often, against which bound."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Unit: TypeAlias = Literal["ms", "tok/s", "req/s", "x"]


class BenchError(RuntimeError):
    """A run whose figures would mean nothing."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity, measured once or several times."""

    name: str
    unit: Unit
    runs: tuple[float, ...]
    #: What the device allows, in the same unit.
    bound: float | None = None

    @property
    def median(self) -> float:
        """The figure that is quoted."""
        return statistics.median(self.runs)

    @property
    def spread(self) -> float:
        """Largest minus smallest, as a share of the median."""
        return (max(self.runs) - min(self.runs)) / self.median if self.median else 0.0

    @property
    def share(self) -> float | None:
        """Of the bound that is reached: 1 is all that the device allows."""
        if self.bound is None:
            return None
        return self.bound / self.median if self.unit == "ms" else self.median / self.bound

    def to_dict(self) -> dict[str, Any]:
        """As plain types."""
        return {
            "unit": self.unit,
            "median": self.median,
            "spread": self.spread,
            "runs": list(self.runs),
            "bound": self.bound,
            "share_of_bound": self.share,
        }


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What came out of one case on one engine."""

    case: str
    engine: str
    #: Why there are no figures.
    skipped: str | None = None
    #: Of one run: requests, tokens of their prompts (shared ones once), generated tokens counted.
    requests: int = 0
    prompt_tokens: int = 0
    distinct_tokens: int = 0
    output_tokens: int = 0
    figures: Sequence[Figure] = field(default_factory=tuple)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CaseResult:
        """What `to_dict` made plain."""
        counts = {name: values[name] for name in values if name != "figures"}
        figures = tuple(
            Figure(name, figure["unit"], tuple(figure["runs"]), figure["bound"])
            for name, figure in values.get("figures", {}).items()
        )
        return cls(**counts, figures=figures)

    def figure(self, name: str) -> Figure:
        """A figure by its name."""
        return next(figure for figure in self.figures if figure.name == name)

    def to_dict(self) -> dict[str, Any]:
        """As plain types."""
        if self.skipped is not None:
            return {"case": self.case, "engine": self.engine, "skipped": self.skipped}
        return {
            "case": self.case,
            "engine": self.engine,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "distinct_tokens": self.distinct_tokens,
            "output_tokens": self.output_tokens,
            "figures": {figure.name: figure.to_dict() for figure in self.figures},
        }
