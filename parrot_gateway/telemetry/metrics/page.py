"""The metrics of a gateway: values counted as events happen, and the page of all of them."""

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
from prometheus_client.openmetrics import exposition as openmetrics

from parrot_gateway.telemetry.metrics import definitions as d
from parrot_gateway.telemetry.metrics.call_metrics import CallMetrics
from parrot_gateway.telemetry.metrics.distribution import Distribution
from parrot_gateway.telemetry.metrics.exposition import (
    CONTENT_TYPE,
    OPENMETRICS,
    family,
    render,
    with_head,
)
from parrot_gateway.telemetry.metrics.gauges import Gauges, Parts, Samples


class Metrics:
    """The metrics of one gateway. Used in the event loop's thread only.

    Args:
        parts: the parts that are read for each page.

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
        #: By content type.
        self._rendering: dict[str, asyncio.Task[bytes]] = {}

    def session_ended(self, calls: int, depth: int, width: int) -> None:
        """Count an ended session with a graph of that size; empty ones are ignored."""
        if calls:
            for distribution, size in zip(
                self._graphs.values(), (calls, depth, width), strict=True
            ):
                distribution.observe(size)

    async def page(self, content_type: str = CONTENT_TYPE) -> bytes:
        """Return the page of all current metrics.

        Concurrent callers share the page that is being written.

        Args:
            content_type: from `negotiate`.
        """
        rendering = self._rendering.get(content_type)
        if rendering is None:
            rendering = asyncio.ensure_future(self._render(content_type))
            self._rendering[content_type] = rendering
            rendering.add_done_callback(lambda _: self._rendering.pop(content_type))
        return await asyncio.shield(rendering)

    async def _render(self, content_type: str) -> bytes:
        await self._gauges.refresh()
        self._records.settle()
        return await render(self._pieces(content_type))

    def _pieces(self, content_type: str) -> Iterator[str]:
        samples, is_open = Samples(), content_type == OPENMETRICS
        for _ in self._gauges.read(samples):
            # Lets other work run before there is text.
            yield ""
        for definition in d.DEFINITIONS:
            if definition in self._graphs:
                lines = self._graphs[definition].lines(definition, "")
                yield from with_head(definition, lines, content_type)
            elif definition.kind == "histogram":
                lines = self.calls.histogram(definition, has_exemplars=is_open)
                yield from with_head(definition, lines, content_type)
            else:
                source = definition.same_as or definition
                values = {**samples.of(source), **self.calls.counters(source)}
                yield from family(definition, values, content_type)
        # `generate_latest` of OpenMetrics ends with the end mark.
        write = openmetrics.generate_latest if is_open else generate_latest
        yield write(self._process).decode()
