"""Readers of one log: a writer that waits for them, and one that is slower than another."""

from __future__ import annotations

import asyncio

import pytest

from parrot_gateway.api.streams.follow import follow
from parrot_gateway.calls.event_log import EventLog
from parrot_gateway.exceptions import EventsGoneError


class Reader:
    """Takes what is written to it while its gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.got = b""
        self.has_all = False

    async def write(self, data: bytes) -> None:
        await self.gate.wait()
        self.got += data

    async def end_stream(self, data: bytes = b"") -> None:
        await self.write(data)
        self.has_all = True


async def settle() -> None:
    """Let everybody do what can be done now."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_writer_waits_for_the_fastest_reader_only() -> None:
    log = EventLog(max_bytes=100)
    fast, slow = Reader(), Reader()
    fast.gate.set()
    follower = asyncio.create_task(follow(slow, log, 0, 60.0))
    log.append(b"a" * 30)
    await settle()
    log.append(b"b" * 30)
    waiting = asyncio.create_task(log.wait_for_room())
    await settle()
    assert not waiting.done()
    following = asyncio.create_task(follow(fast, log, 0, 60.0))
    await waiting
    for letter in (b"c", b"d", b"e"):
        log.append(letter * 30)
        await log.wait_for_room()
        await settle()
    assert log.size_bytes <= 100
    log.close()
    await following
    assert fast.has_all
    assert fast.got == b"".join(letter * 30 for letter in (b"a", b"b", b"c", b"d", b"e"))
    # It had been given the first event, and the second one is no longer there.
    slow.gate.set()
    with pytest.raises(EventsGoneError) as error:
        await follower
    assert slow.got == b"a" * 30
    assert f"up to number {log.first} " in error.value.message
    assert log.first == 2


async def test_what_nobody_has_read_is_kept() -> None:
    log = EventLog(max_bytes=100)
    for _ in range(10):
        log.append(b"x" * 30)
    assert (log.first, log.size_bytes) == (0, 300)
    # A writer that does not wait is let go at the end.
    waiting = asyncio.create_task(log.wait_for_room())
    await settle()
    assert not waiting.done()
    log.close()
    await waiting
    log.note_read(9)
    assert (log.first, log.size_bytes) == (7, 90)
    # One that comes back reads again what is still there; the window stays.
    log.note_read(8)
    assert log.read(7) == (b"x" * 90, 10)
    log.limit(10)
    assert log.first == 9


async def test_much_is_read_in_parts() -> None:
    log = EventLog()
    for _ in range(10):
        log.append(b"y" * 100_000)
    data, position = log.read(0)
    assert (len(data), position) == (300_000, 3)
    reader = Reader()
    reader.gate.set()
    log.close()
    await follow(reader, log, 1, 60.0)
    assert (len(reader.got), reader.has_all) == (900_000, True)
