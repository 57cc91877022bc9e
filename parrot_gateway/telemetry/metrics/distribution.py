"""A histogram: the number of values below each bound."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from parrot_gateway.telemetry.metrics.definitions import Definition
from parrot_gateway.telemetry.metrics.exposition import number
from parrot_gateway.telemetry.trace_context import CallTrace


class Exemplar(NamedTuple):
    """A counted call, and its trace."""

    #: Shown only once the trace has a span; until then its id may change.
    trace: CallTrace
    value: float
    #: Unix time.
    at: float


class Distribution:
    """Counts of values between the bounds of a metric."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_sum")

    def __init__(self, definition: Definition) -> None:
        self._bounds = definition.buckets
        #: One more than bounds; not cumulative.
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        #: The latest exemplar between two bounds, by index of the upper one.
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def exemplify(self, value: float, trace: CallTrace, at: float) -> None:
        """Attach the trace of a call whose value was counted."""
        self._exemplars[bisect_left(self._bounds, value)] = Exemplar(trace, value, at)

    def add(self, other: Distribution) -> None:
        """Add the counts of another distribution with the same bounds."""
        self._counts = [mine + its for mine, its in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum
        self._exemplars.update(other._exemplars)

    def lines(
        self, definition: Definition, labels: str, *, has_exemplars: bool = False
    ) -> Iterator[str]:
        """Yield its samples under `definition`, whose bounds may be a prefix of its own.

        Args:
            labels: in the form of `label_text`.
            has_exemplars: true adds exemplars, which only OpenMetrics supports.
        """
        exemplars = dict(self._exemplars) if has_exemplars else {}
        name, total, counts = definition.name, 0, list(self._counts)
        others = labels[1:-1] + "," if labels else ""
        bucket = f'{name}_bucket{{{others}le="'
        for place, bound in enumerate(_written_bounds(definition)):
            total += counts[place]
            yield f'{bucket}{bound}"}} {total}{_written(exemplars.pop(place, None))}\n'
        total = sum(counts)
        rest = exemplars[max(exemplars)] if exemplars else None
        yield f'{bucket}+Inf"}} {total}{_written(rest)}\n'
        yield f"{name}_count{labels} {total}\n"
        yield f"{name}_sum{labels} {number(self._sum)}\n"


def _written(exemplar: Exemplar | None) -> str:
    if exemplar is None or not exemplar.trace.has_span:
        return ""
    trace, value, at = exemplar
    return f' # {{trace_id="{trace.trace_id:032x}"}} {number(value)} {at:.3f}'


@cache
def _written_bounds(definition: Definition) -> tuple[str, ...]:
    return tuple(map(number, definition.buckets))
