"""Runs a `Scheduler` in the event loop: events in, actions carried out, timers kept.

The scheduler itself has no clock and no I/O; the runner gives it both. Events that a caller waits
for are handled at once; progress, statistics and block events are collected until the end of the
turn of the event loop.
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
    Forget,
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
from parrot_scheduler.task import ApplicationId, EngineId, Task

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

    def close(self) -> None:
        """There will be no more."""


class PlacementRequest:
    """One task in the scheduler's hands, until `finish` or `cancel`."""

    __slots__ = ("_future", "_progress", "_runner", "_state", "place", "task")

    def __init__(self, runner: SchedulerRunner, task: Task) -> None:
        self.task = task
        #: Where it runs, once it has been placed.
        self.place: Place | None = None
        self._runner = runner
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
        self._runner._note_progress(self)

    def finish(self, *, succeeded: bool) -> None:
        """It ended on its engine."""
        if self._state == "placed":
            self._state = "ended"
            _, cached, generated = self._progress
            self._runner._ended(self, TaskFinished(self.task.id, cached, generated, succeeded))

    def cancel(self) -> None:
        """The call is given up; what it has on an engine has been freed. Safe after its end."""
        if self._state != "ended":
            self._state = "ended"
            self._runner._ended(self, TaskCancelled(self.task.id))


class SchedulerRunner:
    """The scheduler of a gateway. Used in the event loop's thread only.

    Args:
        scheduler: decides.
        drop_kept: drops what an engine keeps for an application that has no use for it any more.
        clock: seconds, never going backwards.
        recorder: gets every step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        drop_kept: Callable[[EngineId, ApplicationId], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        recorder: Recorder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._drop_kept = drop_kept
        self._clock = clock
        self._recorder = recorder
        self._numbers = itertools.count(1)
        self._requests: dict[int, PlacementRequest] = {}
        self._by_engine: dict[EngineId, set[PlacementRequest]] = {}
        self._pending_events: list[Event] = []
        self._progressed: dict[int, PlacementRequest] = {}
        self._turn_is_booked = False
        self._timer: asyncio.TimerHandle | None = None
        self._stepping = False
        self._closed = False
        #: Decisions since the start.
        self.placed = 0
        self.refused = 0
        self.held = 0

    # -- tasks --------------------------------------------------------------------------------

    def submit(self, make: Callable[[int], Task]) -> PlacementRequest:
        """Hand in a task, made with the id it gets; it may have a place when this returns.

        The request must be ended, whatever happens.

        Raises:
            OverloadedError: the gateway is shutting down.
        """
        if self._closed:
            raise OverloadedError("The gateway is shutting down.", code="shutting_down")
        task = make(next(self._numbers))
        request = PlacementRequest(self, task)
        self._requests[task.id] = request
        self._step([TaskSubmitted(task)])
        return request

    def notify(self, *events: Event) -> None:
        """Inform the scheduler, at the end of this turn of the event loop."""
        if self._closed:
            return
        self._pending_events.extend(events)
        self._book_turn()

    def engine_left(self, engine_id: EngineId) -> None:
        """An engine left. Calls that ran there fail through their channels."""
        self._step([EngineLeft(engine_id)])
        for request in self._by_engine.pop(engine_id, set()):
            request._state = "ended"
            self._requests.pop(request.task.id, None)
            self._progressed.pop(request.task.id, None)

    def describe(self) -> dict[str, Any]:
        """Queues, held applications, engines as accounted for, and counters; plain types."""
        return {
            "placed": self.placed,
            "refused": self.refused,
            "held": self.held,
            "tasks": len(self._requests),
            **self.scheduler.snapshot(),
        }

    def close(self) -> None:
        """Nothing is placed any more; whoever waits is refused. May be called twice."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for request in list(self._requests.values()):
            self._refuse(request, OverloadedError("The gateway is shutting down."))
        if self._recorder is not None:
            self._recorder.close()

    # -- steps --------------------------------------------------------------------------------

    def _book_turn(self) -> None:
        if not self._turn_is_booked:
            self._turn_is_booked = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_booked = False
        if not self._closed and (self._pending_events or self._progressed):
            self._step([])

    def _step(self, urgent: list[Event]) -> None:
        """Step with all pending events, `urgent` last; steps do not nest."""
        self._pending_events.extend(urgent)
        if self._stepping:
            self._book_turn()
            return
        self._stepping = True
        try:
            events, self._pending_events = self._pending_events, []
            for request in self._progressed.values():
                events.append(TaskProgress(request.task.id, *request._progress))
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
        if isinstance(action, Place):
            self._place(action)
        elif isinstance(action, Reject):
            request = self._requests.get(action.task_id)
            if request is not None:
                self.refused += 1
                self._refuse(request, _refusal(action.code, action.message))
        elif isinstance(action, Cancel):
            request = self._requests.get(action.task_id)
            if request is not None and request._future is not None and not request._future.done():
                self._refuse(request, OverloadedError(action.reason))
        elif isinstance(action, Forget):
            self._drop_kept(action.engine_id, action.application)
        elif isinstance(action, WakeAt):
            self._wake_at(action.time, now)
        elif isinstance(action, Hold):
            self.held += 1
            logger.info("application %s is held: %s", action.application, action.reason)
        elif isinstance(action, Release):
            logger.info("application %s may run", action.application)

    def _place(self, place: Place) -> None:
        request = self._requests.get(place.task_id)
        if request is None or request._state != "waiting":
            # It was cancelled; the scheduler is notified of that next.
            return
        self.placed += 1
        request._state = "placed"
        request.place = place
        self._by_engine.setdefault(place.engine_id, set()).add(request)
        if request._future is not None and not request._future.done():
            request._future.set_result(place)

    def _refuse(self, request: PlacementRequest, error: GatewayError) -> None:
        """The scheduler has forgotten the task."""
        request._state = "ended"
        self._forget(request)
        if request._future is None:
            request._future = asyncio.get_running_loop().create_future()
        if not request._future.done():
            request._future.set_exception(error)
            # Raised by `placed`, if that is called; retrieved here so that asyncio logs nothing.
            request._future.exception()

    def _wake_at(self, when: float, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay = max(when - now, _SHORTEST_WAIT_S)
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self._closed:
            self._step([Tick()])

    # -- requests ------------------------------------------------------------------------------

    def _note_progress(self, request: PlacementRequest) -> None:
        if request._state == "placed":
            self._progressed[request.task.id] = request
            self._book_turn()

    def _ended(self, request: PlacementRequest, event: TaskFinished | TaskCancelled) -> None:
        self._forget(request)
        if not self._closed:
            self._pending_events.append(event)
            self._book_turn()

    def _forget(self, request: PlacementRequest) -> None:
        self._requests.pop(request.task.id, None)
        self._progressed.pop(request.task.id, None)
        if request.place is not None:
            requests = self._by_engine.get(request.place.engine_id)
            if requests is not None:
                requests.discard(request)
                if not requests:
                    del self._by_engine[request.place.engine_id]


def _refusal(code: RejectCode, message: str) -> GatewayError:
    if code == "too_large":
        return ContextLengthError(message)
    if code == "engine_left":
        return EngineLostError(message)
    return OverloadedError(message, code=code)
