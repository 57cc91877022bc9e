"""The page of metrics, in Prometheus's text format 0.0.4 or in that of OpenMetrics 1.0.

It is written between turns of the event loop.

Hundreds of engines are tens of thousands of characters; written in one go they would hold up every
stream, and written by a thread too, as that holds the interpreter's lock for just as long.
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
    """The content type for what a scraper accepts; Prometheus asks for OpenMetrics first."""
    _, chosen = choose_encoder(accept)
    return OPENMETRICS if chosen.startswith("application/openmetrics-text") else CONTENT_TYPE


async def render(pieces: Iterable[str]) -> bytes:
    """All pieces of a page, however long; other work of the loop goes on in between."""
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
    """The text of a counter or a gauge, by labels as of `label_text`; none without samples."""
    (name,) = definition.sample_names
    lines = (f"{name}{labels} {number(value)}\n" for labels, value in samples.items())
    return with_head(definition, lines, content_type)


def with_head(definition: Definition, lines: Iterable[str], content_type: str) -> Iterator[str]:
    """The text of a metric of whose samples there are lines; none without any."""
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
    """Write a value as Prometheus reads it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
