"""The failed context ids, and their failures.

What is on its way to an id when its context fails is answered with the same failure, until the id
is freed. Nobody has to free an id, so only the latest failures are kept.
"""

from __future__ import annotations

from collections import OrderedDict

from parrot_engine.protocol import Failed

#: Failed ids that are remembered.
MAX_FAILURES = 4096


class FailureMemory:
    """The last `MAX_FAILURES` failures, one an id."""

    def __init__(self) -> None:
        self._failures: OrderedDict[int, Failed] = OrderedDict()

    def get(self, context_id: int) -> Failed | None:
        """The failure of this id; None if it did not fail, was freed, or that was long ago."""
        return self._failures.get(context_id)

    def remember(self, failure: Failed) -> None:
        """Keep a failure; the oldest goes when there are too many."""
        self._failures[failure.context_id] = failure
        self._failures.move_to_end(failure.context_id)
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

    def forget(self, context_id: int) -> None:
        """The id was freed; does nothing for one that did not fail."""
        self._failures.pop(context_id, None)
