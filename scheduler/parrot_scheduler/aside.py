"""Queued tasks that found no place, until something changes that matters to them.

Most of what waits waits for the same thing as a moment ago. Looking for a place anew whenever any
task ends costs a search for each of them; so each says what it waits for, and is looked at again
when that comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from parrot_scheduler.entry import Entry
from parrot_scheduler.placement.predict import toll_terms
from parrot_scheduler.policy import Wait
from parrot_scheduler.pool import Pool
from parrot_scheduler.prefix_index import rows_of

#: More rows than this at once are news to all.
_MANY_ROWS = 4


class Aside:
    """Tasks that were set aside, each with what it waits for; in the order in which they were."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        # Those without room have no `Wait`, but the least tokens that they need of an engine.
        self._tasks: dict[Entry, Wait | float] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, entry: Entry, wait: Wait | None) -> None:
        """A task found no place; None: nothing has room for it, or may take it as things are."""
        self._tasks[entry] = self._pool.least_need(entry) if wait is None else wait

    def __contains__(self, entry: object) -> bool:
        return entry in self._tasks

    def discard(self, entry: Entry) -> None:
        """It is queued no more."""
        self._tasks.pop(entry, None)

    def clear(self) -> None:
        """Everything is looked at again."""
        self._tasks.clear()

    def woken(self, opened: int, now: float, starving_since: float) -> Iterator[Entry]:
        """Those to look at again, as there is more room or less to do on these rows (a bit set).

        Those without room that were submitted before `starving_since` are as well.
        Tasks may be placed meanwhile: it is not looked at again whether there is still room.
        """
        if not self._tasks or not opened:
            return
        pool = self._pool
        rows = rows_of(opened) if opened.bit_count() <= _MANY_ROWS else []
        terms = [toll_terms(pool.table, row) for row in rows]
        free = self._most_free(rows)
        for entry, waits_for in list(self._tasks.items()):
            if isinstance(waits_for, float):
                if waits_for <= free or entry.submitted_at <= starving_since:
                    yield entry
                continue
            wanted, until, toll_s, new, tokens, steps = waits_for
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
