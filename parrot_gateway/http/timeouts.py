"""Deadlines of one connection's client: to send its request, and to read its answer.

Does no I/O. Callbacks say which deadline passed; what happens to the connection is theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

#: A client's time for its body, and for what it has to read, is counted anew after so many bytes.
BODY_STEP_BYTES = 256 * 1024
READ_STEP_BYTES = 64 * 1024


class ClientTimeouts:
    """Watches one connection. A request that arrives whole starts no timer.

    Args:
        loop: runs the connection.
        limit_s: for a head, for each `BODY_STEP_BYTES` of a body, and for the client to read
            `READ_STEP_BYTES` more of an answer that waits for it.
        is_held_up: whether the gateway itself keeps the request from going on.
        unsent_bytes: of answers.
        on_late_request: called when the rest of a request did not come in time.
        on_late_reader: called when the client did not read in time.
    """

    __slots__ = ("_began", "_is_held_up", "_late_reader", "_late_request", "_limit_s",
                 "_loop", "_received", "_request_timer", "_unsent", "_unsent_before",
                 "_write_timer")  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limit_s: float,
        *,
        is_held_up: Callable[[], bool],
        unsent_bytes: Callable[[], int],
        on_late_request: Callable[[], None],
        on_late_reader: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._is_held_up = is_held_up
        self._unsent = unsent_bytes
        self._late_request = on_late_request
        self._late_reader = on_late_reader
        self._request_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._began = 0.0
        self._received = 0
        self._unsent_before = 0

    def await_request(self) -> None:
        """A request, or the rest of one, is to come; does nothing when that is known."""
        if self._request_timer is None:
            self._began, self._received = self._loop.time(), 0
            self._request_timer = self._loop.call_later(self._limit_s, self._check_request)

    def note_body(self, num_bytes: int) -> None:
        """More of a body has come."""
        self._received += num_bytes

    def end_request(self) -> None:
        """The request is whole; or nobody waits for it any more."""
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def await_reader(self) -> None:
        """More is to be sent than the client takes."""
        if self._write_timer is None:
            self._unsent_before = self._unsent()
            self._write_timer = self._loop.call_later(self._limit_s, self._check_reader)

    def end_reader(self) -> None:
        """It has taken enough; or the connection has ended."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def close(self) -> None:
        """The connection has ended."""
        self.end_request()
        self.end_reader()

    def _check_request(self) -> None:
        self._request_timer = None
        now = self._loop.time()
        if self._is_held_up():
            self.await_request()
            return
        limit_s = self._limit_s * (1 + self._received // BODY_STEP_BYTES)
        left_s = self._began + limit_s - now
        if left_s <= 0:
            self._late_request()
            return
        self._request_timer = self._loop.call_later(left_s, self._check_request)

    def _check_reader(self) -> None:
        self._write_timer = None
        unsent = self._unsent()
        if unsent and self._unsent_before - unsent < READ_STEP_BYTES:
            self._late_reader()
        elif unsent:
            self.await_reader()
