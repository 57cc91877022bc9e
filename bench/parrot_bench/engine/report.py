"""Results of `bench engine` and `bench serving`: figures with their bounds, beside peers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from parrot_bench.tables import number, text_table

Unit: TypeAlias = Literal["ms", "s", "ms/token", "tok/s", "req/s", "x", "MB", "cores"]
#: Units of which more is better.
_MORE_IS_BETTER = ("tok/s", "req/s", "x")


class BenchError(RuntimeError):
    """A run whose figures would mean nothing."""


@dataclass(frozen=True, slots=True)
class Figure:
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

    def lead(self, peer: float) -> float:
        """The factor by which this is better than a peer's figure; below 1 it is worse."""
        return self.median / peer if self.unit in _MORE_IS_BETTER else peer / self.median

    @property
    def share(self) -> float | None:
        """The share of the bound that is reached: 1 is all that the device allows."""
        if self.bound is None:
            return None
        return self.lead(self.bound)

    def to_dict(self) -> dict[str, Any]:
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
        counts = {name: values[name] for name in values if name != "figures"}
        figures = tuple(
            Figure(name, figure["unit"], tuple(figure["runs"]), figure["bound"])
            for name, figure in values.get("figures", {}).items()
        )
        return cls(**counts, figures=figures)

    def figure(self, name: str) -> Figure:
        return next(figure for figure in self.figures if figure.name == name)

    def to_dict(self) -> dict[str, Any]:
        if self.skipped is not None:
            return {"case": self.case, "engine": self.engine, "skipped": self.skipped}
        names = [item.name for item in fields(self) if item.name not in ("skipped", "figures")]
        return {
            **{name: getattr(self, name) for name in names},
            "figures": {figure.name: figure.to_dict() for figure in self.figures},
        }


def summary(report: Mapping[str, Any], packages: Sequence[str] = ()) -> str:
    """The model, the machine and the versions of these packages, in a few lines."""
    where, model, engine = report["machine"], report["model"], report["engine"]
    versions = where["packages"]
    weights = "random weights" if model["dummy_weights"] else "the checkpoint's weights"
    lines = [
        f"{model['name']}, {model['dtype']}, {weights}, on {where['device']} ({where['cpu']}); "
        + ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", *packages)),
        f"ready after {report['ready_s']:.1f} s; blocks of {engine['block_size']} tokens, "
        f"{engine['num_blocks']} of them; up to {engine['max_batch_size']} contexts and "
        f"{engine['max_batch_tokens']} tokens a step",
        "memory at the end: "
        + ", ".join(
            f"{name.removesuffix('_bytes')} {size / 2**30:.1f} GiB"
            for name, size in report["memory"]["end"].items()
        ),
    ]
    limits = report["limits"]
    if limits is not None:
        lines.append(
            f"limits measured: copy {limits['bytes_per_s'] / 1e12:.2f} TB/s, "
            f"matrix product {limits['flops_per_s'] / 1e12:.0f} TFLOP/s"
        )
    return "\n".join(lines)


def line_of(result: CaseResult) -> str:
    if result.skipped is not None:
        return f"{result.engine} {result.case}: skipped: {result.skipped}"
    figures = ", ".join(
        f"{figure.name} {number(figure.median)} {figure.unit}" for figure in result.figures
    )
    return f"{result.engine} {result.case}: {figures}"


def table(results: Sequence[CaseResult]) -> str:
    """All figures, a line each, those of other engines beside ours, which is ahead or behind."""
    engines = list(dict.fromkeys(result.engine for result in results))
    ours, peers = engines[0], engines[1:]
    header = ["case", "figure", "unit", ours, "spread", "bound", "of bound"]
    for peer in peers:
        header += [peer, "ours is"]
    theirs = {
        (result.engine, result.case, figure.name): figure.median
        for result in results
        for figure in result.figures
    }
    lines: list[list[str]] = []
    skipped = []
    for result in results:
        if result.skipped is not None:
            skipped.append(line_of(result))
            continue
        if result.engine != ours:
            continue
        for figure in result.figures:
            line = [result.case, figure.name, figure.unit, *_cells(figure)]
            for peer in peers:
                line += _beside(figure, theirs.get((peer, result.case, figure.name)))
            lines.append(line)
    return "\n".join([text_table(header, lines, texts=3), *skipped])


def _cells(figure: Figure) -> list[str]:
    return [
        number(figure.median),
        f"{100 * figure.spread:.0f} %" if len(figure.runs) > 1 else "",
        "" if figure.bound is None else number(figure.bound),
        "" if figure.share is None else f"{100 * figure.share:.0f} %",
    ]


def _beside(figure: Figure, peer: float | None) -> list[str]:
    """A peer's figure, and how this one stands to it."""
    if not peer or not figure.median or figure.unit == "x":
        return ["-", "-"]
    lead = figure.lead(peer)
    return [number(peer), f"{'ahead' if lead >= 1 else 'behind'} {lead:.2f}x"]
