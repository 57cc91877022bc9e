"""Keeps something for each of a limited number of tenants; bounds of what is kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class LinkerLimits(NamedTuple):
    """Bounds for one tenant.

    Attributes:
        calls: that can be linked to; older ones are forgotten.
        text: characters of their answers.
        fingerprints: of their answers, a power of two, 8 bytes each.
        prompt_text: characters of a prompt that are looked at, the newest ones.
        horizon_s: an answer older than this is linked to by whole conversations only.
    """

    calls: int
    text: int
    fingerprints: int
    prompt_text: int
    horizon_s: float


class Tenants(Generic[T]):
    """Tenants by name; the one that was quiet longest makes room.

    Args:
        make: what is kept for a new one.
        max_tenants: kept.
        forgotten: called with those that have made room.
    """

    def __init__(
        self,
        make: Callable[[], T],
        max_tenants: int,
        forgotten: Callable[[str, T], None] = lambda _name, _kept: None,
    ) -> None:
        self._make = make
        self._max_tenants = max_tenants
        self._forgotten = forgotten
        self._kept: OrderedDict[str, T] = OrderedDict()
        #: The one that was used last: it mostly comes again.
        self._last: tuple[str, T] | None = None

    def use(self, name: str) -> T:
        """Get what is kept for a tenant, from now on if it is new."""
        last = self._last
        if last is not None and last[0] == name:
            return last[1]
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = self._make()
            if len(self._kept) > self._max_tenants:
                self.forget_oldest()
        else:
            self._kept.move_to_end(name)
        self._last = name, kept
        return kept

    def known(self, name: str) -> T | None:
        """Get what is kept for a tenant, or None; asking makes no new tenant."""
        return self._kept.get(name)

    def forget_oldest(self) -> None:
        """Let the one that was quiet longest go."""
        name, kept = self._kept.popitem(last=False)
        if self._last is not None and self._last[0] == name:
            self._last = None
        self._forgotten(name, kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[T]:
        """Yield what is kept for each, the one that was quiet longest first."""
        return iter(self._kept.values())

    def items(self) -> Iterator[tuple[str, T]]:
        """The same with their names."""
        return iter(self._kept.items())
