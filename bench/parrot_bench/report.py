"""Reports of benchmarks: a table for people, JSON for machines, with the machine described."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import typer

from parrot_bench.machine import describe
from parrot_bench.servers import BenchmarkError
from parrot_bench.tables import number, text_table, yes_or_no
from parrot_gateway import __version__

T = TypeVar("T")

#: The option of every benchmark that names the file for `write_json`.
JsonFile: TypeAlias = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")
]

#: Packages whose versions move the figures.
PACKAGES = ("aiohttp", "fastapi", "httptools", "msgspec", "starlette", "uvicorn", "uvloop")
#: Those of an engine.
ENGINE_PACKAGES = ("torch", "triton", "llguidance", "vllm")


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
        """True if the aim is met; None without one."""
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
    described = describe((*PACKAGES, *ENGINE_PACKAGES))
    return described | {"parrot_gateway": __version__, "git": _git_revision()}


def show(title: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> None:
    """Print figures beside those without the gateway, and of peers."""
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    lines = []
    for row in rows:
        # The difference of two rates means nothing: real upstreams are slower than both.
        added = "" if row.unit.endswith("/s") else _shown(row.added)
        ratio = f"{row.gateway / row.direct:.2f}" if row.direct else ""
        cells = [_shown(row.direct), _shown(row.gateway), added, ratio]
        cells += [_shown(row.peers.get(name)) for name in peers]
        lines.append([row.name, row.unit, *cells, _aim(row), yes_or_no(row.met)])
    head = ("", "", "direct", "gateway", "added", "ratio", *peers, "aim", "met")
    print_table(head, lines, texts=2, title=title, notes=notes)


def print_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    texts: int = 1,
    title: str = "",
    notes: Sequence[str] = (),
) -> None:
    """Print a table (see `text_table`), and notes below it."""
    typer.echo(text_table(head, rows, texts=texts, title=title))
    for note in notes:
        typer.echo(note)


def _shown(value: float | None) -> str:
    return "" if value is None else "failed" if math.isnan(value) else number(value)


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
    """The load average of this machine, or `unknown`."""
    try:
        return ", ".join(f"{value:.1f}" for value in os.getloadavg())
    except OSError:
        return "unknown"


def _aim(row: Row) -> str:
    if row.at_most is not None:
        return f"{'+' if row.aims_at_added else ''}≤ {number(row.at_most)}"
    if row.at_least is not None:
        return f"≥ {number(row.at_least)}"
    return ""


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
