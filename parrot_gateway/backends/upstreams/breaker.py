"""Circuit breaker: stop calling an upstream that keeps failing, and find out when it is back.

    closed ── `failures` in a row within `window_s` ──> open
    open ── `open_s` gone by, or hastened ──> half-open
    half-open ── `successes` in a row ──> closed
    half-open ── one failure ──> open

Pure: the clock is an argument and nothing is awaited. What counts as a failure is the caller's
decision (connection errors, time-outs and 5xx do; a 4xx never does). A success between failures
starts the count afresh, so an upstream that mostly works is never cut off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NewType, TypeAlias

BreakerState: TypeAlias = Literal["closed", "open", "half_open"]

#: What `acquire` hands out and every outcome gives back.
Permit = NewType("Permit", int)


@dataclass(eq=False, kw_only=True)
class CircuitBreaker:
    """Decides whether a call may be tried now.

    Each permit from `acquire` is given back once: by `success`, `failure` or `abandon`.
    """

    #: Consecutive failures that open it.
    failures: int
    #: A failure older than this no longer counts.
    window_s: float
    #: How long it stays open.
    open_s: float
    #: Consecutive successes that close it again; one try at a time is let through for them.
    successes: int
    #: Called with each state that it enters.
    on_change: Callable[[BreakerState], None] | None = None

    def __post_init__(self) -> None:
        self._state: BreakerState = "closed"
        #: Changes with the state: outcomes of calls begun under an earlier one do not count.
        self._generation = 0
        self._failed_at: deque[float] = deque(maxlen=self.failures)
        self._opened_at = 0.0
        self._probes = 0
        self._succeeded = 0
        #: How often it has opened, for statistics.
        self.openings = 0

    def state(self, now: float) -> BreakerState:
        """The state at `now`; never changes anything."""
        if self._state == "open" and now - self._opened_at >= self.open_s:
            return "half_open"
        return self._state

    def acquire(self, now: float) -> Permit | None:
        """Permission for one try, or None while the upstream is left alone."""
        if self._state == "closed":
            return Permit(self._generation)
        if self._state == "open":
            if now - self._opened_at < self.open_s:
                return None
            self._enter("half_open")
        if self._probes:
            return None
        self._probes += 1
        return Permit(self._generation)

    def hasten(self, now: float) -> None:
        """Let a try through now, as there is nobody else to ask."""
        if self._state == "open":
            self._opened_at = min(self._opened_at, now - self.open_s)

    def success(self, permit: Permit) -> None:
        if permit != self._generation:
            return
        if self._state == "half_open":
            self._probes -= 1
            self._succeeded += 1
            if self._succeeded >= self.successes:
                self._enter("closed")
        elif self._failed_at:
            self._failed_at.clear()

    def failure(self, permit: Permit, now: float) -> None:
        if permit != self._generation:
            return
        if self._state == "half_open":
            self._open(now)
            return
        self._failed_at.append(now)
        recent = len(self._failed_at) == self.failures
        if recent and now - self._failed_at[0] <= self.window_s:
            self._open(now)

    def abandon(self, permit: Permit) -> None:
        """The try ended without an outcome (the client went away)."""
        if permit == self._generation:
            self._probes -= 1

    def retry_after_s(self, now: float) -> float:
        """Seconds until a try may be let through again; 0 unless open."""
        if self._state != "open":
            return 0.0
        return max(0.0, self._opened_at + self.open_s - now)

    def _open(self, now: float) -> None:
        self._opened_at = now
        self.openings += 1
        self._enter("open")

    def _enter(self, state: BreakerState) -> None:
        self._state = state
        self._generation += 1
        self._failed_at.clear()
        self._probes = 0
        self._succeeded = 0
        if self.on_change is not None:
            self.on_change(state)
