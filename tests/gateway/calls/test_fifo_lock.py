"""The lock that conversations and named contexts take turns by."""

from __future__ import annotations

import asyncio

import pytest

from parrot_gateway.calls.fifo_lock import FifoLock, wait_granted
from parrot_gateway.exceptions import DeadlineError, OverloadedError


async def test_it_is_granted_in_order() -> None:
    lock = FifoLock()
    first, second, third = (lock.request() for _ in range(3))
    assert [request.is_granted for request in (first, second, third)] == [True, False, False]
    lock.release(second)
    lock.release(first)
    assert third.is_granted
    assert not lock.is_free
    lock.release(third)
    lock.release(third)
    assert lock.is_free


async def test_so_many_may_wait_and_no_more() -> None:
    lock = FifoLock(max_waiting=2)
    requests = [lock.request() for _ in range(3)]
    with pytest.raises(OverloadedError) as caught:
        lock.request("the room")
    assert caught.value.code == "too_many_waiting"
    assert "the room" in caught.value.message
    lock.release(requests[-1])
    lock.request()


async def test_who_waits_for_a_request_that_is_given_up_is_told() -> None:
    lock = FifoLock()
    lock.request()
    request = lock.request()
    waiting = asyncio.create_task(wait_granted(request, 60.0))
    await asyncio.sleep(0)
    lock.release(request)
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(60):
            await waiting


async def test_a_wait_that_ends_leaves_the_request() -> None:
    lock = FifoLock()
    first, second = lock.request(), lock.request()
    with pytest.raises(DeadlineError, match="Other calls held the lock"):
        await wait_granted(second, 0.0, "the lock")
    waiting = asyncio.create_task(wait_granted(second, 60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    lock.release(first)
    assert second.is_granted
    await wait_granted(second, 0.0)
