"""Runs a `Scheduler` in the event loop: events in, actions carried out, timers kept.

The scheduler itself has no clock and no I/O; this shell gives it both, and the simulator is the
other shell. What somebody waits for is stepped at once; what merely informs (progress, statistics,
blocks) is collected until the end of the turn of the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from parrot_scheduler.actions import (
    Action,
    Cancel,
    Hold,
    Place,
    Reject,
    RejectCode,
    Release,
    WakeAt,
)
from parrot_scheduler.events import (
    EngineLeft,
    Event,
    TaskCancelled,
    TaskFinished,
    TaskProgress,
    TaskSubmitted,
    Tick,
)
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.task import EngineId, Task

from parrot_gateway.exceptions import (
    ContextLengthError,
    EngineLostError,
    GatewayError,
    OverloadedError,
)

logger = logging.getLogger(__name__)

#: A timer is never set closer than this.
_SHORTEST_WAIT_S = 0.001


class Recorder(Protocol):
    """Keeps what went in and what came out of each step."""

    def record(self, now: float, events: list[Event], actions: list[Action]) -> None:
        """One step."""
        ...

    def close(self) -> None:
        """There will be no more."""
        ...


class Ticket:
    """One task in the scheduler's hands, until `finish` or `cancel`."""

    __slots__ = ("_future", "_progress", "_shell", "_state", "place", "task")

    def __init__(self, shell: SchedulerShell, task: Task) -> None:
        self.task = task
        #: Where it runs, once it has been placed.
        self.place: Place | None = None
        self._shell = shell
        self._state = "waiting"
        self._progress = (0, 0, 0)
        self._future: asyncio.Future[Place] | None = None

    async def placed(self) -> Place:
        """Wait for a place. A cancelled wait ends nothing: `cancel` does.

        Raises:
            OverloadedError: the scheduler refused the task.
            ContextLengthError: no engine of the model can hold it.
            EngineLostError: the engine that it is bound to is gone.
        """
        if self.place is None:
            if self._future is None:
                self._future = asyncio.get_running_loop().create_future()
            self.place = await asyncio.shield(self._future)
        return self.place

    def progress(self, *, filled: int, cached: int, generated: int) -> None:
        """So much is done: totals of the task."""
        self._progress = (filled, cached, generated)
        self._shell._note_progress(self)

    def finish(self, *, succeeded: bool) -> None:
        """It ended on its engine."""
        if self._state == "placed":
            self._state = "ended"
            _, cached, generated = self._progress
            self._shell._ended(self, TaskFinished(self.task.id, cached, generated, succeeded))

    def cancel(self) -> None:
        """Nobody wants it any more; what it has on an engine has been freed. Safe after its end."""
        if self._state != "ended":
            self._state = "ended"
            self._shell._ended(self, TaskCancelled(self.task.id))


