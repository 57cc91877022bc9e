"""Duties of every placement policy, whatever it decides by. Policies by import path."""

from __future__ import annotations

import random

from parrot_scheduler.task import LATENCY, THROUGHPUT, EngineDescription, GroupRef

from harness.engine_pools import BLOCK, Engines, chain


def check_no_engines(policy: str) -> None:
    """Without engines a task waits."""
    engines = Engines(policy, 0)
    assert engines.choose(engines.state(100, 10)) is None


def check_draining(policy: str) -> None:
    """An engine that drains gets nothing."""
    engines = Engines(policy, 2)
    engines.pool.prefixes.stored(0, chain(1, 100))
    engines.pool.drain(0)
    for _ in range(4):
        choice = engines.place(engines.state(1600, 10, chain(1, 100)))
        assert choice is not None
        assert choice.row == 1
        assert choice.expected_cached_tokens in (0, 1599)


def check_too_small(policy: str, capacity: int) -> None:
    """An engine that is too small for a task is passed over."""
    engines = Engines(policy, 1, capacity=500)
    row = engines.pool.join(EngineDescription("large", "m", capacity, 64, 2048, BLOCK))
    choice = engines.choose(engines.state(1000, 100))
    assert choice is not None
    assert choice.row == row


def check_same_history(policy: str, seed: int) -> None:
    """The same history leads to the same places."""

    def history() -> list[tuple[int, str, int] | None]:
        rng = random.Random(seed)
        engines = Engines(policy, 5, capacity=20_000, max_batch=8)
        placed = []
        log: list[tuple[int, str, int] | None] = []
        for step in range(40):
            groups = (GroupRef(f"g{step // 6}", 6),) if rng.random() < 0.5 else ()
            state = engines.state(
                rng.randrange(64, 3000),
                rng.randrange(1, 200),
                chain(rng.randrange(4), rng.randrange(4)),
                groups=groups,
                objective=rng.choice([LATENCY, THROUGHPUT]),
                application=f"a{rng.randrange(5)}",
            )
            choice = engines.place(state, float(step))
            log.append(choice and (choice.row, choice.decided_by, choice.expected_cached_tokens))
            if choice is not None:
                engines.fill(state)
                placed.append(state)
            if placed and rng.random() < 0.4:
                engines.end(placed.pop(rng.randrange(len(placed))))
        return log

    assert history() == history()
