"""What the live page's feed costs a gateway: `python tools/live_feed_study.py`.

A gateway without engines or HTTP gets calls from here: many sessions, half of them inferred by the
linking process, and one of many calls. The same changes then come without and with watchers; CPU
seconds are those of the gateway's process, pauses the longest CPU time of one turn of its event
loop's callbacks.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from asyncio.events import Handle
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from parrot_gateway.linking.process.wire import AnswerSeen, RequestSeen
from parrot_gateway.semantic.recorded_calls import RecordedCall
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.settings.model import Settings
from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.ui.feed import Watcher

PATH = "/v1/chat/completions"
BIG = "big"


class Pauses:
    """The longest CPU time of one callback since it was last read."""

    def __init__(self) -> None:
        self.longest = 0.0
        run = Handle._run

        def timed(handle: Handle) -> None:
            began = time.thread_time()
            run(handle)
            self.longest = max(self.longest, time.thread_time() - began)

        Handle._run = timed  # type: ignore[method-assign]

    def read_ms(self) -> float:
        longest, self.longest = self.longest, 0.0
        return longest * 1000


class Calls:
    """Calls that begin and end, as the routes make them known."""

    def __init__(self) -> None:
        self.gateway = Gateway(Settings())
        self._number = 0

    def begin(self, text: str, session: str = "") -> tuple[CallRecord, RecordedCall | None]:
        self._number += 1
        request_id, call_id = f"req_{self._number:032x}", f"call_{self._number:024x}"
        record = CallRecord(request_id, call_id, time.perf_counter(), model="m")
        recorded = None
        if session:
            recorded = self.gateway.semantic.recorder.record(record.tenant, session, "chat", "m")
            assert recorded is not None
            record.session, record.call_id = recorded.session.id, recorded.node.id
        self.gateway.call_records.begin(record, PATH)
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        self._link(
            RequestSeen(
                record.tenant, record.call_id, request_id, PATH, record.session or "", time.time(),
                msgspec.json.encode(body),
            )
        )  # fmt: skip
        return record, recorded

    def end(self, record: CallRecord, recorded: RecordedCall | None) -> None:
        record.submitted = record.placed = record.first_token = time.perf_counter()
        record.engine, record.reason, record.status = "engine", "load", 200
        record.prompt_tokens, record.output_tokens = 100, 20
        if recorded is not None:
            recorded.started("engine", 0.0, "load")
            recorded.ended(None)
        record.end()
        message = {"role": "assistant", "content": f"An answer of its own, {record.call_id}."}
        body = {"id": f"id-{record.call_id}", "choices": [{"message": message}]}
        self._link(
            AnswerSeen(record.tenant, record.call_id, 200, time.time(), msgspec.json.encode(body))
        )

    def _link(self, message: RequestSeen | AnswerSeen) -> None:
        self.gateway.linking._gather(message)

    async def fill(self, sessions: int, calls: int) -> None:
        """Sessions of three calls or one, and one of many."""
        for number in range(sessions // 2):
            for turn in range(3):
                self.end(*self.begin(f"Question {turn}?", f"declared-{number}"))
            self.end(*self.begin(f"Something that nobody else asks: {number * 7919}"))
            await asyncio.sleep(0.001)
        for number in range(calls):
            self.end(*self.begin(f"Question {number}?", BIG))
            await asyncio.sleep(0.001)
        await self.gateway.linking.describe()

    async def change(self, seconds: float, rate: float, sessions: int) -> int:
        """Begin and end calls, half of them in the large session; how many changes that made."""
        began, changes = time.perf_counter(), 0
        running: deque[tuple[CallRecord, RecordedCall | None]] = deque()
        while (passed := time.perf_counter() - began) < seconds:
            while changes < passed * rate:
                changes += 1
                if changes % 2:
                    name = BIG if changes % 4 == 1 else f"declared-{changes % (sessions // 2)}"
                    running.append(self.begin(f"Live {changes}?", name))
                else:
                    self.end(*running.popleft())
            await asyncio.sleep(0.005)
        return changes


async def read(watcher: Watcher, everything: Callable[[], bytes], sizes: list[int]) -> None:
    """Read a stream as the routes do."""
    sizes.append(len(watcher.begin(everything)))
    while not watcher.is_closed:
        data = await watcher.read(15.0)
        sizes.append(len(watcher.begin(everything) if watcher.is_stale else data))


async def study(sessions: int, calls: int, rate: float, seconds: float) -> None:
    pauses, load = Pauses(), Calls()
    gateway, feed = load.gateway, load.gateway.feed
    await gateway.linking.start()
    await load.fill(sessions, calls)
    gc.collect()
    gc.freeze()
    await asyncio.sleep(0)

    async def measured(work: Any, what: str, sizes: list[int]) -> float:
        pauses.read_ms()
        sizes.clear()
        began, cpu = time.perf_counter(), time.process_time()
        await work
        cpu, wall = time.process_time() - cpu, time.perf_counter() - began
        print(
            f"{what:34} {cpu * 1000:7.1f} ms CPU in {wall:5.2f} s   longest pause "
            f"{pauses.read_ms():4.1f} ms   {sum(sizes) / 1000:7.1f} kB"
        )
        return cpu

    sizes: list[int] = []
    alone = await measured(load.change(seconds, rate, sessions), "changes, nobody watches", sizes)
    big = gateway.semantic.sessions.find("default", BIG).id
    everything, graph = feed.watch(), feed.watch_session(big)
    await measured(everything.__aenter__(), "first watcher: the list is made", sizes)
    async with feed.watch() as watcher:
        listing = asyncio.create_task(read(watcher, feed.overview, sizes))
        await measured(asyncio.sleep(0.1), "the overview is read", sizes)
        await measured(graph.__aenter__(), "the graph is made", sizes)
        async with feed.watch_session(big) as (of_graph, whole):
            drawing = asyncio.create_task(read(of_graph, whole, sizes))
            await measured(asyncio.sleep(0.1), "the graph is read", sizes)
            watched = await measured(
                load.change(seconds, rate, sessions), "changes, two watchers", sizes
            )
            await measured(asyncio.sleep(seconds), "no changes, two watchers", sizes)
            drawing.cancel()
        listing.cancel()
    await graph.__aexit__(None, None, None)
    await everything.__aexit__(None, None, None)
    each = (watched - alone) / (rate * seconds)
    print(f"a change costs {each * 1000:.2f} ms of CPU more where it is watched")
    await gateway.linking.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=1000, help="of the one large graph")
    parser.add_argument("--rate", type=float, default=60.0, help="changes a second")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each part")
    given = parser.parse_args()
    asyncio.run(study(given.sessions, given.calls, given.rate, given.seconds))
