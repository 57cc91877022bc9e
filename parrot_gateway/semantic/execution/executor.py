"""Runs the calls of all sessions, each as soon as its last input is ready.

Driven by events: variables notify the executor of changes, and nothing is polled. Failures,
cancellations and time-outs propagate to all dependents.

A call is **deferred** or **attended**. The executor runs a deferred call itself. A client waits for
an attended call on its own connection: the executor notifies it when the inputs are ready, and is
notified of the end.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from parrot_gateway.calls.requests.call import CallRequest
from parrot_gateway.exceptions import DeadlineError, GatewayError, OverloadedError
from parrot_gateway.semantic.execution.deduplication import DeduplicationCache
from parrot_gateway.semantic.execution.job import Job
from parrot_gateway.semantic.execution.unfinished import UnfinishedJobs
from parrot_gateway.semantic.variable import Failure
from parrot_gateway.settings.model import SessionSettings

logger = logging.getLogger(__name__)

#: Tries of a deferred call while engines are overloaded or lost, and the longest pause between
#: them.
MAX_TRIES = 8
MAX_RETRY_S = 30.0
#: Ended calls that the queue may contain before it is rebuilt.
_MAX_ENDED_IN_QUEUE = 64


class ExecutorStatistics(NamedTuple):
    """Gauges, all zero when idle; then counters since the start."""

    #: Calls waiting for inputs, waiting for a free slot, and running.
    waiting: int
    in_line: int
    running: int
    #: Bytes of all their bodies.
    held_bytes: int
    tasks: int
    submitted: int
    done: int
    failed: int
    cancelled: int
    #: Done calls that took the value of an identical call.
    deduplicated: int
    #: Tries after the first.
    retries: int
    #: Deferred calls that started when their last input came, and the total seconds that they were
    #: known before.
    started_by_inputs: int
    head_start_s: float


@dataclass(eq=False)
class Executor:
    """The executor. Used in the event loop's thread only."""

    limits: SessionSettings
    _: KW_ONLY
    #: Longest run of a call; for an attended call, wait and run together.
    run_timeout_s: float
    #: Time for the graph, in seconds.
    clock: Callable[[], float]
    #: Runs a deferred call on a model, as `CallRunner.run`.
    run: Callable[[Job, CallRequest], Awaitable[None]]
    #: Called with a call that waits for inputs, and again after each one that arrives.
    on_wait: Callable[[Job], None]
    #: Called with a call that is about to run.
    on_start: Callable[[Job], None]
    #: Called with a call that has ended.
    on_end: Callable[[Job], None]

    def __post_init__(self) -> None:
        self.unfinished = UnfinishedJobs(self.limits)
        self.deduplication = DeduplicationCache()
        self._tasks: set[asyncio.Task[None]] = set()
        self._woken: deque[Job] = deque()
        self._settling = False
        #: Heap of (minus priority, number, id) of calls waiting for a free slot; some may have
        #: ended.
        self._queue: list[tuple[int, int, str]] = []
        self._numbers = itertools.count()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._closing: Failure | None = None
        self._retries = 0
        self._submitted = self._done = self._failed = self._cancelled = self._deduplicated = 0
        self._running = self._in_line = self._started_by_inputs = 0
        self._head_start_s = 0.0

    def submit(self, job: Job) -> None:
        """Add a call to its session's graph, and run it when its inputs are ready.

        A call with a failed input fails soon after; this method does not raise.

        Raises:
            CycleError, DoubleProducerError, SessionFullError: as `Graph.add`.
            OverloadedError: too many calls wait already.
        """
        if self._closing is not None:
            raise OverloadedError(self._closing.message, code=self._closing.code)
        self.unfinished.check(job)
        job.session.graph.add(job.node)
        self._submitted += 1
        self.unfinished.add(job)
        try:
            for variable in job.inputs.values():
                if not variable.is_final:
                    job.watch(variable, self._wake)
        except GatewayError as error:
            self.fail(job, job.failure_of(error))
            raise
        if job.attended and job.has_inputs:
            # The common case: the client continues at once.
            job.is_ready = True
            self._in_line += 1
            return
        if job.context is not None:
            job.context.when_turn(lambda: self._wake(job))
        limit_s = self.run_timeout_s if job.attended else self.limits.ttl_s
        job.timer = asyncio.get_running_loop().call_later(limit_s, self._out_of_time, job)
        self._wake(job)

    def _wake(self, job: Job) -> None:
        """Schedule `_advance`.

        NOTE: not called directly, because the failure of a chain of a thousand calls would need as
        many stack frames.
        """
        self._woken.append(job)
        self._quiet.clear()
        if not self._settling:
            self._settling = True
            asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        while self._woken:
            job = self._woken.popleft()
            try:
                self._advance(job)
            except Exception:
                logger.exception("%s: failed before it ran", job.id)
                self.fail(job, Failure("server_error", "the gateway failed to start it"))
        self._settling = False
        self._start_waiting()
        self._note_quiet()

    def _advance(self, job: Job) -> None:
        """Fail a waiting call if an input failed, or enqueue it if all inputs are ready."""
        if job.node.state != "waiting" or job.is_ready:
            return
        failed = job.failed_input()
        if failed is not None and failed.failure is not None:
            job.error = failed.failure.to_error(failed.name)
            self.fail(job, failed.failure.passed_on(job.output_name, job.id))
        elif job.has_inputs:
            job.is_ready = True
            self._in_line += 1
            job.stop_watching()
            if job.attended:
                job.notify()
            else:
                heapq.heappush(self._queue, (-job.spec.priority, next(self._numbers), job.id))
        else:
            job.has_waited = job.has_waited or bool(job.inputs)
            self.on_wait(job)

    def _start_waiting(self) -> None:
        while self._queue and len(self._tasks) < self.limits.max_running_calls:
            _, _, job_id = heapq.heappop(self._queue)
            job = self.unfinished.find(job_id)
            if job is not None and job.node.state == "waiting":
                self._start(job)

    def _start(self, job: Job) -> None:
        self._begin(job)
        if job.has_waited:
            self._started_by_inputs += 1
            self._head_start_s += self.clock() - job.node.submitted
        task = asyncio.get_running_loop().create_task(self._run(job), name=f"call-{job.id}")
        job.task = task
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._start_waiting()
        self._note_quiet()

    def begin(self, job: Job) -> None:
        """Start an attended call in the current task, now that its inputs are ready."""
        job.task = asyncio.current_task()
        self._begin(job)

    def _begin(self, job: Job) -> None:
        job.stop_timer()
        job.record.ready = time.perf_counter()
        self.on_start(job)
        job.session.graph.start(job.id, self.clock())
        self._running += 1
        self._in_line -= 1
        if job.output is not None and job.output.state == "empty":
            job.output.begin(job.id)

    async def _run(self, job: Job) -> None:
        try:
            async with asyncio.timeout(self.run_timeout_s):
                if job.is_transform:
                    job.take_input(self.clock())
                else:
                    await self._answer(job)
                await self.complete(job)
        except TimeoutError:
            job.error = DeadlineError(
                f"it ran longer than {self.run_timeout_s:g} s (setting server.call_timeout_s)"
            )
            self.fail(job, job.failure_of(job.error))
        except GatewayError as error:
            job.error = error
            self.fail(job, job.failure_of(error))
        except asyncio.CancelledError:
            self.cancel(job)
            raise
        except Exception:
            logger.exception("%s: failed", job.id)
            self.fail(job, Failure("server_error", "the gateway failed to run it"))

    async def _answer(self, job: Job) -> None:
        """Get a call's text from a model or an identical call."""
        request = job.bound_request()
        await job.take_prompt(request)
        twin = self.deduplication.find(job, request) if job.spec.dedupe else None
        if twin is not None and await job.copy(twin):
            self._deduplicated += 1
            job.record.reason = "deduplicated"
            job.record.explanation = "took the value of an identical call"
            return
        for tries_left in reversed(range(MAX_TRIES)):
            try:
                await self.run(job, request)
            except OverloadedError as error:
                # The client of a deferred call does not retry.
                if job.has_text or error.retry_after_s is None or not tries_left:
                    raise
                self._retries += 1
                await asyncio.sleep(min(error.retry_after_s, MAX_RETRY_S))
            else:
                return

    async def complete(self, job: Job) -> None:
        """Apply the transform to a call's complete text and set the output.

        Raises:
            GatewayError: the text cannot become the value; the call has not ended yet.
        """
        if job.node.is_finished:
            return
        if job.output is not None:
            value = await job.value()
            # The session may have closed while the transform ran in a thread.
            if job.node.is_finished or job.output.is_final:
                return
            if job.context is not None:
                job.context.commit()
            try:
                job.output.set(value, job.id)
            except GatewayError:
                if job.context is not None:
                    job.context.undo()
                raise
        elif job.context is not None:
            job.context.commit()
        self._done += 1
        self._end(job, "done", None)

    def fail(self, job: Job, failure: Failure) -> None:
        """Fail a call and all its dependents. Ignored after its end."""
        if job not in self.unfinished:
            return
        if job.output is not None and not job.output.is_final:
            job.output.fail(failure)
        self._failed += 1
        self._end(job, "failed", failure)

    def cancel(self, job: Job, why: str = "it was cancelled") -> None:
        """Cancel a call and its work on an engine; dependents fail. Ignored after its end."""
        if job not in self.unfinished:
            return
        failure = Failure("cancelled", why, job.output_name, job.id)
        if job.output is not None and not job.output.is_final:
            job.output.cancel(failure)
        self._cancelled += 1
        self._end(job, "cancelled", failure)
        job.stop_running()

    def cancel_session(self, session_id: str, why: str) -> None:
        for job in self.unfinished.of_session(session_id):
            self.cancel(job, why)

    def _out_of_time(self, job: Job) -> None:
        if job.node.state == "waiting":
            names = ", ".join(f"'{v.name}'" for v in job.inputs.values() if not v.is_final)
            if not names and job.context is not None and not job.context.is_granted:
                names = f"context '{job.context.context.name}', which other calls hold"
            job.error = DeadlineError(f"The call waited too long for {names or 'a free place'}.")
            self.fail(job, job.failure_of(job.error))

    def _end(self, job: Job, state: str, failure: Failure | None) -> None:
        self.unfinished.remove(job)
        self._running -= job.node.state == "running"
        self._in_line -= job.is_ready and job.node.state == "waiting"
        job.stop_watching()
        job.stop_timer()
        job.failure = failure
        if job.context is not None:
            job.context.leave()
        graph = job.session.graph
        if job.id in graph:
            graph.finish(job.id, state, self.clock(), failure)  # type: ignore[arg-type]
        job.notify()
        job.end_record()
        self.on_end(job)
        self._forget_ended()
        self._note_quiet()

    def _forget_ended(self) -> None:
        """Remove ended calls from the queue once they are the larger part."""
        if len(self._queue) > 2 * len(self.unfinished) + _MAX_ENDED_IN_QUEUE:
            self._queue = [place for place in self._queue if self.unfinished.find(place[2])]
            heapq.heapify(self._queue)

    def _note_quiet(self) -> None:
        if not (self._tasks or self._woken or self._queue):
            self._quiet.set()
        else:
            self._quiet.clear()

    @property
    def deferred(self) -> int:
        """Return the number of deferred calls that run or wait for a slot; `drain` waits for
        them.
        """
        return len(self._tasks) + len(self._queue)

    async def drain(self, timeout_s: float) -> bool:
        """Wait until no deferred call runs or could run; return false after a time-out."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Cancel everything; return when nothing runs any more."""
        self._closing = Failure("shutting_down", "This gateway is shutting down.")
        for job in self.unfinished:
            self.cancel(job, "the gateway was shut down")
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def statistics(self) -> ExecutorStatistics:
        return ExecutorStatistics(
            waiting=len(self.unfinished) - self._running - self._in_line,
            in_line=self._in_line,
            running=self._running,
            held_bytes=self.unfinished.held_bytes,
            tasks=len(self._tasks),
            submitted=self._submitted,
            done=self._done,
            failed=self._failed,
            cancelled=self._cancelled,
            deduplicated=self._deduplicated,
            retries=self._retries,
            started_by_inputs=self._started_by_inputs,
            head_start_s=self._head_start_s,
        )
