"""Keeps one value for each of a limited number of tenants, and the limits of the linker."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class LinkerLimits(NamedTuple):
    """Limits for one tenant.

    Attributes:
        calls: maximum calls that can be linked to; older ones are forgotten.
        text: maximum characters of their answers.
        fingerprints: maximum fingerprints of their answers, a power of two, 8 bytes each.
        prompt_text: maximum characters of a prompt that are examined, the newest ones.
        horizon_s: older answers are linked only through whole conversations.
    """

    calls: int
    text: int
    fingerprints: int
    prompt_text: int
    horizon_s: float


class Tenants(Generic[T]):
    """Tenants by name; the longest idle one makes room.

    Args:
        make: makes the value of a new tenant.
        max_tenants: maximum number.
        forgotten: called with each evicted tenant.
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
        #: The last used tenant, which usually comes again.
        self._last: tuple[str, T] | None = None

    def use(self, name: str) -> T:
        """Return a tenant's value, created on first use."""
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
        """Return a tenant's value or None, without creating one."""
        return self._kept.get(name)

    def forget_oldest(self) -> None:
        """Evict the longest idle tenant."""
        name, kept = self._kept.popitem(last=False)
        if self._last is not None and self._last[0] == name:
            self._last = None
        self._forgotten(name, kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[T]:
        """Yield each value, the longest idle tenant first."""
        return iter(self._kept.values())

    def items(self) -> Iterator[tuple[str, T]]:
        """Yield the names and values."""
        return iter(self._kept.items())
