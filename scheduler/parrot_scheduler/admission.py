"""Admission: run only as many applications as the engines can hold contexts for.

When the contexts of running applications outgrow the engines' memory, each turn evicts another
application's context, and almost all work is repeated. Hit rates fall from 0.7 to nearly zero
between 0.75 and 1.2 times the capacity, and throughput falls with them. So new applications are
held whole, and admitted ones keep running.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.policy import AdmissionCandidate, AdmissionFactory, AdmissionPolicy
from parrot_scheduler.task import ApplicationId, TaskId
from parrot_scheduler.task_state import Application, TaskState

#: Share of the engines' KV tokens that applications returning to retained KV may fill.
_RETURNING_TARGET = 1.0
#: KV of paused applications counts only while a mean engine has this many seconds of prefill
#: queued.
_BUSY_S = 1.0
#: A context is expensive if recomputing it takes at least this share of the next task's decode
#: time.
_DEAR = 0.05
#: Applications may be held at once if their first task is followed with at least this probability.
_RETURNS = 0.5


class DistinctBlocks:
    """Number of blocks in the union of prompts; common blocks count once.

    Compares prompts at a few blocks (anchors), dense at the beginning and sparser further on. A
    prompt of n blocks costs at most about `4 x log2(n)` look-ups, and shared blocks are
    underestimated by at most a quarter.

    Prompts that agree up to a block have the same anchors before it, so only the part behind the
    common blocks is counted for each. Keys that do not form a chain give wrong counts until all
    prompts are removed.
    """

    def __init__(self) -> None:
        # By the last key and width of a stretch: number of prompts that end with it plus stretches
        # that follow it.
        self._counts: dict[tuple[Hashable, int], int] = {}
        self._blocks = 0

    @property
    def blocks(self) -> int:
        return self._blocks

    def new_blocks(self, prefix: Sequence[Hashable]) -> int:
        """Return the number of blocks of a prompt that no added prompt has."""
        anchors = _anchors(len(prefix))
        known = self._known(prefix, anchors)
        return len(prefix) - (anchors[known - 1][0] + 1 if known else 0)

    def add(self, prefix: Sequence[Hashable]) -> None:
        anchors, counts = _anchors(len(prefix)), self._counts
        known = self._known(prefix, anchors)
        if known:
            end, width = anchors[known - 1]
            counts[prefix[end], width] += 1
        for end, width in anchors[known:]:
            counts[prefix[end], width] = 1
            self._blocks += width

    def remove(self, prefix: Sequence[Hashable]) -> None:
        counts = self._counts
        for end, width in reversed(_anchors(len(prefix))):
            key = (prefix[end], width)
            count = counts.get(key, 0)
            if count > 1:
                counts[key] = count - 1
                return
            if count:
                del counts[key]
                self._blocks -= width

    def _known(self, prefix: Sequence[Hashable], anchors: tuple[tuple[int, int], ...]) -> int:
        """Return the number of leading anchors at which a prompt agrees with an added one."""
        counts, low, high = self._counts, 0, len(anchors)
        while low < high:
            middle = (low + high) // 2
            end, width = anchors[middle]
            if (prefix[end], width) in counts:
                low = middle + 1
            else:
                high = middle
        return low


def _is_busy(pool: EnginePool) -> bool:
    """Return true if a mean engine has more than `_BUSY_S` of prefill queued."""
    table = pool.table
    backlog_s = float(table.pending_prefill @ table.prefill_token_s)
    return backlog_s > _BUSY_S * max(1, int(np.count_nonzero(table.accepts)))


def _goes_on(application: Application, first: TaskState, pool: EnginePool) -> bool:
    """Return true if the application will probably return to a context that is expensive to
    recompute.
    """
    if application.context_tokens <= 0 and first.task.returns < _RETURNS:
        return False
    table, here = pool.table, pool.table.accepts
    steps = first.expected_output / max(first.task.num_sequences, 1)
    step_s = table.weights_s + table.overhead_s + table.working_set * table.context_token_s
    anew_s = first.task.prompt_tokens * float(table.prefill_token_s[here].sum())
    return anew_s >= _DEAR * steps * float(step_s[here].sum())


@lru_cache(maxsize=4096)
def _anchors(length: int) -> tuple[tuple[int, int], ...]:
    """Return the anchors of prompts of this length, and the number of blocks each stands for."""
    found: list[tuple[int, int]] = []
    end, stride = 0, 1
    while end < length:
        if end >= 8 * stride:
            stride *= 2
        # Beyond the last full stride each block is its own anchor.
        width = stride if end + stride <= length else 1
        end += width
        found.append((end - 1, width))
    return tuple(found)


@dataclass(slots=True)
class _Entering:
    """First task of an admitted application that has no placed task yet."""

    task_id: TaskId
    prefix: tuple[Hashable, ...]
    #: Tokens of KV besides the blocks of `prefix`.
    private_tokens: float


class WorkingSet(AdmissionPolicy):
    """Holds applications that would make the admitted contexts outgrow a share of all engines' KV.

    Admitted KV is the sum of what placed tasks need, the KV retained for paused applications and,
    for each application without a placed task, its first task; common prefixes count once. Further
    queued tasks of an application do not count: they wait for an engine and lose nothing. A short
    task may fit where a long one does not, so chats enter while agents wait.

    Holding starts with an application that will return: it has a context, or calls of its kind are
    usually followed (`Task.returns`), and recomputing that context is expensive beside decoding
    (`_DEAR`). Once one application is held, new ones are held too, so that they do not overtake it.
    The others have no context to lose, so they wait in the order policy's queue while engines are
    full. When they were held as well, short jobs of a backlog took 22.5 s instead of 4.1, and
    map-reduce on small engines 1.2 times as long.

    Retained KV yields while engines have little to compute, because recomputing an evicted context
    is free on an idle engine. Pauses keep other applications out only once prefill piles up
    (`_BUSY_S`). Without this rule, agents that paused for minutes kept others off idle engines: in
    the simulator, with 200 agents on one engine of 300,000 tokens, a call took 104 s on average,
    against 11 s with it and 9 s with admission open.

    An application whose KV is gone when it returns has the same claim to memory as a new one.

    Args:
        config: `working_set_target` (share of all engines' tokens of KV), `starvation_s` (longest
            time for which others overtake a held application that does not fit).
    """

    name = "working-set"

    @classmethod
    def make(cls, config: SchedulerConfig, rng: random.Random) -> Self:
        """Return a new one for one model."""
        return cls(config)

    def __init__(self, config: SchedulerConfig) -> None:
        self._target = config.working_set_target
        self._starvation_s = config.starvation_s
        self._entering: dict[ApplicationId, _Entering] = {}
        self._private_tokens = 0.0
        #: Blocks of their prompts, and the number of distinct blocks once it has been asked for;
        #: prompts not counted yet are left out.
        self._num_blocks = 0
        self._distinct = DistinctBlocks()
        self._uncounted: dict[ApplicationId, _Entering] = {}
        self._block_tokens = 0
        # True if other applications were held at the last check.
        self._holds = False

    def admitted_tokens(self, pool: EnginePool) -> float:
        """Return the tokens of KV that everything admitted needs."""
        self._count_distinct()
        here = pool.total_working_set + pool.total_retained
        return here + self._private_tokens + self._distinct.blocks * self._block_tokens

    def _count_distinct(self) -> None:
        for entering in self._uncounted.values():
            self._distinct.add(entering.prefix)
        self._uncounted.clear()

    def may_enter(
        self, application: Application, first: TaskState, pool: EnginePool, now: float
    ) -> bool:
        """Return true if the application's first waiting task fits beside everything admitted."""
        fits = self._fits(application, first, pool)
        self._holds = self._holds or not fits
        return fits

    def _fits(self, application: Application, first: TaskState, pool: EnginePool) -> bool:
        target = _RETURNING_TARGET if application.retained_tokens else self._target
        # Cheap upper bound, as if nothing were shared: usually enough while there is memory.
        here = pool.total_working_set + pool.total_retained
        most = here + self._private_tokens + self._num_blocks * self._block_tokens
        limit, retained = target * pool.capacity, application.retained_tokens
        if first.working_set <= limit - most + retained:
            return True
        admitted = self.admitted_tokens(pool)
        if admitted <= 0:
            return True
        room = limit - admitted + retained
        if first.working_set <= room or not (self._holds or _goes_on(application, first, pool)):
            return True
        if first.working_set <= room + pool.total_retained and not _is_busy(pool):
            return True
        # Cheap lower bound, as if the whole prompt were shared: usually enough to refuse.
        if first.working_set - first.task.prompt_tokens > room:
            return False
        return first.working_set - self._shared_tokens(first, pool) <= room

    def choose(
        self, candidates: Iterable[AdmissionCandidate], pool: EnginePool, now: float
    ) -> Application | None:
        """Return the first application that fits; applications with retained KV come first.

        An application that does not fit may be overtaken for `starvation_s`. After that none is
        admitted before it, so the next tasks to end make room for it before `max_hold_s`.
        """
        waiting = list(candidates)
        self._holds = len(waiting) > 1
        for candidate in waiting:
            if self._fits(candidate.application, candidate.first, pool):
                return candidate.application
            if now - candidate.since >= self._starvation_s:
                break
        self._holds = bool(waiting)
        return None

    def entered(self, state: TaskState, application: Application, pool: EnginePool) -> None:
        """Count the task's application from now on, unless some of it counts already."""
        if application.num_placed or application.id in self._entering:
            return
        if not self._entering:
            # NOTE: constant while any application is entering, so that subtraction undoes addition.
            self._block_tokens = pool.largest_block
        prefix = self._prefix(state)
        private = state.working_set - len(prefix) * self._block_tokens - application.retained_tokens
        entering = _Entering(state.task.id, prefix, private)
        self._entering[application.id] = self._uncounted[application.id] = entering
        self._num_blocks += len(prefix)
        self._private_tokens += private

    def placed(self, state: TaskState, application: Application, pool: EnginePool) -> None:
        """The application now counts through its engine's columns."""
        self._stop_entering(application.id)

    def ended(self, state: TaskState, application: Application, pool: EnginePool) -> None:
        """Stop counting the application if this task represented it."""
        entering = self._entering.get(application.id)
        if entering is not None and entering.task_id == state.task.id:
            self._stop_entering(application.id)

    def _stop_entering(self, application: ApplicationId) -> None:
        entering = self._entering.pop(application, None)
        if entering is None:
            return
        is_counted = self._uncounted.pop(application, None) is None
        if not self._entering:
            self._distinct = DistinctBlocks()
            self._num_blocks, self._private_tokens = 0, 0.0
            return
        if is_counted:
            self._distinct.remove(entering.prefix)
        self._num_blocks -= len(entering.prefix)
        self._private_tokens -= entering.private_tokens

    def _shared_tokens(self, state: TaskState, pool: EnginePool) -> float:
        """Return the tokens of the task's prompt that something admitted needs too."""
        prefix = self._prefix(state)
        if not prefix:
            return 0.0
        entering = len(prefix) - self._distinct.new_blocks(prefix)
        placed = pool.prefixes.most_claimed(prefix)
        return float(max(entering, placed) * self._block_tokens)

    def _prefix(self, state: TaskState) -> tuple[Hashable, ...]:
        """Return the prompt's full blocks; empty if the engines' block size is unknown."""
        block, task = self._block_tokens, state.task
        return task.prefix[: task.prompt_tokens // block] if block else ()


class Open(AdmissionPolicy):
    """Admits every application at once."""

    name = "open"

    def may_enter(
        self, application: Application, first: TaskState, pool: EnginePool, now: float
    ) -> bool:
        return True


POLICIES: dict[str, AdmissionFactory] = {"open": Open.make, "working-set": WorkingSet.make}
