"""A line before something that takes one call at a time: first come, first served, bounded.

Whoever stands in line waits for a future, under a deadline of its own. No HTTP, no clock.
"""

from __future__ import annotations

import asyncio
from collections import deque

from parrot_gateway.exceptions import DeadlineError, OverloadedError

#: How many may wait in one line.
MAX_WAITING = 1024


class Ticket:
    """A place in a line, until `Line.leave`."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        #: Done when it is this one's turn.
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def has_turn(self) -> bool:
        """Whether it is this one's turn."""
        return self.future.done() and not self.future.cancelled()


class Line:
    """One line. Used in the event loop's thread only.

    Args:
        max_waiting: how many may wait besides the one whose turn it is.
    """

    __slots__ = ("_max_waiting", "_tickets")

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._tickets: deque[Ticket] = deque()

    @property
    def is_free(self) -> bool:
        """Whether nobody stands in it."""
        return not self._tickets

    def join(self, what: str = "this") -> Ticket:
        """A place at the end; `leave` must follow, whatever happens.

        Args:
            what: the line leads to, for the error's text.

        Raises:
            OverloadedError: too many wait already.
        """
        if len(self._tickets) > self._max_waiting:
            raise OverloadedError(
                f"{len(self._tickets)} calls wait for {what} already.", code="too_many_waiting"
            )
        ticket = Ticket()
        self._tickets.append(ticket)
        self._call_next()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give the place up, in turn or before. Safe to call twice."""
        if ticket in self._tickets:
            self._tickets.remove(ticket)
            ticket.future.cancel()
            self._call_next()

    def _call_next(self) -> None:
        while self._tickets:
            first = self._tickets[0]
            if not first.future.done():
                first.future.set_result(None)
            if not first.future.cancelled():
                return
            self._tickets.popleft()


async def wait_turn(ticket: Ticket, timeout_s: float, what: str = "this") -> None:
    """Wait until it is the ticket's turn. A cancelled wait leaves the place in line to `leave`.

    Args:
        what: the line leads to, for the error's text.

    Raises:
        DeadlineError: it was not its turn in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(ticket.future)
    except TimeoutError:
        raise DeadlineError(
            f"Other calls held {what} for longer than this call could wait."
        ) from None
