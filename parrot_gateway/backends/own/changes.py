"""Wakes those who follow a state that changes: progress of downloads and of loading."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Changes:
    """For one event loop: any number of waiters, woken by each `notify`."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake those who wait for the next change."""
        self._next.set()
        self._next = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Set with the next change; taken before the state is read, it misses none."""
        return self._next


async def wait_for_change(
    events: Iterable[asyncio.Event], work: asyncio.Task[None], timeout_s: float | None = None
) -> None:
    """Return once any of `events` is set, `work` has ended, or so much time has passed."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait({work, *waits}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
