"""The harness of all studies: it finds and runs one, and prints its entries.

A study is a module of this package with `add_arguments(parser)` and `run(options)`. Its
docstring is its help. Entries go to standard output, a line of JSON each, as they are measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

STUDIES = {
    "kernels": "attention and the kernels over rows, beside the device's limits",
    "steps": "steps of a whole model with random weights",
    "matmul_sweep": "kernels and tiles for products of few tokens; writes the engine's table",
    "quantized_matmul": "the same with packed weights; writes the engine's tables",
}

#: Entries of the study of this process.
_entries: list[Mapping[str, Any]] = []


def emit(entry: Mapping[str, Any]) -> None:
    """Print one entry as a line of JSON, and keep it for `--json`."""
    _entries.append(entry)
    print(json.dumps(entry), flush=True)


class Study(Protocol):
    """A module of this package."""

    __doc__: str | None
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def main(arguments: Sequence[str]) -> None:
    """The command line: the name of a study, then its own options."""
    if not arguments or arguments[0] not in STUDIES:
        for name, summary in STUDIES.items():
            print(f"{name:16} {summary}")
        if arguments and arguments[0] not in ("-h", "--help"):
            raise SystemExit(f"there is no study '{arguments[0]}'")
        return
    name, *rest = arguments
    study = cast(Study, importlib.import_module(f"parrot_bench.engine.studies.{name}"))
    run_study(study, rest, program=f"parrot-gateway bench studies {name}")


def run_study(study: Study, arguments: Sequence[str], program: str | None = None) -> None:
    """Run one study with its options."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=study.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    study.add_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all entries here")
    options = parser.parse_args(arguments)
    _entries.clear()
    study.run(options)
    if options.json is not None:
        options.json.write_text(json.dumps(_entries, indent=2) + "\n", encoding="utf-8")
