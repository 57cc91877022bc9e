"""Sessions on one clock: requests and answers, interleaved, in the order in which they happen.

A client sends a call when it has the answers that the call waits for, and a pause later. A number
of sessions are live at once; when one ends the next starts.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from parrot_bench.linking.script import Call, Script

#: When the sessions that are live first begin: spread over some minutes, or those of one task in
#: the same moment.
Start: TypeAlias = Literal["spread", "tasks"]
SPREAD_S = 120.0


class Event(NamedTuple):
    at_s: float
    what: Literal["request", "answer"]
    call: Call


def schedule(
    scripts: Sequence[Script], *, live: int = 200, start: Start = "spread", seed: int = 0
) -> Iterator[Event]:
    """All requests and answers, by time; what happens in one moment in a drawn order.

    Args:
        live: sessions that run at once, at most (with "tasks": tasks that have begun).
    """
    draw = random.Random(seed)
    batches: dict[str, list[Script]] = defaultdict(list)
    for script in scripts:
        batches[script.task if start == "tasks" else script.session].append(script)
    waiting = list(reversed(batches.values()))
    heap: list[tuple[float, float, Literal["request", "answer"], Call, Script]] = []
    open_calls = {script.session: len(script.calls) for script in scripts}
    missing = {call.id: len(call.after) for script in scripts for call in script.calls.values()}
    readers: dict[str, list[Call]] = defaultdict(list)
    for script in scripts:
        for call in script.calls.values():
            for source in call.after:
                readers[source].append(call)

    def send(call: Call, script: Script, now: float) -> None:
        heapq.heappush(heap, (now, draw.random(), "request", call, script))

    running = 0

    def begin(now: float, spread_s: float = 0.0) -> None:
        nonlocal running
        while waiting and running < live:
            batch, starts = waiting.pop(), now + draw.uniform(0, spread_s)
            running += len(batch)
            for script in batch:
                for number, call in enumerate(script.calls.values()):
                    if not call.after:
                        send(call, script, starts + (call.pause_s[0] if number else 0.0))

    begin(0.0, SPREAD_S)
    while heap:
        now, _, what, call, script = heapq.heappop(heap)
        yield Event(now, what, call)
        if what == "request" and call.answer is not None:
            took = draw.uniform(0.2, 1.0) + _length(call) / 300 * draw.uniform(0.8, 1.2)
            heapq.heappush(heap, (now + took, draw.random(), "answer", call, script))
            continue
        for reader in readers[call.id] if what == "answer" else ():
            missing[reader.id] -= 1
            if not missing[reader.id]:
                send(reader, script, now + draw.uniform(*reader.pause_s))
        open_calls[script.session] -= 1
        if not open_calls[script.session]:
            running -= 1
            begin(now, 1.0)


def _length(call: Call) -> int:
    answer = call.answer or {}
    return sum(len(str(choice)) for choice in answer.get("choices", answer.get("output", ())))
