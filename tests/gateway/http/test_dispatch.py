"""Admission of calls: the bearer key, the bound on calls in work, and the drain."""

from __future__ import annotations

import asyncio

import pytest

from parrot_gateway.exceptions import AuthenticationError, DrainingError, OverloadedError
from parrot_gateway.http.dispatch import CallGate, KeyCheck


async def test_refuses_over_the_limit_and_recovers() -> None:
    gate = CallGate(limit=2)
    gate.enter()
    gate.enter()
    with pytest.raises(OverloadedError) as caught:
        gate.enter()
    assert caught.value.status == 503
    assert caught.value.retry_after_s is not None
    gate.leave()
    gate.enter()
    assert (gate.running, gate.accepted, gate.refused) == (2, 3, 1)


async def test_drain_waits_for_running_calls() -> None:
    gate = CallGate(limit=2)
    gate.enter()
    drain = asyncio.create_task(gate.drain(30))
    await asyncio.sleep(0)  # lets the drain begin
    assert gate.draining
    with pytest.raises(DrainingError) as caught:
        gate.enter()
    assert (b"retry-after", b"5") in caught.value.headers()
    assert not drain.done()
    gate.leave()
    assert await drain is True


async def test_drain_ends_in_bounded_time() -> None:
    gate = CallGate(limit=1)
    gate.enter()
    assert await gate.drain(0.01) is False
    assert gate.running == 1


async def test_drain_of_an_idle_gate_is_immediate() -> None:
    assert await CallGate(limit=1).drain(0.01) is True


async def test_calls_in_work_are_cut_off_with_a_reason() -> None:
    gate = CallGate(limit=3)

    async def call() -> DrainingError | None:
        task = asyncio.current_task()
        gate.enter(task)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            error = gate.cut_error(task)
            if error is None:
                raise
            # Not cancelled any more: it can still wait.
            await asyncio.sleep(0)
            return error
        finally:
            gate.leave(task)
        return None

    calls = [asyncio.create_task(call()) for _ in range(3)]
    await asyncio.sleep(0)
    calls[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[0]
    assert await gate.drain(0.01) is False
    assert gate.cut_off() == 2
    # A second time cancels nobody twice.
    assert gate.cut_off() == 2
    for cut in calls[1:]:
        error = await cut
        assert error is not None
        assert (error.status, error.code) == (503, "shutting_down")
        assert error.retry_after_s is not None
    assert await gate.drain(0.01) is True
    assert gate.cut_off() == 0


def test_open_without_a_key() -> None:
    KeyCheck(None).check(None)
    assert not KeyCheck(None).required


@pytest.mark.parametrize("sent", [b"Bearer secret", b"bearer secret", b"Bearer  secret"])
def test_the_right_key_passes(sent: bytes) -> None:
    KeyCheck("secret").check(sent)


@pytest.mark.parametrize(
    "sent", [None, b"", b"secret", b"Bearer", b"Bearer ", b"Bearer Secret", b"Basic secret",
             b"Bearer secret2", b"Bearer \xff\xfe"],
)  # fmt: skip
def test_anything_else_is_a_401(sent: bytes | None) -> None:
    with pytest.raises(AuthenticationError) as caught:
        KeyCheck("secret").check(sent)
    assert caught.value.status == 401
    assert caught.value.code == "invalid_api_key"
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("authorization", [None, b"Bearer other", b"Bearer secret"])
def test_the_key_of_anthropics_clients(authorization: bytes | None) -> None:
    KeyCheck("secret").check(authorization, b"secret")
    with pytest.raises(AuthenticationError, match="Incorrect"):
        KeyCheck("other secret").check(authorization, b"secret")


def test_the_key_is_not_kept() -> None:
    check = KeyCheck("very-secret")
    assert b"very-secret" not in check._digest  # type: ignore[operator]
