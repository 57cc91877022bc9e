"""A histogram: how many values fell below each bound."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import cache

from parrot_gateway.telemetry.metrics.definitions import Definition
from parrot_gateway.telemetry.metrics.exposition import number


class Distribution:
    """Counts of values between the bounds of a metric."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, definition: Definition) -> None:
        self._bounds = definition.buckets
        #: One more than bounds; each without those below.
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value in, as often as it was seen."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add(self, other: Distribution) -> None:
        """Count in what another of the same bounds has counted."""
        self._counts = [mine + its for mine, its in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum

    def lines(self, definition: Definition, labels: str) -> Iterator[str]:
        """Its samples under `definition`, whose bounds may be the first of its own.

        Args:
            labels: as of `label_text`.
        """
        name, total, counts = definition.name, 0, list(self._counts)
        others = labels[1:-1] + "," if labels else ""
        bucket = f'{name}_bucket{{{others}le="'
        for bound, count in zip(_written_bounds(definition), counts, strict=False):
            total += count
            yield f'{bucket}{bound}"}} {total}\n'
        total = sum(counts)
        yield f'{bucket}+Inf"}} {total}\n'
        yield f"{name}_count{labels} {total}\n"
        yield f"{name}_sum{labels} {number(self._sum)}\n"


@cache
def _written_bounds(definition: Definition) -> tuple[str, ...]:
    return tuple(map(number, definition.buckets))
