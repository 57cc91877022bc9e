"""An event loop on a virtual clock: time passes when there is nothing to do, and only then."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Nothing is ever ready; a wait for a timer is over at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything waits for something that will not come")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """No sockets and no threads; a deadlock raises `RuntimeError`."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        # A timer that is due by less than this is due.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._virtual.now
