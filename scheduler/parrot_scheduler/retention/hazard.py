"""Paused applications keep their KV while their chance of return is worth the memory.

Of two pauses the shorter one so far is the likelier to end soon: the chance that an application
returns within the next ten seconds falls from one half to a fourteenth as it stays away (710 traces
of coding agents, 47,948 pauses, `HAZARD`). So the longest idle goes first, and a context is kept
while

    chance of return in the next 10 s x seconds a token to compute it anew  >=  price

Both sides are per token, so its length does not matter. The price rises as memory gets scarce:
`(1 - target) / (1 - fill)` times what makes a lease of `LEASE_S` seconds on an engine with the
default step model that is filled up to the target. An engine with half its memory free keeps for
minutes; one that is nearly full lets go after seconds; a slow engine keeps for longer than a fast
one, since computing anew costs more there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parrot_scheduler.actions import Retention
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.engines.table import Column
from parrot_scheduler.policy import Application
from parrot_scheduler.task import DEFAULT_STEP_MODEL
from parrot_scheduler.task_state import Entry

#: Seconds idle, and the chance of a return within the ten seconds after.
HAZARD: tuple[tuple[float, float], ...] = (
    (0.0, 0.51),
    (5.0, 0.50),
    (10.0, 0.34),
    (20.0, 0.18),
    (30.0, 0.14),
    (60.0, 0.09),
    (300.0, 0.07),
)
#: How long a context is kept where memory is filled up to the target.
LEASE_S = 30.0
#: Nothing is kept longer, however much memory is free.
MAX_LEASE_S = 600.0
#: A full engine lets go of everything; the price stays finite.
_MIN_FREE = 0.01
_MIN_PREFILL_S = 1e-12


_IDLE_S = [idle_s for idle_s, _ in HAZARD]
_CHANCES = [chance for _, chance in HAZARD]


def chance_of_return(idle_s: float) -> float:
    """That an application idle for so long returns within ten seconds; linear between points."""
    return float(np.interp(idle_s, _IDLE_S, _CHANCES))


class KeepHazard:
    """See the module's text; `lease_s` says how long for an engine as it stands."""

    name = "hazard"

    def __init__(self, config: SchedulerConfig) -> None:
        self._target = min(config.working_set_target, 1.0 - _MIN_FREE)

    def retention(
        self, entry: Entry, application: Application, pool: Pool, now: float
    ) -> Retention:
        """`keep` where more of the application follows: a call waits for this one, it is a Fill
        done ahead of its call, or its prompt has outgrown what the application had before, as the
        turns of a conversation do. `drop` for the last task of an application that has finished.
        """
        if application.has_finished:
            alone = application.num_queued + application.num_placed + application.num_held <= 1
            return "drop" if alone else "normal"
        grows = 0 < application.context_tokens <= entry.task.prompt_tokens
        return "keep" if entry.successors or entry.is_fill or grows else "normal"

    def lease_s(self, fill: Column, prefill_token_s: Column) -> Column:
        """Seconds that a context is kept, for engines that are filled to a share `fill`."""
        scarcity = (1.0 - self._target) / np.maximum(1.0 - fill, _MIN_FREE)
        price = chance_of_return(LEASE_S) * DEFAULT_STEP_MODEL.prefill_token_s * scarcity
        # The least chance of return that pays for the memory, and how long it takes to fall so low.
        least = price / np.maximum(prefill_token_s, _MIN_PREFILL_S)
        lease = np.interp(least, _CHANCES[::-1], _IDLE_S[::-1], left=MAX_LEASE_S, right=0.0)
        return np.asarray(lease, dtype=np.float64)

    def expired(
        self, applications: Sequence[Application], pool: Pool, now: float
    ) -> list[Application]:
        """Those idle for longer than their engine's lease, longest idle first.

        What goes makes room, so the lease of its engine is longer for the next one. Applications
        whose engine is gone have nothing left to keep.
        """
        table = pool.table
        used = table.working_set + table.kept
        leases = self._leases(used, pool)
        shortest = float(leases.min(initial=MAX_LEASE_S, where=table.kept > 0))
        expired: list[Application] = []
        for application in applications:
            idle_s = 0.0 if application.idle_since is None else now - application.idle_since
            if idle_s <= shortest:
                break  # and all after it are idle for less
            row = pool.row_of(application.last_engine)
            if row < 0:
                expired.append(application)
            elif idle_s > leases[row]:
                expired.append(application)
                used[row] -= application.kept_tokens
                leases[row] = self._leases(used, pool, row)[0]
        return expired

    def _leases(self, used: Column, pool: Pool, row: int | None = None) -> Column:
        rows = slice(None) if row is None else slice(row, row + 1)
        table = pool.table
        fill = used[rows] / np.maximum(table.capacity[rows], 1.0)
        return self.lease_s(fill, table.prefill_token_s[rows])
