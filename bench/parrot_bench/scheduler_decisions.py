"""How fast the scheduler decides, measured on a steady stream of tasks.

No I/O: the caller passes a clock, and prints the rows.
"""

from __future__ import annotations

import gc
import heapq
import random
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from parrot_scheduler.actions import Action, Place
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.events import (
    ApplicationFinished,
    EngineJoined,
    Event,
    TaskFinished,
    TaskProgress,
    TaskSubmitted,
)
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.task import EngineDescription, GroupRef, Objective, Task

_BLOCK = 64
_CAPACITY = 400_000
_MAX_BATCH = 16
_TEMPLATES = 200
_TENANTS = 20
#: Virtual seconds between two steps, for one engine.
_STEP_S = 0.1
#: Entries of the heap that tells how fast a core is, and rounds on it.
_HEAP_SIZE = 10_000
_HEAP_ROUNDS = 50_000
#: Rounds a second of the core that aims are stated for.
REFERENCE_ROUNDS_PER_S = 690_000.0


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. A decision is a task that is placed."""

    engines: int
    #: Tasks that waited from the beginning on; 0 where each is placed at once.
    queued: int
    decisions: int
    decisions_per_s: float
    #: Milliseconds of one decision: a step in which one task ended, another one got on and a third
    #: one was submitted, by the tasks that it placed; most place one.
    p50_ms: float
    p99_ms: float
    #: Milliseconds of the longest step, however many tasks it placed.
    longest_step_ms: float
    #: What this core did just before and after: see `heap_rounds_per_s`.
    heap_rounds_per_s: float
    #: Peak memory of the process so far, in MB.
    memory_mb: float

    @property
    def reference_decisions_per_s(self) -> float:
        """`decisions_per_s` of a core that does `REFERENCE_ROUNDS_PER_S` rounds."""
        return self.decisions_per_s * REFERENCE_ROUNDS_PER_S / self.heap_rounds_per_s

    @property
    def reference_p99_ms(self) -> float:
        return self.p99_ms * self.heap_rounds_per_s / REFERENCE_ROUNDS_PER_S


def heap_rounds_per_s(clock: Callable[[], float]) -> float:
    """How fast this core is: rounds of `heappushpop`, `heappush` and `heappop` a second.

    On a heap of 10,000 pairs of a random number and a count, in a loop of Python.
    """
    rng = random.Random(0)
    heap = [(rng.random(), i) for i in range(_HEAP_SIZE)]
    heapq.heapify(heap)
    new = [(rng.random(), i) for i in range(_HEAP_ROUNDS)]
    started = clock()
    for entry in new:
        heapq.heappush(heap, heapq.heappushpop(heap, entry))
        heapq.heappop(heap)
    return _HEAP_ROUNDS / (clock() - started)


def peak_memory_mb() -> float:
    """Peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(
    clock: Callable[[], float],
    *,
    engines: Sequence[int] = (10, 100, 1000),
    queued: int = 10_000,
    decisions: int = 20_000,
    config: SchedulerConfig | None = None,
    seed: int = 0,
) -> list[Row]:
    """One row for each number of engines.

    Engines are filled and `queued` tasks wait (on the engines, with a policy that places each at
    once); from then on each step reports the end of a random task, the progress of another one, and
    a new task. Prompts are 1,024 to 8,192 tokens in blocks
    of 64, half of it common to one of 200 templates; one task in four is in a task group, one in
    four is waited for; 20 tenants.
    """
    config = config or SchedulerConfig(max_wait_s=1e9, starvation_s=1e8, max_queued=2 * queued)
    return [_measure(clock, count, queued, decisions, config, seed) for count in engines]


def _measure(
    clock: Callable[[], float],
    engines: int,
    queued: int,
    decisions: int,
    config: SchedulerConfig,
    seed: int,
) -> Row:
    rng = random.Random(seed)
    tasks = _tasks(rng)
    scheduler = Scheduler(config)
    scheduler.step(
        0.0,
        [
            EngineJoined(
                EngineDescription(
                    f"engine-{i}", "model", _CAPACITY, _MAX_BATCH, 8192, _BLOCK, reports_blocks=True
                )
            )
            for i in range(engines)
        ],
    )
    waiting: dict[int, Task] = {}
    placed: list[Task] = []

    def submit() -> TaskSubmitted:
        task = next(tasks)
        waiting[task.id] = task
        return TaskSubmitted(task)

    def take_in(actions: list[Action]) -> int:
        new = [waiting.pop(action.task_id) for action in actions if isinstance(action, Place)]
        placed.extend(new)
        return len(new)

    # NOTE: with a policy that makes no task wait, the number of those that wait never grows.
    for _ in range(queued + engines * _MAX_BATCH):
        if len(waiting) >= queued:
            break
        take_in(scheduler.step(0.0, [submit()]))
    num_waiting = len(waiting)
    now, num_placed = 0.0, 0
    took: list[float] = []
    took_ms: list[float] = []
    # Before and after, as the speed of a shared machine changes.
    rounds_before = heap_rounds_per_s(clock)
    # What has been set up is no garbage: a pass over all of it is none of the scheduler's work.
    gc.collect()
    gc.freeze()
    while num_placed < decisions:
        now += _STEP_S / engines
        at = rng.randrange(len(placed))
        placed[at], placed[-1] = placed[-1], placed[at]
        task, other = placed.pop(), placed[rng.randrange(len(placed))]
        events: list[Event] = [TaskFinished(task.id, 0, max(1, task.max_tokens // 2))]
        if not task.groups:
            events.append(ApplicationFinished(task.application))
        events += [TaskProgress(other.id, other.prompt_tokens, 0, 1), submit()]
        started = clock()
        actions = scheduler.step(now, events)
        seconds = clock() - started
        new = take_in(actions)
        num_placed += new
        took.append(seconds)
        took_ms.append(1000 * seconds / max(1, new))
    gc.unfreeze()
    took_ms.sort()
    return Row(
        engines=engines,
        queued=num_waiting,
        decisions=num_placed,
        decisions_per_s=num_placed / sum(took),
        p50_ms=took_ms[len(took_ms) // 2],
        p99_ms=took_ms[len(took_ms) * 99 // 100],
        longest_step_ms=1000 * max(took),
        heap_rounds_per_s=(rounds_before + heap_rounds_per_s(clock)) / 2,
        memory_mb=peak_memory_mb(),
    )


def _tasks(rng: random.Random) -> Iterator[Task]:
    objectives = (Objective("latency"), Objective(), Objective(), Objective())
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
        in_group = number % 4 == 0
        yield Task(
            id=number,
            model="model",
            tenant=f"tenant-{rng.randrange(_TENANTS)}",
            application=f"application-{number // 8 if in_group else number}",
            prompt_tokens=blocks * _BLOCK + rng.randrange(_BLOCK),
            max_tokens=rng.randrange(32, 512),
            prefix=prefix,
            template=f"template-{template}",
            objective=objectives[number % 4],
            groups=(GroupRef(f"group-{number // 32}", 8),) if in_group else (),
            successors=rng.randrange(3),
        )
