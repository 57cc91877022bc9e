"""Retention: the KV of paused applications stays while their chance of return is worth the memory.

Of two pauses the shorter one so far is the likelier to end soon: the chance that an application
returns within the next ten seconds falls from one half to a fourteenth as it stays away (710 traces
of coding agents, 47,948 pauses, `HAZARD`). So the longest idle goes first, and KV is retained while

    chance of return in the next 10 s x seconds per token to compute it anew  >=  price

Both sides are per token, so the context's length does not matter. The price rises as memory gets
scarce: `(1 - target) / (1 - fill)` times the price at which an engine with the default step model,
filled up to the target, retains for `LEASE_S` seconds. An engine with half its memory free retains
for minutes; one that is nearly full drops after seconds; a slow engine retains for longer than a
fast one, since computing anew costs more there. Before an engine is nearly full (`FULL`) nothing is
dropped within `MAX_LEASE_S`: memory that nobody needs is worth nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Self

import numpy as np

from parrot_scheduler.actions import Retention
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.engines.table import Column
from parrot_scheduler.policy import RetentionFactory, RetentionPolicy
from parrot_scheduler.task import DEFAULT_STEP_MODEL
from parrot_scheduler.task_state import Application, TaskState

#: Seconds of a pause so far, and the chance of a return within the ten seconds after.
HAZARD: tuple[tuple[float, float], ...] = (
    (0.0, 0.51),
    (5.0, 0.50),
    (10.0, 0.34),
    (20.0, 0.18),
    (30.0, 0.14),
    (60.0, 0.09),
    (300.0, 0.07),
)
#: Seconds for which KV is retained where memory is filled up to the target.
LEASE_S = 30.0
#: Seconds for which KV is retained at most, however much memory is free.
MAX_LEASE_S = 600.0
#: Share of an engine's memory that is in use or retained where leases begin to count. On simulated
#: engines calls of 300 agents take 6.33 s where leases always count, 5.21 s so.
FULL = 0.95
#: A call that another follows with a larger chance is retained.
RETURNS = 0.5
#: Lower bound of the free share of memory, so that the price stays finite.
_MIN_FREE = 0.01
#: Seconds per token; likewise.
_MIN_PREFILL_S = 1e-12

_IDLE_S = [idle_s for idle_s, _ in HAZARD]
_CHANCES = [chance for _, chance in HAZARD]


def chance_of_return(idle_s: float) -> float:
    """Chance that an application idle for so long returns within ten seconds, from `HAZARD`."""
    return float(np.interp(idle_s, _IDLE_S, _CHANCES))


class HazardRetention(RetentionPolicy):
    """Retention by the chance of return: see the module's text.

    Args:
        config: `working_set_target` (share of an engine's tokens of KV that is filled).
    """

    name = "hazard"

    @classmethod
    def make(cls, config: SchedulerConfig, rng: random.Random) -> Self:
        """Return a new one for one model."""
        return cls(config)

    def __init__(self, config: SchedulerConfig) -> None:
        self._target = min(config.working_set_target, 1.0 - _MIN_FREE)

    def retention_of(
        self, state: TaskState, application: Application, pool: EnginePool, now: float
    ) -> Retention:
        """`keep` where more of the application follows: a call waits for this one, it is a Fill
        ahead of its call, its prompt has outgrown what the application had before, as the turns
        of a conversation do, or calls of its kind are followed. `drop` for the last task of an
        application that has finished.
        """
        if application.has_finished:
            alone = application.num_queued + application.num_placed + application.num_held <= 1
            return "drop" if alone else "normal"
        grows = 0 < application.context_tokens <= state.task.prompt_tokens
        returns = grows or state.task.returns > RETURNS
        return "keep" if state.successors or state.is_fill or returns else "normal"

    def lease_s(self, fill: Column, prefill_token_s: Column) -> Column:
        """Seconds for which KV is retained, for engines filled to a share `fill`.

        `prefill_token_s`: seconds per token to compute it anew. One value for each engine.
        """
        scarcity = (1.0 - self._target) / np.maximum(1.0 - fill, _MIN_FREE)
        price = chance_of_return(LEASE_S) * DEFAULT_STEP_MODEL.prefill_token_s * scarcity
        # The least chance of return that pays for the memory, and how long it takes to fall so low.
        least = price / np.maximum(prefill_token_s, _MIN_PREFILL_S)
        lease = np.interp(least, _CHANCES[::-1], _IDLE_S[::-1], left=MAX_LEASE_S, right=0.0)
        return np.asarray(lease, dtype=np.float64)

    def expired(
        self, applications: Sequence[Application], pool: EnginePool, now: float
    ) -> list[Application]:
        """Return applications idle for longer than `MAX_LEASE_S`, or `lease_s` of a full engine;
        longest idle first.

        What expires makes room, so the lease of its engine is longer for the next one. Applications
        whose engine is gone have nothing left to retain.
        """
        table = pool.table
        used = table.working_set + table.retained
        leases = self._leases(used, pool)
        shortest = float(leases.min(initial=MAX_LEASE_S, where=table.retained > 0))
        expired: list[Application] = []
        for application in applications:
            idle_s = 0.0 if application.idle_since is None else now - application.idle_since
            if idle_s <= shortest:
                break  # and all after it are idle for less
            row = pool.row_of(application.last_engine)
            if row < 0:
                expired.append(application)
            elif idle_s > MAX_LEASE_S or (
                idle_s > leases[row] and used[row] >= FULL * table.capacity[row]
            ):
                expired.append(application)
                used[row] -= application.retained_tokens
                leases[row] = self._leases(used, pool, row)[0]
        return expired

    def _leases(self, used: Column, pool: EnginePool, row: int | None = None) -> Column:
        rows = slice(None) if row is None else slice(row, row + 1)
        table = pool.table
        fill = used[rows] / np.maximum(table.capacity[rows], 1.0)
        return self.lease_s(fill, table.prefill_token_s[rows])


class NoRetention(RetentionPolicy):
    """Every context is treated as any other, and nothing is dropped early."""

    name = "none"


POLICIES: dict[str, RetentionFactory] = {"hazard": HazardRetention.make, "none": NoRetention.make}
