"""Results of `parrot-gateway bench engine`: figures with their bounds, the machine, a table."""

from __future__ import annotations

import os
import platform
import resource
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from parrot_bench.tables import number, text_table

#: Packages whose versions move the figures.
_PACKAGES = ("torch", "triton", "numpy", "transformers", "vllm", "parrot-gateway")


Unit: TypeAlias = Literal["ms", "tok/s", "req/s", "x"]


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
        return peer / self.median if self.unit == "ms" else self.median / peer

    @property
    def share(self) -> float | None:
        """The share of the bound that is reached: 1 is all that the device allows."""
        if self.bound is None:
            return None
        return self.bound / self.median if self.unit == "ms" else self.median / self.bound

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


def machine(device: torch.device) -> dict[str, Any]:
    """The machine and the software, as far as they can be found out."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    described: dict[str, Any] = {
        "device": "cpu",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "load_average": list(os.getloadavg()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": versions,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {
            "device": properties.name,
            "device_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return described


def memory(device: torch.device) -> dict[str, int]:
    """Memory in use now, in bytes: of the GPU by all processes, or the peak of this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return {
            "device_bytes": total - free,
            "torch_peak_bytes": torch.cuda.max_memory_reserved(device),
        }
    return {"process_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


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


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
