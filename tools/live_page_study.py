"""How smooth the live page is, in a headless Chromium: `python tools/live_page_study.py`.

The page is given events of its own form by a server without a gateway: a thousand sessions of which
many change every second, and one of a thousand calls that grows. CPU time is that of the page's
main thread for each frame, whatever else the machine does; times between frames are those of the
clock. Memory is the page's heap after garbage was collected. Needs playwright and a Chromium
(`--chromium`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from playwright.async_api import Page, async_playwright

from parrot_gateway.http.exchange import EVENT_STREAM, Exchange
from parrot_gateway.ui.static_files import PageFiles

SESSIONS = 1000
CALLS = 1000
LAYERS = 20
ENGINES = ("engine-0", "engine-1", "engine-2")
#: What the browser is asked for: times between its frames, in milliseconds.
_FRAMES = """(seconds) => new Promise((resolve) => {
  const times = [];
  let last = performance.now();
  const end = last + seconds * 1000;
  requestAnimationFrame(function step(now) {
    times.push(now - last);
    last = now;
    if (now < end) requestAnimationFrame(step);
    else resolve(times.slice(1));
  });
})"""


def session_view(number: int, rng: random.Random) -> dict[str, Any]:
    now = time.time()
    running = rng.randint(0, 4)
    return {
        "id": f"sess_{number}", "name": f"agent {number}", "tenant": "default",
        "inferred": number % 3 == 0, "state": "running" if running else "idle",
        "calls": rng.randint(1, 60), "running": running, "failed": 0, "depth": 4, "width": 3,
        "started": now - number, "last_activity": now, "prompt_tokens": 9000,
        "cached_tokens": 6000, "output_tokens": 800, "models": ["demo"],
    }  # fmt: skip


class GrowingGraph:
    """A graph of layers, each call reading two of the layer before."""

    def __init__(self) -> None:
        rng = random.Random(7)  # noqa: S311
        width = CALLS // LAYERS
        self.variables = []
        #: Moments at which a call begins or ends, and the call from then on.
        self.moments: list[tuple[float, dict[str, Any]]] = []
        for number in range(CALLS):
            layer = number // width
            begun, took = layer * 1.5 + rng.random(), 0.4 + rng.random()
            before = (layer - 1) * width
            call = {
                "id": f"c{number}", "name": f"step {layer}.{number % width}", "kind": "call",
                "state": "running", "stage": layer,
                "inputs": [f"v{before + rng.randrange(width)}" for _ in range(2 if layer else 0)],
                "output": f"v{number}", "transform": None, "tools": [], "model": "demo",
                "objective": "latency", "priority": 0, "tokens": 40, "group": None,
                "engine": ENGINES[number % 3], "placement": "prefix", "failure": None,
                "submitted_s": begun - 0.1, "started_s": begun, "first_token_s": begun + 0.1,
                "finished_s": None, "prompt_tokens": 900, "cached_tokens": 600, "output_tokens": 40,
            }  # fmt: skip
            over = call | {"state": "done", "finished_s": begun + took}
            self.moments += [(begun, call), (begun + took, over)]
            self.variables.append({"id": f"v{number}", "name": f"step {number}", "state": "ready",
                                   "producer": f"c{number}", "consumers": [], "size_bytes": 9,
                                   "session": None})  # fmt: skip
        self.moments.sort(key=lambda each: each[0])

    def between(self, begin: float, end: float) -> list[dict[str, Any]]:
        """The calls that have changed in this time."""
        return [call for moment, call in self.moments if begin <= moment < end]


class Server:
    """The page's files, and streams of made-up events.

    Args:
        rate: sessions that change in a second.
    """

    def __init__(self, rate: int) -> None:
        self._files = PageFiles()
        self._rate = rate

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        path = scope["path"]
        if path == "/ui/api/events":
            await self._stream(exchange, self._overview())
        elif path.endswith("/big/events"):
            await self._stream(exchange, self._graph())
        elif handler := self._files.find(exchange):
            await handler(exchange)
        else:
            await exchange.respond(404, b"{}", [])

    async def _stream(self, exchange: Exchange, events: AsyncIterator[tuple[str, Any]]) -> None:
        await exchange.start_stream(200, [*EVENT_STREAM], b": hello\n\n")
        async for name, data in events:
            await exchange.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())

    async def _overview(self) -> AsyncIterator[tuple[str, Any]]:
        rng = random.Random(1)  # noqa: S311
        sessions = [session_view(number, rng) for number in range(SESSIONS)]
        yield "overview", {"at": time.time(), "version": "study", "uptime_s": 1, "calls": {},
                           "models": [], "engines": [], "scheduler": None, "tenants": [],
                           "sessions": sessions}  # fmt: skip
        while True:
            await asyncio.sleep(0.1)
            changed = rng.sample(range(SESSIONS), self._rate // 10)
            yield "sessions", [session_view(number, rng) for number in changed]

    async def _graph(self) -> AsyncIterator[tuple[str, Any]]:
        graph, begun, before = GrowingGraph(), time.monotonic(), 0.5
        yield "graph", {"session": {"id": "big", "name": "big"}, "calls": graph.between(0, before),
                        "variables": graph.variables, "links": [], "inferred": False,
                        "now_s": before, "duration_s": before}  # fmt: skip
        while True:
            await asyncio.sleep(0.05)
            now = 0.5 + time.monotonic() - begun
            yield "change", {"nodes": graph.between(before, now), "variables": [], "links": [],
                             "gone": [], "now_s": now}  # fmt: skip
            before = now


class Clock:
    """Prints times between frames, and the CPU time of the page's main thread for each."""

    def __init__(self, page: Page, session: Any) -> None:
        self._page = page
        self._session = session

    async def measure(self, what: str, seconds: float, moving: Any = None) -> None:
        """While something is done."""
        before = await self._cpu_s()
        measured = asyncio.create_task(self._page.evaluate(_FRAMES, seconds))
        while not measured.done() and moving is not None:
            await moving()
        times = sorted(await measured)
        cpu = (await self._cpu_s() - before) / len(times) * 1000
        middle, most = times[len(times) // 2], times[int(len(times) * 0.99)]
        print(f"{what:44}{len(times):7}{cpu:9.1f}{middle:8.1f}{most:8.1f}")

    async def _cpu_s(self) -> float:
        metrics = (await self._session.send("Performance.getMetrics"))["metrics"]
        return next(float(each["value"]) for each in metrics if each["name"] == "TaskDuration")


async def heap(session: Any) -> float:
    await session.send("HeapProfiler.collectGarbage")
    metrics = (await session.send("Performance.getMetrics"))["metrics"]
    return next(each["value"] for each in metrics if each["name"] == "JSHeapUsedSize") / 1e6


async def study(options: argparse.Namespace) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            Server(options.rate), log_level="critical", lifespan="off", timeout_graceful_shutdown=1
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    root = f"http://127.0.0.1:{listener.getsockname()[1]}/ui/"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=options.chromium, args=["--no-sandbox"]
        )
        page = await browser.new_page(viewport={"width": 1440, "height": 900})
        session = await page.context.new_cdp_session(page)
        await session.send("Performance.enable", {"timeDomain": "threadTicks"})
        clock = Clock(page, session)
        begun = time.monotonic()
        await page.goto(f"{root}#/sessions/big")
        await page.locator(".node").first.wait_for(state="attached")
        print(f"from the request to a live graph: {time.monotonic() - begun:.2f} s\n")
        print(f"{'':44}{'frames':>7}{'CPU ms':>9}{'ms p50':>8}{'p99':>8}")
        await clock.measure("graph grows to 1,000 calls, list live", 34)
        await page.mouse.move(800, 350)

        async def drag() -> None:
            await page.mouse.down()
            for x in (*range(800, 1100, 15), *range(1100, 800, -15)):
                await page.mouse.move(x, 350)
            await page.mouse.up()

        async def scale() -> None:
            for delta in (*[-60] * 24, *[60] * 24):
                await page.mouse.wheel(0, delta)

        await clock.measure("all of 1,000 calls are dragged", 5, drag)
        await clock.measure("they are scaled in and out", 5, scale)
        await page.mouse.move(150, 500)

        async def scroll() -> None:
            for delta in (*[300] * 20, *[-300] * 20):
                await page.mouse.wheel(0, delta)

        await clock.measure("the list of 1,000 sessions is scrolled", 5, scroll)
        if options.minutes:
            await page.goto(f"{root}#/sessions")
            await asyncio.sleep(20)
            first = await heap(session)
            await asyncio.sleep(options.minutes * 60)
            print(f"\nheap: {first:.2f} MB, after {options.minutes} min of {options.rate} changes "
                  f"a second {await heap(session):.2f} MB")  # fmt: skip
        await browser.close()
    server.should_exit = True
    await serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="(%(default)s)")
    parser.add_argument("--rate", type=int, default=60, help="changes a second (%(default)s)")
    parser.add_argument("--minutes", type=float, default=0, help="watch memory for so long")
    asyncio.run(study(parser.parse_args()))


if __name__ == "__main__":
    main()
