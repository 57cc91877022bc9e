"""Queued tasks that found no place, until something changes that matters to them.

Most of what waits waits for the same thing as a moment ago. Looking for a place anew whenever any
task ends costs a search for each of them; so each says what it waits for, and is looked at again
when that comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.engines.prefix_index import rows_of
from parrot_scheduler.placement.prediction import toll_terms
from parrot_scheduler.policy import Wait
from parrot_scheduler.task_state import Entry

#: More rows than this at once are news to all.
_MANY_ROWS = 4


class Aside:
    """Tasks that were set aside, each with what it waits for; in the order in which they were."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: dict[Entry, Wait] = {}
        #: Those without room, by the least tokens that they need of an engine.
        self._without_room: dict[Entry, float] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._without_room)

    def __contains__(self, entry: object) -> bool:
        return entry in self._waiting or entry in self._without_room

    @property
    def num_without_room(self) -> int:
        """Those that nothing had room for, or might take as things were."""
        return len(self._without_room)

    def add(self, entry: Entry, wait: Wait | None) -> None:
        """A task found no place; None: nothing has room for it, or may take it as things are."""
        self.discard(entry)
        if wait is None:
            self._without_room[entry] = self._pool.least_need(entry)
        else:
            self._waiting[entry] = wait

    def discard(self, entry: Entry) -> None:
        """It is queued no more, or back in the order."""
        if self._waiting.pop(entry, None) is None:
            self._without_room.pop(entry, None)

    def clear(self) -> None:
        """Everything is looked at again."""
        self._waiting.clear()
        self._without_room.clear()

    def fitting(self, opened: int, starving_since: float) -> list[Entry]:
        """Of those without room the ones that may fit on these rows (a bit set), and those that
        were submitted before `starving_since`.
        """
        if not self._without_room or not opened:
            return []
        free = self._most_free(rows_of(opened) if opened.bit_count() <= _MANY_ROWS else [])
        return [
            entry
            for entry, need in self._without_room.items()
            if need <= free or entry.submitted_at <= starving_since
        ]

    def awaited(self, opened: int, now: float) -> Iterator[Entry]:
        """Of those that wait for an engine the ones to look at again, as there is more room or less
        to do on these rows (a bit set), or as they have waited for long enough.

        Tasks may be placed meanwhile: it is not looked at again whether there is still room.
        """
        if not self._waiting or not opened:
            return
        pool = self._pool
        rows = rows_of(opened) if opened.bit_count() <= _MANY_ROWS else []
        terms = [toll_terms(pool.table, row) for row in rows]
        for entry, wait in list(self._waiting.items()):
            wanted, until, toll_s, new, tokens, steps = wait
            if wanted & opened or until <= now or not rows:
                yield entry
                continue
            for queued_s, new_token_s, step_s, token_s in terms:
                if queued_s + new * new_token_s + (step_s + tokens * token_s) * steps <= toll_s:
                    yield entry
                    break

    def _most_free(self, rows: list[int]) -> float:
        if not rows:
            return math.inf
        cells = self._pool.table.cells
        # An engine with nothing to do takes what is larger than it, too.
        return max(
            cells.capacity[row] - cells.working_set[row] if cells.batch[row] else math.inf
            for row in rows
        )
