"""How many calls are in work, and whether new ones may come in.

The bound on everything behind it, and what a shutdown waits for, or in the end cuts off. Knows
nothing of what the calls are.
"""

from __future__ import annotations

import asyncio

from parrot_gateway.exceptions import DrainingError, OverloadedError


class CallGate:
    """Counts calls in and out; refuses when full or closing.

    Args:
        limit: calls in work at once.
        retry_after_s: seconds after which clients that are refused during a shutdown retry.
    """

    def __init__(self, limit: int, retry_after_s: float = 5.0) -> None:
        self._limit = limit
        self._retry_after_s = retry_after_s
        self._empty = asyncio.Event()
        self._empty.set()
        self._tasks: set[asyncio.Task[object]] = set()
        self._cut: set[asyncio.Task[object]] = set()
        self.running = 0
        self.accepted = 0
        self.refused = 0
        self.draining = False

    def enter(self, task: asyncio.Task[object] | None = None) -> None:
        """Count a call in; pair it with `leave`.

        Args:
            task: does the call's work, and is what `cut_off` cancels.

        Raises:
            DrainingError: the gateway is shutting down.
            OverloadedError: `limit` calls are in work.
        """
        if self.draining:
            self.refused += 1
            raise self._draining_error("takes no new calls")
        if self.running >= self._limit:
            self.refused += 1
            raise OverloadedError(
                f"{self.running} calls are in work, which is this gateway's limit "
                "(setting server.max_running_calls)."
            )
        self.running += 1
        self.accepted += 1
        self._empty.clear()
        if task is not None:
            self._tasks.add(task)

    def leave(self, task: asyncio.Task[object] | None = None) -> None:
        """Count a call out."""
        self.running -= 1
        if task is not None:
            self._tasks.discard(task)
            self._cut.discard(task)
        if self.running == 0:
            self._empty.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new calls and wait for those in work; False when time ran out first."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def cut_off(self) -> int:
        """Cancel the calls in work; returns how many. See `cut_error`."""
        for task in self._tasks - self._cut:
            self._cut.add(task)
            task.cancel()
        return len(self._cut)

    def cut_error(self, task: asyncio.Task[object] | None) -> DrainingError | None:
        """The error of a call that `cut_off` cancelled, or None.

        The task's cancellation counts as dealt with.
        """
        if task is None or task not in self._cut:
            return None
        task.uncancel()
        return self._draining_error("could not wait for the end of this call; please send it again")

    def _draining_error(self, story: str) -> DrainingError:
        return DrainingError(
            f"This gateway is shutting down and {story}.", retry_after_s=self._retry_after_s
        )
