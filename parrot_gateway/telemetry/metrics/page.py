"""The metrics of a gateway: what is counted as it happens, and the page of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from parrot_gateway.telemetry.metrics import definitions as d
from parrot_gateway.telemetry.metrics.call_metrics import CallMetrics
from parrot_gateway.telemetry.metrics.distribution import Distribution
from parrot_gateway.telemetry.metrics.exposition import family, render, with_head
from parrot_gateway.telemetry.metrics.gauges import Gauges, Parts, Samples


class Metrics:
    """The metrics of one gateway. Used in the event loop's thread only.

    Args:
        parts: that are read for each page.

    Attributes:
        calls: counts calls; `CallMetrics.count` takes their records.
    """

    def __init__(self, parts: Parts) -> None:
        self.calls = CallMetrics(
            lambda: {engine.name for engine in parts.registry.joined.values()},
            lambda: {name for each in parts.upstreams.values() for name in each.settings.servers},
            parts.serves,
        )
        self._records = parts.calls
        self._gauges = Gauges(parts)
        self._graphs = {
            definition: Distribution(definition)
            for definition in (d.GRAPH_CALLS, d.GRAPH_DEPTH, d.GRAPH_WIDTH)
        }
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        GCCollector(registry=self._process)
        PlatformCollector(registry=self._process)
        self._rendering: asyncio.Task[bytes] | None = None

    def session_ended(self, calls: int, depth: int, width: int) -> None:
        """A session with a graph of that size has ended; empty ones do not count."""
        if calls:
            for distribution, size in zip(
                self._graphs.values(), (calls, depth, width), strict=True
            ):
                distribution.observe(size)

    async def page(self) -> bytes:
        """All metrics as they are now, in Prometheus's text format.

        Whoever asks while a page is being written gets that one.
        """
        if self._rendering is None:
            self._rendering = asyncio.ensure_future(self._render())
            self._rendering.add_done_callback(self._has_rendered)
        return await asyncio.shield(self._rendering)

    async def _render(self) -> bytes:
        await self._gauges.refresh()
        self._records.settle()
        return await render(self._pieces())

    def _has_rendered(self, _: asyncio.Task[bytes]) -> None:
        self._rendering = None

    def _pieces(self) -> Iterator[str]:
        samples = Samples()
        for _ in self._gauges.read(samples):
            # Nothing to write yet, but other work may go on.
            yield ""
        for definition in d.DEFINITIONS:
            if definition in self._graphs:
                yield from with_head(definition, self._graphs[definition].lines(definition, ""))
            elif definition.kind == "histogram":
                yield from with_head(definition, self.calls.histogram(definition))
            else:
                source = definition.same_as or definition
                values = {**samples.of(source), **self.calls.counters(source)}
                yield from family(definition, values)
        yield generate_latest(self._process).decode()
