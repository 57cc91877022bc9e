"""No buffer is filled again while a copy from it may still be under way."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parrot_engine.runner.staging import Ring, Staging


class FakeDevice:
    """Work that is done later, in the order of its launch."""

    def __init__(self) -> None:
        self.queue: deque[FakeEvent | int] = deque()
        #: Buffers that work in the queue still reads.
        self.waits = 0

    def run_one(self) -> None:
        work = self.queue.popleft()
        if isinstance(work, FakeEvent):
            work.pending -= 1

    def reads(self, buffer: int) -> bool:
        return buffer in self.queue


class FakeEvent:
    """An event of the fake device."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.pending = 0

    def record(self) -> None:
        self.pending += 1
        self._device.queue.append(self)

    def synchronize(self) -> None:
        while self.pending:
            self._device.waits += 1
            self._device.run_one()


@given(st.lists(st.integers(0, 4), max_size=60), st.integers(1, 4))
def test_a_buffer_is_never_taken_while_it_is_read(progress: list[int], depth: int) -> None:
    device = FakeDevice()
    ring = Ring(range(depth), lambda: FakeEvent(device))
    for done in progress:
        buffer = ring.take()
        assert not device.reads(buffer)
        device.queue.append(buffer)
        ring.release()
        for _ in range(min(done, len(device.queue))):
            device.run_one()


def test_there_is_no_wait_while_buffers_are_free() -> None:
    device = FakeDevice()
    ring = Ring(range(3), lambda: FakeEvent(device))
    for _ in range(3):
        device.queue.append(ring.take())
        ring.release()
    assert device.waits == 0
    ring.take()
    assert device.waits > 0


@pytest.mark.parametrize("span", [(0, 8), (2, 5), (3, 3)])
def test_staging_writes_what_is_sent(span: tuple[int, int]) -> None:
    target = torch.zeros(8, dtype=torch.int32)
    staging = Staging(target, depth=2)
    for value in range(1, 6):
        array = staging.take()
        array[:] = value
        target.zero_()
        staging.send(*span)
        expected = torch.zeros(8, dtype=torch.int32)
        expected[slice(*span)] = value
        assert torch.equal(target, expected)
