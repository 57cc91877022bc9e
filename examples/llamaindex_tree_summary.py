"""Run with `make serve` up: .venv/bin/python examples/llamaindex_tree_summary.py [--compare]

LlamaIndex summarises some pages of "Alice's Adventures in Wonderland" as a tree: passages first,
then the summaries. Its query engine is unchanged; `defer=True` makes it submit the whole tree
before the first summary is written. Needs `pip install -e '.[llama-index]'`.

With --compare, the same once more with the gateway's graph knowledge off (`defer=False,
linking=False`), both over a network of 100 ms that is simulated here. Each run reads other pages,
so that none finds the other's in the prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from llama_index.core import Document, SummaryIndex
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent
from llama_index.llms.parrot import Parrot
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.event_handlers import BaseEventHandler

from parrot_gateway.bench.apps import book

BASE_URL = os.environ.get("PARROT_BASE_URL", "http://127.0.0.1:8000/v1")
MODEL = "parrot-demo"
CHARACTERS = 16_000
DELAY_S = 0.1


class Ran(NamedTuple):
    """What one run gave and took."""

    text: str
    calls: int
    requests: int
    time_s: float
    filled_tokens: int
    reused_tokens: int


class Calls(BaseEventHandler):
    """Counts the calls of models that LlamaIndex makes."""

    count: int = 0

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Take note of an event."""
        self.count += isinstance(event, LLMChatStartEvent)


CALLS = Calls()
get_dispatcher().add_event_handler(CALLS)


def summarise(base_url: str, *, knows_graph: bool, number: int) -> str:
    """The application: an ordinary query engine, and one line that waits for its answer."""
    llm = Parrot(
        model=MODEL,
        base_url=base_url,
        max_tokens=40,
        temperature=0.0,
        defer=knows_graph,
        linking=knows_graph,
    )
    pages = Document(text=book.passage(CHARACTERS, start=997 * number))
    engine = SummaryIndex.from_documents([pages]).as_query_engine(
        llm=llm, response_mode="tree_summarize"
    )
    return str(llm.resolve(engine.query("What happens to Alice?")))


def measured(base_url: str, *, knows_graph: bool, number: int, delay_s: float) -> Ran:
    """One run, over a network that takes `delay_s` there and back."""
    before, calls = tokens(base_url), CALLS.count
    with far_away(base_url, delay_s) if delay_s else nullcontext(Road(base_url)) as road:
        began = time.perf_counter()
        text = summarise(road.base_url, knows_graph=knows_graph, number=number)
        time_s = time.perf_counter() - began
    filled, reused = (after - then for after, then in zip(tokens(base_url), before, strict=True))
    return Ran(text, CALLS.count - calls, road.requests, time_s, filled, reused)


def tokens(base_url: str) -> tuple[int, int]:
    """Prompt tokens filled and found in the prefix cache by all engines, as of now."""
    key = {"Authorization": f"Bearer {os.environ.get('PARROT_API_KEY', 'none')}"}
    asked = time.monotonic()
    health = urllib.request.Request(base_url.removesuffix("/v1") + "/health", headers=key)  # noqa: S310
    while True:
        # The address is the user's own: what S310 warns of cannot be.
        with urllib.request.urlopen(health, timeout=10) as answer:  # noqa: S310
            engines = json.load(answer)["engines"]
        age_s = max((engine["stats_age_s"] for engine in engines), default=0.0)
        if time.monotonic() - age_s >= asked:
            stats: list[dict[str, int]] = [engine["stats"] for engine in engines]
            filled = sum(each["filled_tokens"] for each in stats)
            return filled, sum(each["cached_tokens"] for each in stats)
        time.sleep(0.05)


class Road:
    """The way to the gateway, and how often it was taken (counted if it is a long one)."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.requests = 0


@contextmanager
def far_away(base_url: str, delay_s: float) -> Iterator[Road]:
    """A relay in front of the gateway that holds all bytes back, half of `delay_s` each way."""
    to = urlsplit(base_url)
    loop = asyncio.new_event_loop()
    road = Road(base_url)

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, out: bool) -> None:
        while data := await reader.read(65536):
            if out and data.startswith((b"POST ", b"GET ")):
                road.requests += 1
            await asyncio.sleep(delay_s / 2)
            writer.write(data)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(to.hostname, to.port)
        await asyncio.gather(pipe(reader, there[1], True), pipe(there[0], writer, False))

    server: Any = loop.run_until_complete(asyncio.start_server(connected, "127.0.0.1", 0))
    road.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{to.path}"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield road
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        server.close()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def show(title: str, ran: Ran) -> None:
    """Print what a run took."""
    print(f"{title}\n  {ran.text.strip()!r}")
    print(f"  calls          {ran.calls}")
    if ran.requests:
        print(f"  requests       {ran.requests}")
    print(f"  time           {ran.time_s:.2f} s")
    print(f"  tokens filled  {ran.filled_tokens}")
    print(f"  tokens reused  {ran.reused_tokens}\n")


def main(base_url: str = BASE_URL, *, compare: bool = False) -> list[Ran]:
    """Run it once, or with and without graph knowledge over a slow network."""
    if not compare:
        ran = [measured(base_url, knows_graph=True, number=0, delay_s=0)]
        show("Deferred: the whole tree submitted at once", ran[0])
        return ran
    runs = [
        measured(base_url, knows_graph=knows, number=number, delay_s=DELAY_S)
        for number, knows in enumerate((False, True), start=1)
    ]
    show(f"Call by call, network of {DELAY_S * 1000:.0f} ms", runs[0])
    show(f"Deferred, network of {DELAY_S * 1000:.0f} ms", runs[1])
    return runs


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--compare", action="store_true")
    main(compare=parser.parse_args().compare)
