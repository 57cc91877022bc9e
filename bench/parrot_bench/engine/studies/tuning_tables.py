"""Sweeps over kernels and tiles: compile all, find the fastest, write the engine's tables."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

from parrot_engine.kernels.tuning import COLUMNS, Measured, Tuning, read_table

#: The fastest tuning by the weight and the number of tokens; None: torch's product is faster.
Best: TypeAlias = dict[Measured, dict[int, Tuning | None]]


def compile_all(compile_one: Callable[..., None], jobs: Sequence[Sequence[Any]]) -> None:
    """Run each candidate once, which leaves it in Triton's cache on disk, on many cores."""
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, *zip(*jobs, strict=True), chunksize=4))


def fastest(
    tunings: Sequence[Tuning], time_one: Callable[[Tuning, int], float], again: tuple[int, int]
) -> dict[str, Any]:
    """Time all, the first few again; report the best, and the best of each kind.

    Args:
        tunings: to time.
        time_one: gives the seconds of a tuning, by a number of repeats.
        again: how many are timed again, and with how many repeats.
    """

    def ranked(tunings: Sequence[Tuning], repeats: int) -> list[tuple[float, Tuning]]:
        timed = [(time_one(tuning, repeats), tuning) for tuning in tunings]
        return sorted(timed, key=lambda entry: entry[0])

    first = ranked(tunings, 5)
    best = ranked([tuning for _, tuning in first[: again[0]]], again[1])
    kinds = {}
    for seconds, tuning in reversed(first):
        kinds[tuning.kind + (" cut" if tuning.splits > 1 else "")] = (seconds, tuning)
    return {
        "us": round(1e6 * best[0][0], 2),
        "best": [[round(seconds * 1e6, 2), *tuning] for seconds, tuning in best],
        "by_kind": {kind: [round(s * 1e6, 2), *tuning] for kind, (s, tuning) in kinds.items()},
    }


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
