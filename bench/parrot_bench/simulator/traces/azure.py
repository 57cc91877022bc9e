"""Azure's LLM inference traces of 2023 and 2024: CSV, TIMESTAMP,ContextTokens,GeneratedTokens."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from parrot_bench.simulator.plan import ApplicationPlan, Segment, one_call
from parrot_bench.simulator.traces.lines import Line, TraceError, lines_of, tokens_of

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(path: Path) -> Iterator[ApplicationPlan]:
    """One application of one call for each row; time counts from the first. Nothing is shared.

    Raises:
        TraceError: a column is missing, a row is wrong, or earlier than the one before.
    """
    lines = lines_of(path)
    header = next(lines, None)
    if header is None:
        raise TraceError(f"{path}: empty")
    names = _cells(header)
    for name in COLUMNS:
        if name not in names:
            raise header.error(f"no column {name}; there are {', '.join(names)}")
    start: datetime | None = None
    latest = 0.0
    for line in lines:
        cells = _cells(line)
        if len(cells) != len(names):
            raise line.error(f"{len(cells)} cells, the header has {len(names)}")
        row = dict(zip(names, cells, strict=True))
        when = _time(line, row["TIMESTAMP"])
        start = start or when
        arrival_s = (when - start).total_seconds()
        if arrival_s < latest:
            raise line.error(f"TIMESTAMP goes back, to {row['TIMESTAMP']}")
        latest = arrival_s
        output = _count(line, row, "GeneratedTokens")
        yield one_call(
            f"call-{line.number}",
            arrival_s,
            (Segment(("own", line.number), _count(line, row, "ContextTokens")),),
            output,
            kind="call",
        )


def _cells(line: Line) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line.text]))]
    except csv.Error as error:
        raise line.error(f"not CSV: {error}") from None


def _time(line: Line, text: str) -> datetime:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise line.error(f"TIMESTAMP is no date and time: {text[:40]!r}") from None
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def _count(line: Line, row: dict[str, str], name: str) -> int:
    try:
        return tokens_of(line, {name: int(row[name])}, name)
    except ValueError as error:
        if isinstance(error, TraceError):
            raise
        raise line.error(f"{name} must be a whole number, not {row[name][:40]!r}") from None
