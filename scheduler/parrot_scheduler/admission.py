"""Admission: no more applications run than engines can hold the contexts of.

Once the contexts of running applications outgrow the engines' memory, each turn finds that the
others have pushed its context out, and nearly all work is done again: hit rates fall from 0.7 to
near nothing between 0.75 and 1.2 times the capacity, and throughput with them. So whole
applications are held, and those admitted run on.
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

#: Applications that return to retained KV may fill this share of the engines' tokens of KV.
_RETURNING_TARGET = 1.0
#: KV of paused applications counts only while engines have this many seconds of prefill queued,
#: for a mean engine.
_BUSY_S = 1.0
#: A context is dear if computing it anew takes at least this share of the time that the next task
#: decodes.
_DEAR = 0.05
#: Applications whose first task is followed with this chance may be held at once.
_RETURNS = 0.5


class DistinctBlocks:
    """Number of blocks in the union of prompts: what several have in common counts once.

    Compares prompts at a few blocks each, every one at the beginning and fewer further on, so that
    a prompt of n blocks costs some `4 x log2(n)` look-ups at most. What two prompts share is thus
    underestimated by a quarter at most.

    Prompts that agree up to a block are compared at the same blocks before it, so a prompt is
    counted only where what it shares with others ends. Keys that are no chain are counted wrongly,
    until all prompts are gone.
    """

    def __init__(self) -> None:
        # By last key and width of a stretch: prompts that end with it, and stretches that follow.
        self._counts: dict[tuple[Hashable, int], int] = {}
        self._blocks = 0

    @property
    def blocks(self) -> int:
        return self._blocks

    def new_blocks(self, prefix: Sequence[Hashable]) -> int:
        """Blocks of a prompt that no added prompt has."""
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
        """At how many of its anchors, from the first one on, a prompt agrees with an added one."""
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
    """Return true if it, or its kind, comes back with a context that is dear to compute anew."""
    if application.context_tokens <= 0 and first.task.returns < _RETURNS:
        return False
    table, here = pool.table, pool.table.accepts
    steps = first.expected_output / max(first.task.num_sequences, 1)
    step_s = table.weights_s + table.overhead_s + table.working_set * table.context_token_s
    anew_s = first.task.prompt_tokens * float(table.prefill_token_s[here].sum())
    return anew_s >= _DEAR * steps * float(step_s[here].sum())


@lru_cache(maxsize=4096)
def _anchors(length: int) -> tuple[tuple[int, int], ...]:
    """Blocks at which prompts of this length are compared, and how many blocks each stands for."""
    found: list[tuple[int, int]] = []
    end, stride = 0, 1
    while end < length:
        if end >= 8 * stride:
            stride *= 2
        # Beyond the last full stride each block stands for itself.
        width = stride if end + stride <= length else 1
        end += width
        found.append((end - 1, width))
    return tuple(found)


@dataclass(slots=True)
class _Entering:
    """The first task of an admitted application that has none placed yet."""

    task_id: TaskId
    prefix: tuple[Hashable, ...]
    #: Tokens of KV besides the blocks of `prefix`.
    private_tokens: float


class WorkingSet(AdmissionPolicy):
    """Holds applications while the admitted contexts would outgrow a share of all engines' KV.

    Counted as admitted: what placed tasks need; KV retained for paused applications; and for
    applications with nothing placed yet, the first task that entered, common prefixes once. Further
    queued tasks of an application do not count: they wait for an engine, and nothing of theirs is
    lost. A short task finds room where a long one does not, so chats enter while agents wait.

    Applications begin to be held with one that goes on: it has a context already, or calls of its
    kind are followed (`Task.returns`), and computing that anew takes some time beside decoding
    (`_DEAR`). What only begins is held once others are, so that it does not pass them. The rest has
    no context to lose between calls, and waits in the order, like all, while engines are full: held
    as well, short jobs of a backlog took 22.5 s instead of 4.1, and map-reduce on small engines 1.2
    times as long.

    Retained KV yields while engines have little to compute: to push a context out costs computing
    it anew, and that costs nothing where engines would idle otherwise. Only once prefill
    piles up (`_BUSY_S`) do pauses keep others out. Without this, agents that pause for minutes kept
    others off idle engines: in the simulator, 200 agents on one engine of 300,000 tokens, a call
    took 104 s on average; 11 s with it, 9 s with admission open.

    Applications whose KV is gone when they return have no more right to memory than new ones.

    Args:
        config: `working_set_target` (share of all engines' tokens of KV), `starvation_s` (seconds
            after which a held application that does not fit is passed by no more).
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
        #: Blocks of their prompts; and what is distinct of them, where that has been asked for: all
        #: but those that are not counted yet.
        self._num_blocks = 0
        self._distinct = DistinctBlocks()
        self._uncounted: dict[ApplicationId, _Entering] = {}
        self._block_tokens = 0
        # Whether others are held, as far as is known.
        self._holds = False

    def admitted_tokens(self, pool: EnginePool) -> float:
        """Tokens of KV that everything admitted needs."""
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
        """Return true if its first waiting task fits besides everything admitted."""
        fits = self._fits(application, first, pool)
        self._holds = self._holds or not fits
        return fits

    def _fits(self, application: Application, first: TaskState, pool: EnginePool) -> bool:
        target = _RETURNING_TARGET if application.retained_tokens else self._target
        # As if nothing were shared: quick, and the usual end where there is memory.
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
        # However much of its prompt is shared, the rest has to fit: quick, and the usual end.
        if first.working_set - first.task.prompt_tokens > room:
            return False
        return first.working_set - self._shared_tokens(first, pool) <= room

    def choose(
        self, candidates: Iterable[AdmissionCandidate], pool: EnginePool, now: float
    ) -> Application | None:
        """The first one that fits: those with retained KV before others.

        One that does not fit is passed by, but only for `starvation_s`: then none is admitted
        before it, so that what ends makes room for it, and it does not have to wait for
        `max_hold_s`.
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
        """Count its application from now on, if nothing of it counts yet."""
        if application.num_placed or application.id in self._entering:
            return
        if not self._entering:
            # NOTE: constant while anything is entering, so that what is added can be taken away.
            self._block_tokens = pool.largest_block
        prefix = self._prefix(state)
        private = state.working_set - len(prefix) * self._block_tokens - application.retained_tokens
        entering = _Entering(state.task.id, prefix, private)
        self._entering[application.id] = self._uncounted[application.id] = entering
        self._num_blocks += len(prefix)
        self._private_tokens += private

    def placed(self, state: TaskState, application: Application, pool: EnginePool) -> None:
        """Its engine's columns count its application from now on."""
        self._stop_entering(application.id)

    def ended(self, state: TaskState, application: Application, pool: EnginePool) -> None:
        """Count its application no more, if this task stood for it."""
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
        """Tokens of its prompt that something admitted needs as well."""
        prefix = self._prefix(state)
        if not prefix:
            return 0.0
        entering = len(prefix) - self._distinct.new_blocks(prefix)
        placed = pool.prefixes.most_claimed(prefix)
        return float(max(entering, placed) * self._block_tokens)

    def _prefix(self, state: TaskState) -> tuple[Hashable, ...]:
        """Its full blocks; none where engines' blocks have no known size."""
        block, task = self._block_tokens, state.task
        return task.prefix[: task.prompt_tokens // block] if block else ()


class Open(AdmissionPolicy):
    """No application is ever held."""

    name = "open"

    def may_enter(
        self, application: Application, first: TaskState, pool: EnginePool, now: float
    ) -> bool:
        return True


POLICIES: dict[str, AdmissionFactory] = {"open": Open.make, "working-set": WorkingSet.make}
