"""The page of metrics in Prometheus's text format 0.0.4 or in OpenMetrics 1.0.

The page is written between turns of the event loop.

Hundreds of engines make tens of thousands of characters, which would block every stream if written
at once. A thread would not help, because it holds the interpreter's lock for just as long.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.exposition import choose_encoder

from parrot_gateway.telemetry.metrics.definitions import Definition

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

#: Longest work in one turn of the event loop.
_TURN_S = 0.001
#: Samples in one piece of text.
_PIECE = 128


def negotiate(accept: str) -> str:
    """Choose the content type from a scraper's Accept header; Prometheus prefers OpenMetrics."""
    _, chosen = choose_encoder(accept)
    return OPENMETRICS if chosen.startswith("application/openmetrics-text") else CONTENT_TYPE


async def render(pieces: Iterable[str]) -> bytes:
    """Join all pieces of a page, letting the event loop do other work in between."""
    page: list[bytes] = []
    began = time.perf_counter()
    for piece in pieces:
        page.append(piece.encode())
        if time.perf_counter() - began > _TURN_S:
            await asyncio.sleep(0)
            began = time.perf_counter()
    return b"".join(page)


def family(
    definition: Definition, samples: Mapping[str, float], content_type: str
) -> Iterator[str]:
    """Yield the text of a counter or gauge, by labels in the form of `label_text`; nothing without
    samples.
    """
    (name,) = definition.sample_names
    lines = (f"{name}{labels} {number(value)}\n" for labels, value in samples.items())
    return with_head(definition, lines, content_type)


def with_head(definition: Definition, lines: Iterable[str], content_type: str) -> Iterator[str]:
    """Yield the text of a metric from its sample lines; nothing without lines."""
    is_total = definition.kind == "counter" and content_type == CONTENT_TYPE
    name = definition.sample_names[0] if is_total else definition.name
    head, piece = f"# HELP {name} {definition.help}\n# TYPE {name} {definition.kind}\n", []
    for line in lines:
        if head:
            piece.append(head)
            head = ""
        piece.append(line)
        if len(piece) >= _PIECE:
            yield "".join(piece)
            piece = []
    if piece:
        yield "".join(piece)


def number(value: float) -> str:
    """Format a value for Prometheus."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
