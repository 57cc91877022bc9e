"""How smooth the live page is, in a headless Chromium: `python tools/live_page_study.py`.

The page is given events of its own form by a server without a gateway: a thousand sessions of which
many change every second, one of a thousand calls that grows, and one in which old calls make room
for new ones without an end. CPU time is that of the page's main thread for each frame, whatever
else the machine does; times between frames are those of the clock. Memory is the page's heap after
garbage was collected, with the endless graph open. Needs playwright and a Chromium (`--chromium`).
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


def _call(number: int, name: str, inputs: list[str], begun: float) -> dict[str, Any]:
    """A call that has begun."""
    return {
        "id": f"c{number}", "name": name, "kind": "call", "state": "running", "stage": 0,
        "inputs": inputs, "output": f"v{number}", "transform": None, "tools": [], "model": "demo",
        "objective": "latency", "priority": 0, "tokens": 40, "group": None,
        "engine": ENGINES[number % 3], "placement": "prefix", "failure": None,
        "submitted_s": begun - 0.1, "started_s": begun, "first_token_s": begun + 0.1,
        "finished_s": None, "prompt_tokens": 900, "cached_tokens": 600, "output_tokens": 40,
    }  # fmt: skip


def _variable(number: int) -> dict[str, Any]:
    return {"id": f"v{number}", "name": f"step {number}", "state": "ready",
            "producer": f"c{number}", "consumers": [], "size_bytes": 9,
            "session": None}  # fmt: skip


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
            inputs = [f"v{before + rng.randrange(width)}" for _ in range(2 if layer else 0)]
            call = _call(number, f"step {layer}.{number % width}", inputs, begun)
            call["stage"] = layer
            over = call | {"state": "done", "finished_s": begun + took}
            self.moments += [(begun, call), (begun + took, over)]
            self.variables.append(_variable(number))
        self.moments.sort(key=lambda each: each[0])

    def between(self, begin: float, end: float) -> list[dict[str, Any]]:
        """The calls that have changed in this time."""
        return [call for moment, call in self.moments if begin <= moment < end]


class EndlessGraph:
    """The newest calls of a session without an end, of which the oldest make room.

    Args:
        calls: that are kept.
    """

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._rng = random.Random(3)  # noqa: S311
        self._begun = 0
        self._running: list[dict[str, Any]] = []

    def begin(self, now: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """A call that begins and reads what two of the last forty wrote; what it writes."""
        number = self._begun
        self._begun += 1
        before = [number - self._rng.randint(1, 40) for _ in range(2)]
        call = _call(number, f"turn {number}", [f"v{each}" for each in before if each >= 0], now)
        self._running.append(call)
        return call, _variable(number)

    def end(self, now: float) -> dict[str, Any]:
        """The call that has run longest, which ends."""
        return self._running.pop(0) | {"state": "done", "finished_s": now}

    def whole(self) -> dict[str, Any]:
        """As many calls as are kept, all but the last three of which have ended."""
        pairs = [self.begin(number * 0.1) for number in range(self._calls)]
        ended = [self.end(number * 0.1 + 0.3) for number in range(self._calls - 3)]
        return {"session": {"id": "endless", "name": "endless"},
                "calls": [*ended, *self._running], "variables": [each for _, each in pairs],
                "links": [], "inferred": False, "now_s": self._calls * 0.1,
                "duration_s": self._calls * 0.1}  # fmt: skip

    def turn(self, now: float) -> dict[str, Any]:
        """A call that ends, one that begins, and the oldest, which is no longer kept."""
        ended = self.end(now)
        call, variable = self.begin(now)
        return {"nodes": [ended, call], "variables": [variable], "links": [],
                "gone": [f"c{self._begun - 1 - self._calls}"], "now_s": now}  # fmt: skip


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
        elif path.endswith("/endless/events"):
            await self._stream(exchange, self._endless())
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

    async def _endless(self) -> AsyncIterator[tuple[str, Any]]:
        graph, begun = EndlessGraph(CALLS), time.monotonic()
        yield "graph", graph.whole()
        # Each turn is two changes of a call.
        while True:
            await asyncio.sleep(2 / self._rate)
            yield "change", graph.turn(CALLS * 0.1 + time.monotonic() - begun)


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
    """Of the page, in MB: the least of some, as one may be taken in the middle of an event."""
    sizes = []
    for _ in range(5):
        await session.send("HeapProfiler.collectGarbage")
        metrics = (await session.send("Performance.getMetrics"))["metrics"]
        used = next(each["value"] for each in metrics if each["name"] == "JSHeapUsedSize")
        sizes.append(float(used) / 1e6)
    return min(sizes)


async def watch_memory(session: Any, options: argparse.Namespace) -> None:
    """Print the heap every minute while the list and an open graph change."""
    print(f"\n{options.rate} changes a second of the list and as many of the open graph")
    print(f"{'minute':>7}{'heap MB':>10}{'elements':>10}{'listeners':>10}")
    # By then all calls that were there at first have been replaced.
    await asyncio.sleep(2 * CALLS / options.rate)
    begun = time.monotonic()
    for minute in range(int(options.minutes) + 1):
        await asyncio.sleep(max(0.0, begun + minute * 60 - time.monotonic()))
        size = await heap(session)
        metrics = (await session.send("Performance.getMetrics"))["metrics"]
        counts = {each["name"]: int(each["value"]) for each in metrics}
        print(f"{minute:7}{size:10.2f}{counts['Nodes']:10}{counts['JSEventListeners']:10}",
              flush=True)  # fmt: skip


async def watch_frames(page: Page, session: Any, root: str) -> None:
    """Print how long frames take while the graph and the list grow, move and are scaled."""
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
        if options.frames:
            await watch_frames(page, session, root)
        if options.minutes:
            await page.goto("about:blank")
            await page.goto(f"{root}#/sessions/endless")
            await watch_memory(session, options)
        await browser.close()
    server.should_exit = True
    await serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="(%(default)s)")
    parser.add_argument("--rate", type=int, default=60, help="changes a second (%(default)s)")
    parser.add_argument(
        "--frames", default=True, action=argparse.BooleanOptionalAction, help="measure frame times"
    )
    parser.add_argument("--minutes", type=float, default=0, help="watch memory for so long")
    asyncio.run(study(parser.parse_args()))


if __name__ == "__main__":
    main()
