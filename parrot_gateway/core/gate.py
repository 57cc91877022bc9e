"""How many calls are in work, and whether new ones may come in.

The bound on everything behind it, and what a shutdown waits for. Knows nothing of what the calls
are.
"""

from __future__ import annotations

import asyncio

from parrot_gateway.exceptions import DrainingError, OverloadedError


class CallGate:
    """Counts calls in and out; refuses when full or closing.

    Args:
        limit: calls in work at once.
        retry_after_s: what refused clients are told while the gateway shuts down.
    """

    def __init__(self, limit: int, retry_after_s: float = 5.0) -> None:
        self._limit = limit
        self._retry_after_s = retry_after_s
        self._empty = asyncio.Event()
        self._empty.set()
        self.running = 0
        self.accepted = 0
        self.refused = 0
        self.draining = False

    def enter(self) -> None:
        """Count a call in; pair it with `leave`.

        Raises:
            DrainingError: the gateway is shutting down.
            OverloadedError: `limit` calls are in work.
        """
        if self.draining:
            self.refused += 1
            raise DrainingError(
                "This gateway is shutting down and takes no new calls.",
                retry_after_s=self._retry_after_s,
            )
        if self.running >= self._limit:
            self.refused += 1
            raise OverloadedError(
                f"{self.running} calls are in work, which is this gateway's limit "
                "(setting server.max_running_calls)."
            )
        self.running += 1
        self.accepted += 1
        self._empty.clear()

    def leave(self) -> None:
        """Count a call out."""
        self.running -= 1
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
