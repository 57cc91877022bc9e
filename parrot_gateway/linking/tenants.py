"""What is kept for each tenant, of a limited number of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


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

    def use(self, name: str) -> T:
        """What is kept for a tenant, from now on if it is new."""
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = self._make()
            if len(self._kept) > self._max_tenants:
                self.forget_oldest()
        else:
            self._kept.move_to_end(name)
        return kept

    def known(self, name: str) -> T | None:
        """What is kept for a tenant that is asked about, which does not make it a new one."""
        return self._kept.get(name)

    def forget_oldest(self) -> None:
        """Let the one that was quiet longest go."""
        self._forgotten(*self._kept.popitem(last=False))

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[T]:
        """What is kept for each, the one that was quiet longest first."""
        return iter(self._kept.values())

    def items(self) -> Iterator[tuple[str, T]]:
        """The same with their names."""
        return iter(self._kept.items())
