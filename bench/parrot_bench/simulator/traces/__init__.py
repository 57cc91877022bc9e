"""Recorded traces as workloads, read as they are needed.

Formats: `agentic_mooncake` and `mooncake` (JSONL), `azure` (CSV); see the module of each. Files
may be compressed with gzip. What generated tokens a later prompt repeats is not recorded, so that
KV of outputs is never found again in a replay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from parrot_bench.simulator.plan import ApplicationPlan
from parrot_bench.simulator.traces.agentic import read_agentic
from parrot_bench.simulator.traces.azure import COLUMNS, read_azure
from parrot_bench.simulator.traces.lines import TraceError, lines_of
from parrot_bench.simulator.traces.mooncake import read_mooncake

__all__ = ["TraceError", "TraceFormat", "TraceWorkload", "open_trace"]

TraceFormat: TypeAlias = Literal["auto", "agentic_mooncake", "mooncake", "azure"]

_READERS: dict[str, Callable[[Path], Iterator[ApplicationPlan]]] = {
    "agentic_mooncake": read_agentic,
    "mooncake": read_mooncake,
    "azure": read_azure,
}


@dataclass(slots=True)
class TraceWorkload:
    """The applications of a trace file, at their recorded times: an open loop."""

    path: Path
    format: str
    name: str

    def arrivals(self) -> Iterator[ApplicationPlan]:
        """Reads the file from its beginning.

        Raises:
            TraceError: a row cannot be read; naming the file and line.
        """
        return _READERS[self.format](self.path)

    def successor(self, finished: ApplicationPlan, now: float) -> ApplicationPlan | None:
        """Nothing: all starts are recorded."""
        return None


def open_trace(path: str | Path, trace_format: str = "auto") -> TraceWorkload:
    """A trace file as a workload; `auto` takes the format from the first line.

    Raises:
        TraceError: the file cannot be read, or its format is unknown.
    """
    path = Path(path)
    if trace_format == "auto":
        trace_format = _format_of(path)
    if trace_format not in _READERS:
        choices = ", ".join(get_args(TraceFormat))
        raise TraceError(f"no trace format {trace_format!r}; there are {choices}")
    return TraceWorkload(path, trace_format, f"trace:{path.name}")


def _format_of(path: Path) -> str:
    line = next(lines_of(path), None)
    if line is None:
        raise TraceError(f"{path}: empty")
    if all(column in line.text for column in COLUMNS):
        return "azure"
    try:
        row = json.loads(line.text)
    except (ValueError, RecursionError):
        row = None
    if isinstance(row, dict):
        if "request_id" in row:
            return "agentic_mooncake"
        if "timestamp" in row and "input_length" in row:
            return "mooncake"
    raise line.error(
        "neither a Mooncake nor an Azure trace: wanted is a JSON object with 'request_id', or with "
        f"'timestamp' and 'input_length', or a CSV header with {', '.join(COLUMNS)}"
    )
