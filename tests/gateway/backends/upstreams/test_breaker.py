"""Breaker, retry policy and slots: the parts of an upstream that decide."""

from __future__ import annotations

import asyncio
from collections import deque
from copy import deepcopy

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from parrot_gateway.backends.upstreams.breaker import CircuitBreaker, Permit
from parrot_gateway.backends.upstreams.retry_policy import RetryPolicy, named_delay
from parrot_gateway.backends.upstreams.slots import QueueFullError, Slots

FAILURES, WINDOW_S, OPEN_S, SUCCESSES = 3, 10.0, 5.0, 2


def make_breaker() -> CircuitBreaker:
    return CircuitBreaker(failures=FAILURES, window_s=WINDOW_S, open_s=OPEN_S, successes=SUCCESSES)


def take(breaker: CircuitBreaker, now: float) -> Permit:
    permit = breaker.acquire(now)
    assert permit is not None
    return permit


def open_it(breaker: CircuitBreaker, now: float) -> None:
    for _ in range(FAILURES):
        breaker.failure(take(breaker, now), now)
    assert breaker.state(now) == "open"


def test_opens_after_failures_in_a_row_and_closes_after_successes() -> None:
    breaker = make_breaker()
    open_it(breaker, 100.0)
    assert breaker.acquire(100.0 + OPEN_S - 0.01) is None
    assert breaker.retry_after_s(101.0) == pytest.approx(OPEN_S - 1.0)
    first = take(breaker, 100.0 + OPEN_S)
    assert breaker.state(105.0) == "half_open"
    breaker.success(first)
    assert breaker.state(105.0) == "half_open"
    breaker.success(take(breaker, 105.0))
    assert breaker.state(105.0) == "closed"
    assert breaker.openings == 1


def test_a_success_in_between_starts_the_count_afresh() -> None:
    breaker = make_breaker()
    for _ in range(10):
        for _ in range(FAILURES - 1):
            breaker.failure(take(breaker, 0.0), 0.0)
        breaker.success(take(breaker, 0.0))
    assert breaker.state(0.0) == "closed"


def test_old_failures_do_not_count() -> None:
    breaker = make_breaker()
    for number in range(10):
        now = number * WINDOW_S
        breaker.failure(take(breaker, now), now)
        assert breaker.state(now) == "closed"


def test_failures_count_as_long_as_the_window_and_not_longer() -> None:
    for last, state in ((WINDOW_S, "open"), (WINDOW_S + 0.01, "closed")):
        breaker = make_breaker()
        for now in (0.0, 1.0, last):
            breaker.failure(take(breaker, now), now)
        assert breaker.state(last) == state


def test_what_failed_before_it_was_closed_again_is_forgotten() -> None:
    breaker = make_breaker()
    open_it(breaker, 0.0)
    for _ in range(SUCCESSES):
        breaker.success(take(breaker, OPEN_S))
    for _ in range(FAILURES - 1):
        breaker.failure(take(breaker, OPEN_S), OPEN_S)
    assert breaker.state(OPEN_S) == "closed"


def test_one_probe_at_a_time() -> None:
    breaker = make_breaker()
    open_it(breaker, 0.0)
    for _ in range(SUCCESSES):
        probe = take(breaker, OPEN_S)
        assert breaker.acquire(OPEN_S) is None
        breaker.success(probe)
    assert breaker.state(OPEN_S) == "closed"


def test_one_failure_opens_it_again_when_half_open() -> None:
    breaker = make_breaker()
    open_it(breaker, 0.0)
    breaker.failure(take(breaker, OPEN_S), OPEN_S)
    assert breaker.state(OPEN_S) == "open"
    assert breaker.acquire(OPEN_S * 2 - 0.01) is None


def test_an_abandoned_probe_makes_room() -> None:
    breaker = make_breaker()
    open_it(breaker, 0.0)
    probe = take(breaker, OPEN_S)
    assert breaker.acquire(OPEN_S) is None
    breaker.abandon(probe)
    assert breaker.acquire(OPEN_S) is not None


def test_outcomes_of_calls_from_before_the_opening_say_nothing() -> None:
    breaker = make_breaker()
    early = [take(breaker, 0.0) for _ in range(5)]
    open_it(breaker, 0.0)
    for permit in early:
        breaker.success(permit)
    assert breaker.state(1.0) == "open"
    probe = take(breaker, OPEN_S)
    breaker.failure(early[0], OPEN_S)
    assert breaker.state(OPEN_S) == "half_open"
    breaker.success(probe)


