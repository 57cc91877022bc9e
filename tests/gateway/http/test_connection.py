"""How long a client may take, on a clock of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from parrot_gateway.http.connection import BODY_STEP_BYTES, READ_STEP_BYTES, ClientTimeouts


class Clock:
    """The part of an event loop that `ClientTimeouts` uses."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self, self.now + delay, callback))
        return self.timers[-1]

    def go_to(self, time: float) -> None:
        while due := [timer for timer in self.timers if timer.when <= time]:
            first = min(due, key=lambda timer: timer.when)
            self.timers.remove(first)
            self.now = first.when
            first.callback()
        self.now = time


class Timer:
    def __init__(self, clock: Clock, when: float, callback: Callable[[], None]) -> None:
        self.clock, self.when, self.callback = clock, when, callback

    def cancel(self) -> None:
        if self in self.clock.timers:
            self.clock.timers.remove(self)


class Connection:
    """A connection whose client has ten seconds."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.held_up = False
        self.unsent = 0
        self.late: list[tuple[str, float]] = []
        loop: Any = self.clock
        assert isinstance(loop, Clock | asyncio.AbstractEventLoop)
        self.timeouts = ClientTimeouts(
            loop,
            10.0,
            is_held_up=lambda: self.held_up,
            unsent_bytes=lambda: self.unsent,
            on_late_request=lambda: self.late.append(("request", self.clock.now)),
            on_late_reader=lambda: self.late.append(("reader", self.clock.now)),
        )


def test_a_head_that_trickles_in_gets_no_more_time() -> None:
    connection = Connection()
    for second in range(12):
        connection.clock.go_to(second)
        connection.timeouts.await_request()
    assert connection.late[0] == ("request", 10.0)


def test_a_body_gets_time_for_what_has_come() -> None:
    connection = Connection()
    connection.timeouts.await_request()
    connection.clock.go_to(9)
    connection.timeouts.note_body(BODY_STEP_BYTES - 1)
    connection.timeouts.note_body(1)
    connection.clock.go_to(19)
    assert connection.late == []
    connection.timeouts.note_body(BODY_STEP_BYTES - 1)
    connection.clock.go_to(100)
    assert connection.late == [("request", 20.0)]


def test_a_whole_request_ends_the_wait() -> None:
    connection = Connection()
    connection.timeouts.await_request()
    connection.timeouts.end_request()
    connection.clock.go_to(100)
    assert connection.late == []
    assert connection.clock.timers == []


def test_time_for_which_the_gateway_is_to_blame_does_not_count() -> None:
    connection = Connection()
    connection.timeouts.await_request()
    connection.held_up = True
    connection.clock.go_to(35)
    connection.held_up = False
    connection.clock.go_to(100)
    # Counted anew from the last look, at 30.
    assert connection.late == [("request", 40.0)]


def test_a_reader_has_to_take_something_each_time() -> None:
    connection = Connection()
    connection.unsent = 10 * READ_STEP_BYTES
    connection.timeouts.await_reader()
    for step in range(1, 4):
        connection.unsent -= READ_STEP_BYTES
        connection.clock.go_to(10 * step)
    connection.unsent -= READ_STEP_BYTES - 1
    connection.clock.go_to(100)
    assert connection.late == [("reader", 40.0)]


def test_a_reader_that_has_everything_is_never_late() -> None:
    connection = Connection()
    connection.unsent = 100
    connection.timeouts.await_reader()
    connection.unsent = 0
    connection.clock.go_to(100)
    assert connection.late == []


def test_nothing_is_left_of_a_connection_that_ended() -> None:
    connection = Connection()
    connection.timeouts.await_request()
    connection.unsent = 1
    connection.timeouts.await_reader()
    connection.timeouts.close()
    assert connection.clock.timers == []
