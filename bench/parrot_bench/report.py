"""Reports of benchmarks: a table for people, JSON for machines, with the machine described."""

from __future__ import annotations

import math
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import msgspec
import typer

from parrot_bench.servers import BenchmarkError
from parrot_gateway import __version__

if TYPE_CHECKING:
    from rich.table import Column, Table

T = TypeVar("T")

#: The option of every benchmark that names the file for `write_json`.
JsonFile: TypeAlias = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")
]

#: Packages whose versions move the figures.
PACKAGES = ("aiohttp", "fastapi", "httptools", "msgspec", "starlette", "uvicorn", "uvloop")
#: Those of an engine.
ENGINE_PACKAGES = ("torch", "triton", "llguidance", "vllm")
#: Characters: the widest table, and the longest word of texts that is not broken on a terminal.
_UNLIMITED = 1000
_TEXT_WIDTH = 24


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One figure, measured without and with the gateway (or a peer) in between."""

    name: str
    unit: str
    gateway: float
    direct: float | None = None
    #: Of other proxies, by name.
    peers: dict[str, float] = {}
    #: What the gateway's figure, or what it adds, should be: at most or at least.
    at_most: float | None = None
    at_least: float | None = None
    #: Whether the aim concerns the difference to `direct`.
    aims_at_added: bool = False

    @property
    def added(self) -> float | None:
        return None if self.direct is None else self.gateway - self.direct

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None without one."""
        value = self.added if self.aims_at_added else self.gateway
        if value is None:
            return None
        if self.at_most is not None:
            return value <= self.at_most
        if self.at_least is not None:
            return value >= self.at_least
        return None

    def to_dict(self) -> dict[str, Any]:
        peers = {name: None if math.isnan(value) else value for name, value in self.peers.items()}
        return {
            **msgspec.structs.asdict(self),
            "added": self.added,
            "ratio": self.gateway / self.direct if self.direct else None,
            "peers": peers,
            "met": self.met,
        }