class BreakerMachine(RuleBasedStateMachine):
    """Against a plain model: a list of what happened since the last change of state."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = make_breaker()
        self.now = 0.0
        self.permits: deque[Permit] = deque()
        self.in_half_open: set[int] = set()

    @rule(seconds=st.floats(0.0, 8.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def acquire(self) -> None:
        before = self.breaker.state(self.now)
        permit = self.breaker.acquire(self.now)
        if before == "closed":
            assert permit is not None
        if before == "open":
            assert permit is None
            assert self.breaker.retry_after_s(self.now) > 0
        if permit is not None:
            self.permits.append(permit)

    @precondition(lambda self: self.permits)
    @rule(oldest=st.booleans())
    def succeed(self, oldest: bool) -> None:
        before = self.breaker.state(self.now)
        self.breaker.success(self.permits.popleft() if oldest else self.permits.pop())
        after = self.breaker.state(self.now)
        assert (before, after) in {
            ("closed", "closed"), ("open", "open"),
            ("half_open", "half_open"), ("half_open", "closed"),
        }  # fmt: skip

    @precondition(lambda self: self.permits)
    @rule(oldest=st.booleans())
    def fail(self, oldest: bool) -> None:
        before = self.breaker.state(self.now)
        self.breaker.failure(self.permits.popleft() if oldest else self.permits.pop(), self.now)
        after = self.breaker.state(self.now)
        assert not (before == "half_open" and after == "closed")

    @precondition(lambda self: self.permits)
    @rule()
    def abandon(self) -> None:
        before = self.breaker.state(self.now)
        self.breaker.abandon(self.permits.pop())
        assert self.breaker.state(self.now) == before

    @invariant()
    def never_stuck(self) -> None:
        """With every call ended and time gone by, somebody is let through again."""
        copy = deepcopy(self.breaker)
        for permit in self.permits:
            copy.abandon(permit)
        assert copy.acquire(self.now + OPEN_S + 0.001) is not None


TestBreakerMachine = BreakerMachine.TestCase


POLICY = RetryPolicy(max_retries=2, backoff_s=0.25, max_backoff_s=8.0)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_statuses_that_are_retried(status: int) -> None:
    assert POLICY.wants_retry(status, {})
    assert not POLICY.wants_retry(status, {"x-should-retry": "false"})


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 501])
def test_statuses_that_are_not_retried(status: int) -> None:
    assert not POLICY.wants_retry(status, {})
    assert POLICY.wants_retry(status, {"x-should-retry": "true"})


def test_backoff_doubles_up_to_its_limit_with_jitter_downwards() -> None:
    assert [POLICY.backoff(n, 0.0) for n in range(7)] == [0.25, 0.5, 1, 2, 4, 8, 8]
    assert POLICY.backoff(0, 0.999) == pytest.approx(0.1875, rel=0.01)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"retry-after-ms": "20", "retry-after": "9"}, 0.02),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}, 90.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:01 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after-ms": "1e300", "retry-after": "2"}, 2.0),
        ({"retry-after": "-5"}, None),
        ({}, None),
    ],
)
def test_waits_that_an_upstream_names(headers: dict[str, str], expected: float | None) -> None:
    assert named_delay(headers, wall_now=10.0) == expected


def test_a_long_wait_is_left_to_the_client() -> None:
    assert POLICY.delay(0, {"retry-after": "8"}, 0.5, 0.0) == 8.0
    assert POLICY.delay(0, {"retry-after": "9"}, 0.5, 0.0) is None
    assert POLICY.delay(2, {"retry-after": "1"}, 0.5, 0.0) is None


async def test_slots_serve_first_come_first_served() -> None:
    slots = Slots(1, 10)
    await slots.acquire(1.0)
    order: list[int] = []

    async def work(number: int) -> None:
        await slots.acquire(5.0)
        order.append(number)
        slots.release()

    tasks = [asyncio.create_task(work(number)) for number in range(5)]
    await asyncio.sleep(0)
    assert slots.waiting == 5
    slots.release()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]
    assert (slots.held, slots.waiting) == (0, 0)


async def one_in_line(max_waiting: int, timeout_s: float) -> tuple[Slots, asyncio.Task[None]]:
    """Slots of which the only one is held, and somebody who waits for it."""
    slots = Slots(1, max_waiting)
    await slots.acquire(1.0)
    waiting = asyncio.create_task(slots.acquire(timeout_s))
    await asyncio.sleep(0)
    return slots, waiting


async def test_slots_refuse_and_give_up() -> None:
    slots, waiting = await one_in_line(1, 0.01)
    with pytest.raises(QueueFullError):
        await slots.acquire(1.0)
    with pytest.raises(TimeoutError):
        await waiting
    assert (slots.held, slots.waiting) == (1, 0)


async def test_a_slot_handed_to_a_cancelled_waiter_is_not_lost() -> None:
    slots, waiting = await one_in_line(2, 5.0)
    slots.release()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (slots.held, slots.waiting) == (0, 0)
    assert slots.acquire_nowait()


async def test_a_cancelled_waiter_leaves_the_line() -> None:
    slots, waiting = await one_in_line(2, 5.0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (slots.held, slots.waiting) == (1, 0)
    slots.release()
    assert slots.held == 0
