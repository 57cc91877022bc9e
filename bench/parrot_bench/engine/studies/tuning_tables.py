"""Writes the tables of `parrot_engine.kernels.tuning` from what a sweep found."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TypeAlias

from parrot_engine.kernels.tuning import COLUMNS, Measured, Tuning, read_table

#: The fastest tuning by the weight and the number of tokens; None: torch's product is faster.
Best: TypeAlias = dict[Measured, dict[int, Tuning | None]]


def update_table(path: Path, best: Best) -> None:
    """Put `best` into a table, in place of what it holds for the same weights and tokens."""
    table = {measured: dict(classes) for measured, classes in read_table(path).items()}
    for measured, classes in best.items():
        table[measured] = dict(sorted((table.get(measured, {}) | classes).items()))
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for (weight, gated, *sizes), classes in table.items():
            for tokens, tuning in classes.items():
                kind, options = "torch", [""] * len(COLUMNS[6:])
                if tuning is not None:
                    kind, options = tuning.kind, [str(int(value)) for value in tuning[2:]]
                rows.writerow([weight, int(gated), *sizes, tokens, kind, *options])
    read_table.cache_clear()