def machine() -> dict[str, Any]:
    """The machine and the software, as far as they can be found out."""
    versions = versions_of((*PACKAGES, *ENGINE_PACKAGES))
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_model(),
        "cores": usable,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "parrot_gateway": __version__,
        "git": _git_revision(),
        "packages": versions,
    }


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """By package its version, or `not installed`."""
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def show(title: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> None:
    from rich.table import Table

    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    table = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("", justify="left", no_wrap=True)
    table.add_column("", justify="left", style="dim", no_wrap=True)
    for name in ("direct", "gateway", "added", "ratio", *peers):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("aim", justify="right", no_wrap=True)
    table.add_column("met", justify="center", no_wrap=True)
    for row in rows:
        ratio = f"{row.gateway / row.direct:.2f}" if row.direct else ""
        met = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[row.met]
        # The difference of two rates means nothing: real upstreams are slower than both.
        added = "" if row.unit.endswith("/s") else _number(row.added)
        cells = [_number(row.direct), _number(row.gateway), added, ratio]
        cells += [_number(row.peers.get(name)) for name in peers]
        table.add_row(row.name, row.unit, *cells, _aim(row), met)
    print_table(table, notes)


def print_table(table: Table, notes: Sequence[str] = ()) -> None:
    """Print a table of which nothing is cut, and notes below it.

    A pipe or a file gets the full width, one line a row. On a terminal texts wrap; columns for
    which there is still no room follow below the others, with the names of the rows once more.
    """
    from rich.console import Console

    console = Console()
    options = console.options.update(max_width=_UNLIMITED)
    full = console.measure(table, options=options).maximum
    for column in table.columns:
        column.overflow = "fold"
    if full <= console.width or not console.is_terminal:
        parts = [(table, full)]
    else:
        parts = _parts(table, console.width)
    for number, (part, needed) in enumerate(parts):
        if number:
            console.print()
        Console(width=max(console.width, needed)).print(part)
    for note in notes:
        console.print(note, style="dim", highlight=False, markup=False)


def _parts(table: Table, width: int) -> list[tuple[Table, int]]:
    """Tables of some of the columns each, no wider than `width` where that can be; their widths."""
    names = 1
    while names < len(table.columns) and table.columns[names].justify == "left":
        names += 1
    _, right, _, left = table.padding
    beside = left + right + (0 if table.box is None else 1)
    spans = [_span(column) for column in table.columns]
    least = [span[0] + beside for span in spans]
    room = width - (0 if table.box is None else 1)
    parts = [list(range(names))]
    for index in range(names, len(spans)):
        if len(parts[-1]) > names and sum(least[each] for each in parts[-1]) + least[index] > room:
            parts.append(list(range(names)))
        parts[-1].append(index)
    found = []
    for part in parts:
        spare = max(0, room - sum(least[index] for index in part))
        widths = []
        for shortest, longest in (spans[index] for index in part):
            widths.append(min(longest, shortest + spare))
            spare -= widths[-1] - shortest
        narrow = _of_columns(table, dict(zip(part, widths, strict=True)))
        narrow.title = table.title if part is parts[0] else None
        narrow.caption = table.caption if part is parts[-1] else None
        found.append((narrow, sum(widths) + beside * len(part) + width - room))
    return found


def _span(column: Column) -> tuple[int, int]:
    """Characters that a column needs and can use: figures are never broken, texts may be."""
    from rich.text import Text

    cells = [Text.from_markup(str(cell)).plain for cell in (column.header, *column.cells)]
    longest = max(map(len, cells))
    if column.no_wrap:
        return longest, longest
    word = max((len(word) for cell in cells for word in cell.split()), default=0)
    return (word if column.justify == "right" else min(word, _TEXT_WIDTH)), longest


def _of_columns(table: Table, widths: Mapping[int, int]) -> Table:
    """A table of the columns at these places, so wide."""
    from rich.table import Table

    columns = [table.columns[index] for index in widths]
    part = Table(
        title_justify=table.title_justify,
        header_style=table.header_style,
        box=table.box,
        pad_edge=table.pad_edge,
        padding=table.padding,
    )
    for column, width in zip(columns, widths.values(), strict=True):
        part.add_column(
            column.header,
            justify=column.justify,
            style=column.style,
            no_wrap=column.no_wrap,
            overflow="fold",
            width=width,
        )
    for cells in zip(*(column.cells for column in columns), strict=True):
        part.add_row(*cells)
    return part


def write_json(path: Path, benchmark: str, content: Mapping[str, Any]) -> None:
    data = msgspec.json.encode({"benchmark": benchmark, "machine": machine(), **content})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(data, indent=2) + b"\n")


def run_with_progress(run: Callable[[Callable[[str], None]], T]) -> T:
    """Run a benchmark, which reports what it measures, and end the command if it cannot be run."""
    from rich.console import Console

    from parrot_gateway.settings.config_file import ConfigError

    console = Console(stderr=True)
    try:
        with console.status("starting") as status:
            return run(status.update)
    except (BenchmarkError, ConfigError) as error:
        console.print(str(error), style="red", highlight=False, markup=False)
        raise typer.Exit(1) from None


def load_average() -> str:
    """Of this machine, or `unknown`."""
    try:
        return ", ".join(f"{value:.1f}" for value in os.getloadavg())
    except OSError:
        return "unknown"


def _aim(row: Row) -> str:
    if row.at_most is not None:
        return f"{'+' if row.aims_at_added else ''}≤ {_number(row.at_most)}"
    if row.at_least is not None:
        return f"≥ {_number(row.at_least)}"
    return ""


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if math.isnan(value):
        return "failed"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    digits = 1 if size >= 100 else 2 if size >= 1 else 3 if size >= 0.01 else 5
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"


def _git_revision() -> str | None:
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        ).stdout.strip()

    try:
        revision = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return revision + ("+changes" if changed else "")
