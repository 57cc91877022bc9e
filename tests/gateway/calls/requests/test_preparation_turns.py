"""Calls that arrive together are spread over turns of the event loop."""

from __future__ import annotations

import asyncio
import time

from parrot_gateway.calls.requests.call import PreparationTurns


class Turn:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_soon(self._next)

    def _next(self) -> None:
        self.number += 1
        self._handle = self._loop.call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()


async def prepare_all(count: int, each_s: float) -> list[tuple[int, int]]:
    """(number of the call, turn) in the order in which calls were prepared."""
    turns, turn = PreparationTurns(), Turn()
    done: list[tuple[int, int]] = []

    async def prepare(number: int) -> None:
        await turns.wait()
        began = time.perf_counter()
        while time.perf_counter() - began < each_s:
            pass
        done.append((number, turn.number))

    await asyncio.gather(*map(prepare, range(count)))
    turn.stop()
    return done


async def test_long_ones_are_spread_in_their_order() -> None:
    done = await prepare_all(12, 0.011)
    assert [number for number, _ in done] == list(range(12))
    turns = [turn for _, turn in done]
    # The first takes the whole of its turn.
    assert turns.count(turns[0]) == 1
    assert max(map(turns.count, turns)) <= 4
    assert len(set(turns)) >= 4


async def test_short_ones_share_a_turn() -> None:
    done = await prepare_all(3, 0.0)
    assert len({turn for _, turn in done}) == 1


async def test_a_call_that_is_cancelled_keeps_nobody_waiting() -> None:
    turns = PreparationTurns()

    async def prepare() -> None:
        await turns.wait()
        began = time.perf_counter()
        while time.perf_counter() - began < 0.011:
            pass

    tasks = [asyncio.create_task(prepare()) for _ in range(6)]
    await tasks[0]
    for task in tasks[1:5]:
        task.cancel()
    await asyncio.wait_for(tasks[5], 60)
    assert [task.cancelled() for task in tasks] == [False, True, True, True, True, False]