class SchedulerShell:
    """The scheduler of a gateway. Used in the event loop's thread only.

    Args:
        scheduler: decides.
        clock: seconds, never going backwards.
        recorder: is told of every step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        clock: Callable[[], float] = time.monotonic,
        recorder: Recorder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._clock = clock
        self._recorder = recorder
        self._numbers = itertools.count(1)
        self._tickets: dict[int, Ticket] = {}
        self._by_engine: dict[EngineId, set[Ticket]] = {}
        self._untold: list[Event] = []
        self._progressed: dict[int, Ticket] = {}
        self._turn_is_booked = False
        self._timer: asyncio.TimerHandle | None = None
        self._stepping = False
        self._closed = False
        #: Decisions since the start.
        self.placed = 0
        self.refused = 0
        self.held = 0

    # -- tasks --------------------------------------------------------------------------------

    def submit(self, make: Callable[[int], Task]) -> Ticket:
        """Hand in a task, made with the id it gets; it may have a place when this returns.

        The ticket must be ended, whatever happens.

        Raises:
            OverloadedError: the gateway is shutting down.
        """
        if self._closed:
            raise OverloadedError("The gateway is shutting down.", code="shutting_down")
        task = make(next(self._numbers))
        ticket = Ticket(self, task)
        self._tickets[task.id] = ticket
        self._step([TaskSubmitted(task)])
        return ticket

    def tell(self, *events: Event) -> None:
        """Inform the scheduler, at the end of this turn of the event loop."""
        if self._closed:
            return
        self._untold.extend(events)
        self._book_turn()

    def engine_left(self, engine_id: EngineId) -> None:
        """An engine is gone; what ran there is told so by its channel."""
        self._step([EngineLeft(engine_id)])
        for ticket in self._by_engine.pop(engine_id, set()):
            ticket._state = "ended"
            self._tickets.pop(ticket.task.id, None)
            self._progressed.pop(ticket.task.id, None)

    def describe(self) -> dict[str, Any]:
        """Queues, held applications, engines as accounted for, and counters; plain types."""
        return {
            "placed": self.placed,
            "refused": self.refused,
            "held": self.held,
            "tasks": len(self._tickets),
            **self.scheduler.snapshot(),
        }

    def close(self) -> None:
        """Nothing is placed any more; whoever waits is refused. May be called twice."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for ticket in list(self._tickets.values()):
            self._refuse(ticket, OverloadedError("The gateway is shutting down."))
        if self._recorder is not None:
            self._recorder.close()

    # -- steps --------------------------------------------------------------------------------

    def _book_turn(self) -> None:
        if not self._turn_is_booked:
            self._turn_is_booked = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_booked = False
        if not self._closed and (self._untold or self._progressed):
            self._step([])

    def _step(self, urgent: list[Event]) -> None:
        """Step with all that is untold, `urgent` last; steps do not nest."""
        self._untold.extend(urgent)
        if self._stepping:
            self._book_turn()
            return
        self._stepping = True
        try:
            events, self._untold = self._untold, []
            for ticket in self._progressed.values():
                events.append(TaskProgress(ticket.task.id, *ticket._progress))
            self._progressed.clear()
            now = self._clock()
            actions = self.scheduler.step(now, events)
            if self._recorder is not None:
                self._recorder.record(now, events, actions)
            for action in actions:
                self._carry_out(action, now)
        finally:
            self._stepping = False

    def _carry_out(self, action: Action, now: float) -> None:
        # `Forget` goes no further: engines have no primitive that names cached blocks, and what an
        # answer left there has hashes that only its engine knows. What was kept goes by age.
        if isinstance(action, Place):
            self._place(action)
        elif isinstance(action, Reject):
            ticket = self._tickets.get(action.task_id)
            if ticket is not None:
                self.refused += 1
                self._refuse(ticket, _refusal(action.code, action.message))
        elif isinstance(action, Cancel):
            ticket = self._tickets.get(action.task_id)
            if ticket is not None and ticket._future is not None and not ticket._future.done():
                self._refuse(ticket, OverloadedError(action.reason))
        elif isinstance(action, WakeAt):
            self._wake_at(action.time, now)
        elif isinstance(action, Hold):
            self.held += 1
            logger.info("application %s is held: %s", action.application, action.reason)
        elif isinstance(action, Release):
            logger.info("application %s may run", action.application)

    def _place(self, place: Place) -> None:
        ticket = self._tickets.get(place.task_id)
        if ticket is None or ticket._state != "waiting":
            # Nobody wants it any more; the scheduler hears of that next.
            return
        self.placed += 1
        ticket._state = "placed"
        ticket.place = place
        self._by_engine.setdefault(place.engine_id, set()).add(ticket)
        if ticket._future is not None and not ticket._future.done():
            ticket._future.set_result(place)

    def _refuse(self, ticket: Ticket, error: GatewayError) -> None:
        """The scheduler has forgotten the task."""
        ticket._state = "ended"
        self._forget(ticket)
        if ticket._future is None:
            ticket._future = asyncio.get_running_loop().create_future()
        if not ticket._future.done():
            ticket._future.set_exception(error)
            # Whoever asks later gets it; nobody need ask.
            ticket._future.exception()

    def _wake_at(self, when: float, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay = max(when - now, _SHORTEST_WAIT_S)
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self._closed:
            self._step([Tick()])

    # -- tickets ------------------------------------------------------------------------------

    def _note_progress(self, ticket: Ticket) -> None:
        if ticket._state == "placed":
            self._progressed[ticket.task.id] = ticket
            self._book_turn()

    def _ended(self, ticket: Ticket, event: TaskFinished | TaskCancelled) -> None:
        self._forget(ticket)
        if not self._closed:
            self._untold.append(event)
            self._book_turn()

    def _forget(self, ticket: Ticket) -> None:
        self._tickets.pop(ticket.task.id, None)
        self._progressed.pop(ticket.task.id, None)
        if ticket.place is not None:
            tickets = self._by_engine.get(ticket.place.engine_id)
            if tickets is not None:
                tickets.discard(ticket)
                if not tickets:
                    del self._by_engine[ticket.place.engine_id]


def _refusal(code: RejectCode, message: str) -> GatewayError:
    if code == "too_large":
        return ContextLengthError(message)
    if code == "engine_left":
        return EngineLostError(message)
    return OverloadedError(message, code=code)
