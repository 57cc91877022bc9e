"""Responses that are made while no client waits: their tasks, and their events for readers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from parrot_gateway.exceptions import OverloadedError


class EventLog:
    """The events of one response, in order; any number of readers follow it."""

    __slots__ = ("_changed", "events", "is_closed", "size_bytes")

    def __init__(self) -> None:
        #: Their numbers are their places.
        self.events: list[bytes] = []
        self.size_bytes = 0
        #: There will be no more.
        self.is_closed = False
        self._changed = asyncio.Event()

    def append(self, event: bytes) -> None:
        self.events.append(event)
        self.size_bytes += len(event)
        self._notify()

    def close(self) -> None:
        self.is_closed = True
        self._notify()

    async def wait(self, position: int) -> None:
        """Until there are more than `position` events, or will be no more."""
        while len(self.events) <= position and not self.is_closed:
            await self._changed.wait()

    async def wait_closed(self) -> None:
        """Until there will be no more events."""
        while not self.is_closed:
            await self._changed.wait()

    def _notify(self) -> None:
        # NOTE: who waits is woken although the next wait begins anew.
        self._changed.set()
        self._changed = asyncio.Event()


class BackgroundTasks:
    """Tasks that outlive the requests that started them.

    Args:
        limit: at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()

    def check_room(self) -> None:
        """Refuse another task where there are too many.

        Raises:
            OverloadedError: there are.
        """
        if len(self._tasks) >= self._limit:
            raise OverloadedError(
                f"{len(self._tasks)} background responses are being made already (setting "
                "responses.max_background).",
                code="too_many_waiting",
            )

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work`, which deals with its own failures and cancellation."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel all tasks, and wait for their ends."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
