"""Which contexts of an application were freed on an engine with their KV kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

#: Contexts remembered of one application; earlier ones of a conversation are part of later ones.
_MAX_EACH = 256


class KeptContexts:
    """Ids of freed contexts by application; bounded, applications kept longest out first.

    What is forgotten here stays kept on the engine until others take its place.
    """

    def __init__(self, max_contexts: int = 20_000) -> None:
        self._max_contexts = max_contexts
        self._by_application: OrderedDict[str, list[int]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        """Contexts that are remembered."""
        return self._count

    def add(self, application: str, context_ids: Sequence[int]) -> None:
        """These were freed, and their KV is kept for the application."""
        known = self.pop(application)
        ids = [*known, *context_ids][-_MAX_EACH:]
        self._by_application[application] = ids
        self._count += len(ids)
        while self._count > self._max_contexts:
            self.pop(next(iter(self._by_application)))

    def pop(self, application: str) -> list[int]:
        """Forget the contexts of an application; returns them, in the order of freeing."""
        known = self._by_application.pop(application, [])
        self._count -= len(known)
        return known
