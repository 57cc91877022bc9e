"""The time that one call takes in the scheduler, measured on a steady stream of calls.

No I/O: the caller passes a clock, and prints the rows.
"""

from __future__ import annotations

import gc
import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from parrot_scheduler.actions import Place
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.events import (
    ApplicationFinished,
    BlocksEvicted,
    BlocksStored,
    EngineJoined,
    Event,
    TaskFinished,
    TaskProgress,
    TaskSubmitted,
)
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.task import EngineDescription, Task

_BLOCK = 64
_CAPACITY = 400_000
_MAX_BATCH = 16
#: Calls that run on a mean engine, and prompts that it caches.
_RUNNING = 6
_CACHED = 60
_TEMPLATES = 200
_TENANTS = 20
#: Virtual seconds between two calls, for one engine.
_STEP_S = 0.1
#: Entries of the heap that tells how fast a core is.
_HEAP_SIZE = 10_000
#: Pairs of push and pop on it at a time, and how often in between.
_PAIRS = 20_000
_TIMES = 5
#: Pairs a second of the core that aims are stated for.
REFERENCE_PAIRS_PER_S = 1_500_000.0


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement; times are medians in microseconds."""

    engines: int
    calls: int
    #: The step that a call is submitted in, and placed.
    decision_us: float
    #: The 99th percentile of `decision_us`.
    decision_p99_us: float
    #: The step that its computed prompt and the engine's new blocks are reported in.
    progress_us: float
    #: The step that its end is reported in.
    end_us: float
    #: Pairs of push and pop of Python's heap that this core did a second in between.
    heap_pairs_per_s: float

    @property
    def reference_decision_us(self) -> float:
        """`decision_us` of a core that does `REFERENCE_PAIRS_PER_S`."""
        return self.decision_us * self.heap_pairs_per_s / REFERENCE_PAIRS_PER_S

    @property
    def reference_call_us(self) -> float:
        """The same for all three steps of a call."""
        steps_us = self.decision_us + self.progress_us + self.end_us
        return steps_us * self.heap_pairs_per_s / REFERENCE_PAIRS_PER_S


def measure(
    clock: Callable[[], float],
    *,
    engines: Sequence[int] = (4, 64, 1000),
    calls: int = 3000,
    config: SchedulerConfig | None = None,
    seed: int = 0,
) -> list[Row]:
    """One row for each number of engines.

    Six calls run on a mean engine, which has places for sixteen. Each call comes alone, as in a
    gateway: it is submitted and placed, its prompt is computed, and another one ends. Prompts are
    1,024 to 8,192 tokens in blocks of 64, half of it common to one of 200 templates; 20 tenants.
    """
    config = config or SchedulerConfig(explain=True)
    return [_measure(clock, count, calls, config, seed) for count in engines]


def _measure(
    clock: Callable[[], float], engines: int, calls: int, config: SchedulerConfig, seed: int
) -> Row:
    rng = random.Random(seed)
    tasks, heap = _tasks(rng), _Heap(clock)
    scheduler = Scheduler(config)
    names = [f"engine-{number}" for number in range(engines)]
    scheduler.step(
        0.0,
        [
            EngineJoined(
                EngineDescription(
                    name, "model", _CAPACITY, _MAX_BATCH, 8192, _BLOCK, reports_blocks=True
                )
            )
            for name in names
        ],
    )
    cached: dict[str, deque[tuple[int, ...]]] = {name: deque() for name in names}
    running: list[Task] = []
    now = 0.0

    def timed(events: list[Event], took: list[float]) -> list[Place]:
        started = clock()
        actions = scheduler.step(now, events)
        took.append(clock() - started)
        return [action for action in actions if isinstance(action, Place)]

    def call(took: tuple[list[float], list[float], list[float]]) -> None:
        task = next(tasks)
        (place,) = timed([TaskSubmitted(task)], took[0])
        running.append(task)
        engine, expected = place.engine_id, place.reasons.expected_cached_tokens
        events: list[Event] = [
            TaskProgress(task.id, task.prompt_tokens, expected, 1),
            BlocksStored(engine, task.prefix),
        ]
        cached[engine].append(task.prefix)
        if len(cached[engine]) > _CACHED:
            events.append(BlocksEvicted(engine, cached[engine].popleft()[::-1]))
        timed(events, took[1])
        if len(running) > engines * _RUNNING:
            at = rng.randrange(len(running))
            running[at], running[-1] = running[-1], running[at]
            ended = running.pop()
            finished = TaskFinished(ended.id, 0, max(1, ended.max_tokens // 2))
            timed([finished, ApplicationFinished(ended.application)], took[2])

    took: tuple[list[float], list[float], list[float]] = ([], [], [])
    for number in range(engines * _RUNNING + calls):
        now += _STEP_S / engines
        if number == engines * _RUNNING:
            took = ([], [], [])
            # What has been set up is no garbage: a pass over it is none of the scheduler's work.
            gc.collect()
            gc.freeze()
        if number % (1 + calls // _TIMES) == 0:
            heap.run()
        call(took)
    gc.unfreeze()
    for each in took:
        each.sort()
    decisions, progress, ends = took
    return Row(
        engines=engines,
        calls=calls,
        decision_us=1e6 * _median(decisions),
        decision_p99_us=1e6 * decisions[len(decisions) * 99 // 100],
        progress_us=1e6 * _median(progress),
        end_us=1e6 * _median(ends),
        heap_pairs_per_s=heap.pairs_per_s(),
    )


class _Heap:
    """Measures how fast this core is, in between: other work on a machine comes and goes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rng = random.Random(0)
        self._heap = [(self._rng.random(), number) for number in range(_HEAP_SIZE)]
        heapq.heapify(self._heap)
        self._took: list[float] = []

    def run(self) -> None:
        heap = self._heap
        new = [(self._rng.random(), number) for number in range(_PAIRS)]
        started = self._clock()
        for entry in new:
            heapq.heappush(heap, entry)
            heapq.heappop(heap)
        self._took.append(self._clock() - started)

    def pairs_per_s(self) -> float:
        return _PAIRS / _median(sorted(self._took))


def _median(values: list[float]) -> float:
    return values[len(values) // 2]


def _tasks(rng: random.Random) -> Iterator[Task]:
    number = 0
    while True:
        number += 1
        template = rng.randrange(_TEMPLATES)
        blocks = rng.randrange(1024 // _BLOCK, 8192 // _BLOCK)
        shared = blocks // 2
        prefix = tuple(
            (template << 40) + i if i < shared else (number << 20) + (1 << 60) + i
            for i in range(blocks)
        )
        yield Task(
            id=number,
            model="model",
            tenant=f"tenant-{rng.randrange(_TENANTS)}",
            application=f"application-{number}",
            prompt_tokens=blocks * _BLOCK + rng.randrange(_BLOCK),
            max_tokens=rng.randrange(32, 512),
            prefix=prefix,
            template=f"template-{template}",
        )
