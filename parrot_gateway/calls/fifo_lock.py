"""A lock that is granted first come, first served, to a bounded number of waiting requests.

Each request holds a future, so that a wait can have a deadline of its own. No HTTP, no clock.
"""

from __future__ import annotations

import asyncio
from collections import deque

from parrot_gateway.exceptions import DeadlineError, OverloadedError

#: Requests that may wait for one lock.
MAX_WAITING = 1024


class LockRequest:
    """A request for a lock, held or waiting, until `FifoLock.release`."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        #: Done once the lock is granted.
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_granted(self) -> bool:
        """Return whether this request holds the lock."""
        return self.future.done() and not self.future.cancelled()


class FifoLock:
    """One lock. Used in the event loop's thread only.

    Args:
        max_waiting: requests that may wait besides the one that holds the lock.
    """

    __slots__ = ("_max_waiting", "_requests")

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        #: The first one holds the lock.
        self._requests: deque[LockRequest] = deque()

    @property
    def is_free(self) -> bool:
        """Return whether no request holds it or waits for it."""
        return not self._requests

    def request(self, what: str = "this") -> LockRequest:
        """Ask for the lock; `release` must follow, whatever happens.

        Args:
            what: the lock protects, for the error's text.

        Raises:
            OverloadedError: too many wait already.
        """
        if len(self._requests) > self._max_waiting:
            raise OverloadedError(
                f"{len(self._requests)} calls wait for {what} already.", code="too_many_waiting"
            )
        request = LockRequest()
        self._requests.append(request)
        self._grant_next()
        return request

    def release(self, request: LockRequest) -> None:
        """Give the lock back, or stop waiting for it. Safe to call twice."""
        if request in self._requests:
            self._requests.remove(request)
            request.future.cancel()
            self._grant_next()

    def _grant_next(self) -> None:
        while self._requests:
            first = self._requests[0]
            if not first.future.done():
                first.future.set_result(None)
            if not first.future.cancelled():
                return
            self._requests.popleft()


async def wait_granted(request: LockRequest, timeout_s: float, what: str = "this") -> None:
    """Wait until a lock is granted. A cancelled wait leaves the request to `FifoLock.release`.

    Args:
        what: the lock protects, for the error's text.

    Raises:
        DeadlineError: it was not granted in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(request.future)
    except TimeoutError:
        raise DeadlineError(
            f"Other calls held {what} for longer than this call could wait."
        ) from None
