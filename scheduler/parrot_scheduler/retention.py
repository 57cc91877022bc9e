"""Retention: keep the KV of paused applications while their probable return justifies the memory.

The longer a pause has lasted, the longer it will probably last. The chance that an application
returns within the next ten seconds falls from one half to a fourteenth (710 traces of coding
agents, 47,948 pauses, `HAZARD`). So the longest idle goes first, and KV is retained while

    chance of return in the next 10 s  x  seconds per token to recompute it  >=  price
Both sides are per token, so the context's length cancels out. The price rises as memory gets
scarce: it is `(1 - target) / (1 - fill)` times the price at which an engine with the default step
model, filled up to the target, retains for `LEASE_S` seconds. An engine with half its memory free
retains for minutes, and one that is nearly full for seconds. A slow engine retains longer than a
fast one, because recomputing costs more there. Until an engine is nearly full (`FULL`), nothing is
dropped within `MAX_LEASE_S`: free memory is worth nothing.
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

#: Seconds of a pause so far, and the chance of a return within the next ten seconds.
HAZARD: tuple[tuple[float, float], ...] = (
    (0.0, 0.51),
    (5.0, 0.50),
    (10.0, 0.34),
    (20.0, 0.18),
    (30.0, 0.14),
    (60.0, 0.09),
    (300.0, 0.07),
)
#: Seconds for which KV is retained when memory is filled to the target.
LEASE_S = 30.0
#: Longest retention in seconds, however much memory is free.
MAX_LEASE_S = 600.0
#: Share of an engine's memory, in use or retained, above which leases apply. On simulated engines
#: calls of 300 agents take 5.21 s with this threshold, and 6.33 s if leases always apply.
FULL = 0.95
#: KV is retained if the chance that another call follows is larger.
RETURNS = 0.5
#: Lower bound of the free share of memory, which keeps the price finite.
_MIN_FREE = 0.01
#: Lower bound of seconds per token, for the same reason.
_MIN_PREFILL_S = 1e-12

_IDLE_S = [idle_s for idle_s, _ in HAZARD]
_CHANCES = [chance for _, chance in HAZARD]


def chance_of_return(idle_s: float) -> float:
    """Return the chance that an application idle for so long returns within ten seconds, from
    `HAZARD`.
    """
    return float(np.interp(idle_s, _IDLE_S, _CHANCES))


class HazardRetention(RetentionPolicy):
    """Retention by the chance of return: see the module's docstring.

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
        """Return `keep` if more of the application follows, `drop` for the last task of a finished
        one.

        More follows if a call waits for this one, if the task is a Fill ahead of its call, if its
        prompt has outgrown the application's earlier context (as turns of a conversation do), or if
        calls of its kind are usually followed.
        """
        if application.has_finished:
            alone = application.num_queued + application.num_placed + application.num_held <= 1
            return "drop" if alone else "normal"
        grows = 0 < application.context_tokens <= state.task.prompt_tokens
        returns = grows or state.task.returns > RETURNS
        return "keep" if state.successors or state.is_fill or returns else "normal"

    def lease_s(self, fill: Column, prefill_token_s: Column) -> Column:
        """Return the seconds for which KV is retained on engines filled to a share `fill`.

        `prefill_token_s` is the time to recompute one token. Returns one value per engine.
        """
        scarcity = (1.0 - self._target) / np.maximum(1.0 - fill, _MIN_FREE)
        price = chance_of_return(LEASE_S) * DEFAULT_STEP_MODEL.prefill_token_s * scarcity
        # The smallest chance of return that pays for the memory, and the pause after which it is
        # reached.
        least = price / np.maximum(prefill_token_s, _MIN_PREFILL_S)
        lease = np.interp(least, _CHANCES[::-1], _IDLE_S[::-1], left=MAX_LEASE_S, right=0.0)
        return np.asarray(lease, dtype=np.float64)

    def expired(
        self, applications: Sequence[Application], pool: EnginePool, now: float
    ) -> list[Application]:
        """Return applications idle for longer than `MAX_LEASE_S`, or than `lease_s` of a full
        engine; longest idle first.

        An expiry makes room, so the engine's next application has a longer lease. Applications
        whose engine has left have nothing to retain.
        """
        table = pool.table
        used = table.working_set + table.retained
        leases = self._leases(used, pool)
        shortest = float(leases.min(initial=MAX_LEASE_S, where=table.retained > 0))
        expired: list[Application] = []
        for application in applications:
            idle_s = 0.0 if application.idle_since is None else now - application.idle_since
            if idle_s <= shortest:
                break  # all further ones are idle for less
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
    """Treats every context alike, and drops nothing early."""

    name = "none"


POLICIES: dict[str, RetentionFactory] = {"hazard": HazardRetention.make, "none": NoRetention.make}
