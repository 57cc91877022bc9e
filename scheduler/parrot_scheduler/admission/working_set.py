"""No more applications than engines can hold the contexts of.

Once the contexts of running applications outgrow the engines' memory, each turn finds that the
others have pushed its context out, and nearly all work is done again: hit rates fall from 0.7 to
near nothing between 0.75 and 1.2 times the capacity, and throughput with them. So whole
applications wait at the door, and those inside run on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.policy import Application, Waiting
from parrot_scheduler.task import ApplicationId, TaskId
from parrot_scheduler.task_state import Entry

#: Applications whose contexts are there already may fill this share of the capacity.
_RETURNING_TARGET = 1.0
#: Paused applications' contexts count only while engines have this much prefill before them.
_BUSY_S = 1.0


class SharedTokens:
    """Tokens of distinct prompts: what several have in common counts once.

    Compares prompts at a few blocks each, every one at the beginning and fewer further on, so that
    a prompt of n blocks costs some `4 x log2(n)` look-ups at most. What two prompts share is thus
    taken too small by a quarter at most.

    Prompts that agree up to a block are compared at the same blocks before it. So what one shares
    with others ends somewhere, and a prompt is counted only where that is. Keys that are no chain
    are counted wrongly, until all prompts are gone.
    """

    def __init__(self) -> None:
        # By last key and width of a stretch: prompts that end with it, and stretches that follow.
        self._counts: dict[tuple[Hashable, int], int] = {}
        self._blocks = 0

    @property
    def blocks(self) -> int:
        """Distinct blocks."""
        return self._blocks

    def new_blocks(self, prefix: Sequence[Hashable]) -> int:
        """Blocks that nobody else has."""
        anchors = _anchors(len(prefix))
        known = self._known(prefix, anchors)
        return len(prefix) - (anchors[known - 1][0] + 1 if known else 0)

    def add(self, prefix: Sequence[Hashable]) -> None:
        """One more prompt."""
        anchors, counts = _anchors(len(prefix)), self._counts
        known = self._known(prefix, anchors)
        if known:
            end, width = anchors[known - 1]
            counts[prefix[end], width] += 1
        for end, width in anchors[known:]:
            counts[prefix[end], width] = 1
            self._blocks += width

    def remove(self, prefix: Sequence[Hashable]) -> None:
        """A prompt that was added is gone."""
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
        """At how many blocks, from the first one on, it agrees with a prompt that is there."""
        counts, low, high = self._counts, 0, len(anchors)
        while low < high:
            middle = (low + high) // 2
            end, width = anchors[middle]
            if (prefix[end], width) in counts:
                low = middle + 1
            else:
                high = middle
        return low


def _is_busy(pool: Pool) -> bool:
    """Whether prefill piles up before the engines."""
    table = pool.table
    backlog_s = float(table.pending_prefill @ table.prefill_token_s)
    return backlog_s > _BUSY_S * max(1, int(np.count_nonzero(table.accepts)))


@lru_cache(maxsize=4096)
def _anchors(length: int) -> tuple[tuple[int, int], ...]:
    """At which blocks prompts of this length are compared, and for how many blocks each stands."""
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


@dataclass(frozen=True, slots=True)
class _Entering:
    """An application inside that has no task placed yet."""

    task_id: TaskId
    prefix: tuple[Hashable, ...]
    #: What it needs besides the blocks of `prefix`.
    private_tokens: float


class WorkingSet:
    """Holds applications while the contexts inside would outgrow a share of all engines' memory.

    Counted inside: what placed tasks need; what paused applications keep; and of applications that
    have nothing placed yet, the first task that entered, common beginnings once. Further queued
    tasks of an application do not count: they wait for a place, and nothing of theirs is lost. A
    single short call finds room where a long one does not, so chats enter while agents wait.

    What paused applications keep yields while engines have little to compute: to push a context out
    costs computing it anew, and that costs nobody anything where engines would idle otherwise. Only
    once prefill piles up (`_BUSY_S` a mean engine) do pauses hold others at the door. Without this,
    agents that pause for minutes kept idle engines closed: in the simulator, 200 agents on one
    engine of 300,000 tokens, a call took 104 s on average; 11 s with it, 9 s with admission open.

    Applications whose context is gone when they return have no more right to memory than new ones.
    """

    name = "working-set"

    def __init__(self, config: SchedulerConfig) -> None:
        self._target = config.working_set_target
        self._patience_s = config.starvation_s
        self._entering: dict[ApplicationId, _Entering] = {}
        self._shared = SharedTokens()
        self._private_tokens = 0.0
        self._block_tokens = 0

    def inside(self, pool: Pool) -> float:
        """Tokens of KV that everything inside needs."""
        here = pool.total_working_set + pool.total_kept
        return here + self._private_tokens + self._shared.blocks * self._block_tokens

    def may_enter(self, application: Application, first: Entry, pool: Pool, now: float) -> bool:
        """Whether its first waiting task fits besides everything inside."""
        return self._fits(application, first, self.inside(pool), pool)

    def _fits(self, application: Application, first: Entry, inside: float, pool: Pool) -> bool:
        if inside <= 0:
            return True
        target = _RETURNING_TARGET if application.kept_tokens else self._target
        room = target * pool.capacity - inside + application.kept_tokens
        if first.working_set <= room:
            return True
        if first.working_set <= room + pool.total_kept and not _is_busy(pool):
            return True
        # However much of its prompt is shared, the rest has to fit: quick, and the usual end.
        if first.working_set - first.task.prompt_tokens > room:
            return False
        return first.working_set - self._tokens_inside(first, pool) <= room

    def next_of(self, held: Iterable[Waiting], pool: Pool, now: float) -> Application | None:
        """The first one that fits: those with a context on an engine before others.

        One that does not fit is passed by, but only for `starvation_s`: then nobody enters before
        it, so that what ends makes room for it, and it does not have to wait for `max_hold_s`.
        """
        inside = self.inside(pool)
        for waiting in held:
            if self._fits(waiting.application, waiting.first, inside, pool):
                return waiting.application
            if now - waiting.since >= self._patience_s:
                return None
        return None

    def entered(self, entry: Entry, application: Application, pool: Pool) -> None:
        """Its application counts from now on, if nothing of it does yet."""
        if application.num_placed or application.id in self._entering:
            return
        if not self._entering:
            # NOTE: constant while anything is entering, so that what is added can be taken away.
            self._block_tokens = pool.largest_block
        prefix = self._prefix(entry)
        private = entry.working_set - len(prefix) * self._block_tokens - application.kept_tokens
        entering = _Entering(entry.task.id, prefix, private)
        self._entering[application.id] = entering
        self._shared.add(prefix)
        self._private_tokens += private

    def placed(self, entry: Entry, application: Application, pool: Pool) -> None:
        """Its engine's columns count it from now on."""
        self._inside(application.id)

    def ended(self, entry: Entry, application: Application, pool: Pool) -> None:
        """It counts no more, if it did."""
        entering = self._entering.get(application.id)
        if entering is not None and entering.task_id == entry.task.id:
            self._inside(application.id)

    def _inside(self, application: ApplicationId) -> None:
        entering = self._entering.pop(application, None)
        if entering is not None:
            if self._entering:
                self._shared.remove(entering.prefix)
                self._private_tokens -= entering.private_tokens
            else:
                self._shared = SharedTokens()
                self._private_tokens = 0.0

    def _tokens_inside(self, entry: Entry, pool: Pool) -> float:
        """Tokens of its prompt that something inside needs as well."""
        prefix = self._prefix(entry)
        if not prefix:
            return 0.0
        entering = len(prefix) - self._shared.new_blocks(prefix)
        claimed = pool.prefixes.claimed_reach(prefix)
        placed = claimed[-1][1] if claimed else 0
        return float(max(entering, placed) * self._block_tokens)

    def _prefix(self, entry: Entry) -> tuple[Hashable, ...]:
        """Its blocks; none where engines' blocks have no size that is known."""
        block, task = self._block_tokens, entry.task
        return task.prefix[: task.prompt_tokens // block] if block else ()
