"""Tasks of responses that are made while no client waits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from parrot_gateway.exceptions import OverloadedError


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
