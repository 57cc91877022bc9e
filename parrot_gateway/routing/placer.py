"""Placement of calls on engines: runs a `Scheduler` in the event loop, and submits calls to it.

The scheduler itself has no clock and no I/O; the runner gives it both, carries its actions out and
keeps its timers. Events that a caller waits for are handled at once; progress, statistics and block
events are collected until the end of the turn of the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from parrot_engine.kv_cache.block_hash import prompt_hashes
from parrot_engine.protocol import AdapterInfo, EngineInfo, Retention
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
    ApplicationFinished,
    EngineLeft,
    Event,
    TaskCancelled,
    TaskFinished,
    TaskProgress,
    TaskSubmitted,
    Tick,
)
from parrot_scheduler.scheduler import Scheduler
from parrot_scheduler.snapshot import queue_of, shared_prefixes
from parrot_scheduler.task import OBJECTIVE_KINDS, ApplicationId, EngineId, Task

from parrot_gateway.backends.own.changes import Changes
from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.calls.generation_request import GenerationRequest
from parrot_gateway.calls.metadata import CallMetadata
from parrot_gateway.exceptions import (
    ContextLengthError,
    EngineLostError,
    GatewayError,
    OverloadedError,
)
from parrot_gateway.routing.event_log_file import EventLogFile
from parrot_gateway.routing.explanations import Explanations
from parrot_gateway.routing.task_updates import TaskUpdater

logger = logging.getLogger(__name__)

#: Longest wait for the adapter of a call on an engine that has joined.
_ADAPTER_WAIT_S = 60.0
#: A timer is never set closer than this.
_SHORTEST_WAIT_S = 0.001
#: Tokens whose hashes are made in place, in about a millisecond.
_INLINE_TOKENS = 8192
#: What an engine without pages is taken to hold, in contexts of full length.
_UNPAGED_CONTEXTS = 16
#: Steps that may wait at an engine of vectors or scores, so that it never waits for the next.
POOLING_STEPS = 4
#: Blocks that say which template a prompt was made from, where nothing else does.
_TEMPLATE_BLOCKS = 4


class ModelPlacer:
    """The engines of one model for one call; see `parrot_gateway.backends.own.placement.Placer`.

    Args:
        runner: the scheduler.
        updater: passes on what becomes known of calls later.
        engines: all that have joined, by id.
        sample: any engine of the model, for what all of them have in common.
        metadata: of the call.
        wait_for_engine: see `ModelDirectory.engine_coming`.
        changes: of `engines` and their adapters.
        adapter: that it is computed with.
        parses_reasoning: see `ServedModel`.
    """

    def __init__(
        self,
        runner: SchedulerRunner,
        updater: TaskUpdater,
        engines: Mapping[EngineId, RemoteEngine],
        sample: RemoteEngine,
        metadata: CallMetadata,
        wait_for_engine: Callable[[OverloadedError], Awaitable[None]],
        changes: Changes,
        *,
        adapter: AdapterInfo | None = None,
        parses_reasoning: bool = True,
    ) -> None:
        self.runner = runner
        self.updater = updater
        self.engines = engines
        self.info = sample.info
        self.tokenizer = sample.tokenizer
        self.metadata = metadata
        self._wait_for_engine = wait_for_engine
        self._changes = changes
        self._seeds = sample.seeds
        self.adapter = adapter
        self.parses_reasoning = parses_reasoning

    def place(self, request: GenerationRequest, lost: Sequence[str] = ()) -> EnginePlacement:
        return EnginePlacement(self, request, tuple(lost))

    def draw_seed(self) -> int:
        return self._seeds.getrandbits(63)

    async def engine_coming(self, lost: OverloadedError) -> None:
        await self._wait_for_engine(lost)
        if self.adapter is None:
            return
        try:
            async with asyncio.timeout(_ADAPTER_WAIT_S):
                while not self.adapted_engines():
                    await self._changes.next().wait()
        except TimeoutError:
            raise lost from None

    def serving_engines(self) -> list[RemoteEngine]:
        """Return the engines of the model that take calls."""
        model = self.info.model
        return [e for e in self.engines.values() if e.info.model == model and e.takes_calls]

    def adapted_engines(self) -> list[RemoteEngine]:
        """Return those of them that have the call's adapter."""
        return [engine for engine in self.serving_engines() if self.has_adapter(engine)]

    def has_adapter(self, engine: RemoteEngine) -> bool:
        """Return true if an engine has the adapter of the call, if that has one."""
        if self.adapter is None:
            return True
        found = engine.adapters.get(self.adapter.name)
        return found is not None and found.id == self.adapter.id


class SubmittedTask:
    """One call in the scheduler's hands, until it is closed.

    Args:
        runner: the scheduler.
        updater: passes on what becomes known of calls later.
        metadata: of the call.
    """

    def __init__(
        self, runner: SchedulerRunner, updater: TaskUpdater, metadata: CallMetadata
    ) -> None:
        self.queued_s = 0.0
        self.reason = ""
        #: Names of the engines that the call has lost.
        self.lost: tuple[str, ...] = ()
        self._runner = runner
        self._updater = updater
        self._metadata = metadata
        self._explained_as = metadata.explained_as
        self._requested_at = time.perf_counter()
        #: Once it has been submitted.
        self._task: Task | None = None
        #: Of the task: "waiting", "placed" or "ended".
        self._state = "waiting"
        #: Where it runs, once it has been placed.
        self._place: Place | None = None
        self._future: asyncio.Future[Place] | None = None
        #: Tokens filled, of these found in a cache, and generated.
        self._progress = (0, 0, 0)
        self._succeeded = False

    def submit(self, make: Callable[[int, CallMetadata], Task]) -> Task:
        """Hand in the task, made with its id and what is known of the call by now."""
        if self._metadata.call:
            # It may have been some time since the call began.
            self._metadata = self._updater.now(self._metadata)
        metadata = self._metadata
        task = self._runner.submit(self, lambda task_id: make(task_id, metadata))
        if metadata.call:
            self._updater.submitted(metadata, task.id)
            self._explained_as = (metadata.tenant, metadata.call)
        explanations = self._runner.explanations
        if explanations is not None and self._explained_as is not None:
            explanations.submitted(self._explained_as, task, self.lost)
        return task

    async def placed(self, task: Task) -> Place:
        """The place of the submitted task. A cancelled wait can be taken up again.

        Raises:
            GatewayError: the scheduler has refused it.
        """
        if self._place is None:
            if self._future is None:
                self._future = asyncio.get_running_loop().create_future()
            # A cancelled wait ends nothing: `close` does.
            self._place = await asyncio.shield(self._future)
        self._place = self._explained(self._place)
        self.queued_s = time.perf_counter() - self._requested_at
        self.reason = in_words(task, self._place)
        explanations = self._runner.explanations
        if explanations is not None and self._explained_as is not None:
            explanations.placed(self._explained_as, self._place.engine_id, self._place.reasons)
        return self._place

    def _explained(self, place: Place) -> Place:
        """A place with the reasons to remember."""
        return place

    def log_placement(self, task: Task, place: Place, engine_name: str) -> None:
        logger.debug(
            "task %d of %s runs on %s after %.3f s: %s (cost %.4g of %s; %s)",
            task.id,
            task.application,
            engine_name,
            self.queued_s,
            self.reason,
            place.reasons.cost,
            place.reasons.policy,
            place.reasons.details,
        )

    def progress(self, *, filled: int, cached: int, generated: int) -> None:
        """Tokens so far: of the prompts, of these found in a cache, and of the answers."""
        if self._state == "placed":
            self._progress = (filled, cached, generated)
            self._runner._note_progress(self)

    def succeed(self) -> None:
        """The call has all its tokens; anything else that ends it was no success."""
        self._succeeded = True

    def close(self) -> None:
        """The call has ended. Safe to call twice."""
        task = self._task
        if task is None:
            return
        if self._metadata.call:
            self._updater.ended(self._metadata.call, task.id)
        explanations = self._runner.explanations
        if explanations is not None and self._explained_as is not None:
            explanations.ended(self._explained_as, self._progress[1], succeeded=self._succeeded)
        events: list[Event] = []
        if self._state == "placed":
            _, cached, generated = self._progress
            events.append(TaskFinished(task.id, cached, generated, self._succeeded))
        elif self._state == "waiting":
            events.append(TaskCancelled(task.id))
        if not self._metadata.application:
            events.append(ApplicationFinished(task.application))
        self._runner._ended(self, events)


class EnginePlacement(SubmittedTask):
    """One call to an own engine; see `parrot_gateway.backends.own.placement.Placement`.

    Args:
        placer: of the model.
        request: what is to be run.
        lost: names of the engines that it has lost.
    """

    def __init__(
        self, placer: ModelPlacer, request: GenerationRequest, lost: tuple[str, ...]
    ) -> None:
        super().__init__(placer.runner, placer.updater, placer.metadata)
        self.lost = lost
        self.priority = 0
        self.retention: Retention = "normal"
        self.application = ""
        self.engine_name = ""
        self.adapter = "" if placer.adapter is None else placer.adapter.id
        self._placer = placer
        self._request = request

    async def engine(self) -> RemoteEngine:
        task = self._task or await self._submit()
        place = await self.placed(task)
        # A caller's own priority comes first, as far as he has one.
        self.priority = place.priority - len(OBJECTIVE_KINDS) * self._metadata.priority
        self.retention = place.retention
        self.application = task.application
        engine = self._placer.engines.get(place.engine_id)
        if engine is None:
            raise EngineLostError("The engine that was to run this call has just left.")
        if not self._placer.has_adapter(engine):
            raise OverloadedError(
                "The engine that was to run this call has no such adapter (yet); please send it "
                "again.",
                code="adapter_loading",
            )
        self.engine_name = engine.name
        self.log_placement(task, place, engine.name)
        return engine

    async def _submit(self) -> Task:
        placer, request = self._placer, self._request
        prefix = await prefix_of(request, placer.info, self.adapter)

        def make(task_id: int, metadata: CallMetadata) -> Task:
            preferred = None
            if metadata.prefers is not None:
                preferred = _engine_named(metadata.prefers, placer.info.model, placer.engines)
            return task_of(
                task_id,
                request,
                metadata,
                info=placer.info,
                prefix=prefix,
                bound_to=self._only_engine(),
                prefers=preferred,
            )

        return self.submit(make)

    def _only_engine(self) -> EngineId | None:
        """Return the engine that must run it if some engines of the model lack the adapter."""
        placer = self._placer
        if placer.adapter is None:
            return None
        having = placer.adapted_engines()
        if len(having) == len(placer.serving_engines()) or not having:
            return None
        return min(having, key=lambda engine: (engine.queued_tokens, engine.running)).id


class SchedulerRunner:
    """The scheduler of a gateway. Used in the event loop's thread only.

    Args:
        scheduler: decides.
        drop_kept: drops what an engine keeps for an application that has no use for it any more.
        clock: seconds, never going backwards.
        event_log: gets every step.
        explanations: remembers placements, if anything does.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        drop_kept: Callable[[EngineId, ApplicationId], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        event_log: EventLogFile | None = None,
        explanations: Explanations | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.explanations = explanations
        self._drop_kept = drop_kept
        self._clock = clock
        self._event_log = event_log
        self._numbers = itertools.count(1)
        self._requests: dict[int, SubmittedTask] = {}
        self._by_engine: dict[EngineId, set[SubmittedTask]] = {}
        self._pending_events: list[Event] = []
        self._progressed: dict[int, SubmittedTask] = {}
        self._turn_is_booked = False
        self._timer: asyncio.TimerHandle | None = None
        self._stepping = False
        self._closed = False
        #: Decisions since the start.
        self.placed = 0
        self.refused = 0
        self.held = 0
        #: Of those placed what decided, of those refused why, and how many tasks had a group.
        self.placements: dict[str, int] = {}
        self.refusals: dict[str, int] = {}
        self.grouped = 0

    # -- tasks --------------------------------------------------------------------------------

    def submit(self, request: SubmittedTask, make: Callable[[int], Task]) -> Task:
        """Hand in a task, made with the id it gets; it may have a place when this returns.

        The request must be closed, whatever happens.

        Raises:
            OverloadedError: the gateway is shutting down.
        """
        if self._closed:
            raise OverloadedError("The gateway is shutting down.", code="shutting_down")
        task = request._task = make(next(self._numbers))
        self._requests[task.id] = request
        if task.groups:
            self.grouped += 1
        self._step([TaskSubmitted(task)])
        return task

    def notify(self, *events: Event) -> None:
        """Inform the scheduler, at the end of this turn of the event loop."""
        if self._closed:
            return
        self._pending_events.extend(events)
        if not self._turn_is_booked:
            self._book_turn()

    def queues(self) -> dict[str, dict[str, float]]:
        """By model, how many calls and applications wait and since when; see `queue_of`."""
        now = self._clock()
        return {name: queue_of(model, now) for name, model in self.scheduler.models.items()}

    def shared_prefixes(self) -> Iterator[tuple[EngineId, list[tuple[int, int]]]]:
        """By engine with several calls, see `parrot_scheduler.snapshot.shared_prefixes`."""
        for model in list(self.scheduler.models.values()):
            for row, placed in list(model.pool.placed.items()):
                if len(placed) > 1 and row in model.pool.placed:
                    yield model.pool.table.ids[row], shared_prefixes(model, row)

    def memory_needed(self) -> float:
        """Return the largest share of a model's KV that calls and retained contexts need."""
        pools = (model.pool for model in self.scheduler.models.values())
        return max((pool.memory_needed for pool in pools), default=0.0)

    def engine_left(self, engine_id: EngineId) -> None:
        """An engine left. Calls that ran there fail through their channels."""
        self._step([EngineLeft(engine_id)])
        for request in list(self._by_engine.pop(engine_id, ())):
            request._state = "ended"
            self._forget(request)

    def waiting(self, model: str) -> int:
        """Count the calls that wait for an engine of a model."""
        return len(self._waiting(model))

    def refuse_waiting(self, model: str, error: GatewayError) -> None:
        """Refuse the calls that wait for an engine of a model."""
        waiting = self._waiting(model)
        for request in waiting:
            self._refuse(request, error)
        self.notify(*(TaskCancelled(request._task.id) for request in waiting if request._task))

    def _waiting(self, model: str) -> list[SubmittedTask]:
        return [
            request
            for request in self._requests.values()
            if request._state == "waiting" and request._task and request._task.model == model
        ]

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
        if self._event_log is not None:
            self._event_log.close()

    # -- steps --------------------------------------------------------------------------------

    def _book_turn(self) -> None:
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
            if not self._turn_is_booked:
                self._book_turn()
            return
        self._stepping = True
        try:
            events, self._pending_events = self._pending_events, []
            for task_id, request in self._progressed.items():
                events.append(TaskProgress(task_id, *request._progress))
            self._progressed.clear()
            now = self._clock()
            actions = self.scheduler.step(now, events)
            if self._event_log is not None:
                self._event_log.record(now, events, actions)
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
                self.refusals[action.code] = self.refusals.get(action.code, 0) + 1
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
            if self.explanations is not None:
                self.explanations.held(action.application, action.reason)
        elif isinstance(action, Release):
            logger.info("application %s may run", action.application)
            if self.explanations is not None:
                self.explanations.released(action.application)

    def _place(self, place: Place) -> None:
        request = self._requests.get(place.task_id)
        if request is None or request._state != "waiting":
            # It was cancelled; the scheduler is notified of that next.
            return
        self.placed += 1
        decided_by = place.reasons.decided_by
        self.placements[decided_by] = self.placements.get(decided_by, 0) + 1
        request._state = "placed"
        request._place = place
        self._by_engine.setdefault(place.engine_id, set()).add(request)
        if request._future is not None and not request._future.done():
            request._future.set_result(place)

    def _refuse(self, request: SubmittedTask, error: GatewayError) -> None:
        """The scheduler has forgotten the task."""
        request._state = "ended"
        self._forget(request)
        if request._future is None:
            request._future = asyncio.get_running_loop().create_future()
        if not request._future.done():
            request._future.set_exception(error)
            # Raised by `engine`, if that is called; retrieved here so that asyncio logs nothing.
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

    def _note_progress(self, request: SubmittedTask) -> None:
        assert request._task is not None
        self._progressed[request._task.id] = request
        if not self._turn_is_booked:
            self._book_turn()

    def _ended(self, request: SubmittedTask, events: list[Event]) -> None:
        """A request is closed; the scheduler gets these events."""
        request._state = "ended"
        self._forget(request)
        if events:
            self.notify(*events)

    def _forget(self, request: SubmittedTask) -> None:
        assert request._task is not None
        self._requests.pop(request._task.id, None)
        self._progressed.pop(request._task.id, None)
        if request._place is not None:
            requests = self._by_engine.get(request._place.engine_id)
            if requests is not None:
                requests.discard(request)
                if not requests:
                    del self._by_engine[request._place.engine_id]


def _refusal(code: RejectCode, message: str) -> GatewayError:
    if code == "too_large":
        return ContextLengthError(message)
    if code == "engine_left":
        return EngineLostError(message)
    return OverloadedError(message, code=code)


def in_words(task: Task, place: Place) -> str:
    """Why a task is where it is, in a few words."""
    reasons = place.reasons
    words = (
        f"{reasons.decided_by} of {reasons.candidates}"
        if reasons.candidates > 1
        else (reasons.decided_by)
    )
    if reasons.expected_cached_tokens:
        words += f", {reasons.expected_cached_tokens} of {task.prompt_tokens} tokens cached"
    return f"{words}, held {reasons.held_s:.1f} s" if reasons.held_s else words


async def prefix_of(
    request: GenerationRequest, info: EngineInfo, adapter: str = ""
) -> tuple[int, ...]:
    """Hashes of the blocks of a call's first prompt, under which engines know them."""
    if not info.block_size or not request.is_cached:
        return ()
    tokens = request.prompts[0].token_ids
    if len(tokens) <= _INLINE_TOKENS:
        return prompt_hashes(tokens, info.block_size, request.salt, adapter)
    return await asyncio.to_thread(prompt_hashes, tokens, info.block_size, request.salt, adapter)


def task_of(
    task_id: int,
    request: GenerationRequest,
    metadata: CallMetadata,
    *,
    info: EngineInfo,
    prefix: tuple[int, ...],
    bound_to: str | None = None,
    prefers: str | None = None,
) -> Task:
    """The task of a call on engines described by `info`.

    A call of many prompts runs them in portions, and the engine mixes them with others': it counts
    for no more than half of an engine.
    """
    lengths = [len(prompt.token_ids) for prompt in request.prompts]
    prompt_tokens, sequences = sum(lengths), len(lengths) * request.best_of
    if len(lengths) > 1:
        each = prompt_tokens / sequences + request.sampling.max_tokens
        fitting = int(capacity_tokens(info) / 2 / each)
        at_once = max(1, min(sequences, info.max_batch_size // 2, fitting))
        prompt_tokens = max(*lengths, prompt_tokens * at_once // sequences)
        sequences = at_once
    return Task(
        id=task_id,
        model=info.model,
        tenant=metadata.tenant,
        application=metadata.application or f"call-{task_id}",
        prompt_tokens=prompt_tokens,
        # 0 would mean that no caller waits for it.
        max_tokens=max(1, request.sampling.max_tokens),
        prefix=prefix,
        template=metadata.template or template_of(prefix),
        objective=metadata.objective,
        groups=metadata.groups,
        # The API's priority is larger for earlier, as OpenAI's peers have it.
        priority=-metadata.priority,
        successors=metadata.successors,
        returns=metadata.returns,
        num_sequences=sequences,
        bound_to=bound_to,
        prefers=prefers,
        # Not asked where nothing is known, as for most calls: each further function is a cost.
        common_tokens=(
            None if metadata.common_share is None else metadata.common_tokens_of(prompt_tokens)
        ),
    )


def template_of(prefix: Sequence[int]) -> str:
    """Return a template for a call whose own is not known: calls that begin alike have the same."""
    return f"{prefix[min(_TEMPLATE_BLOCKS, len(prefix)) - 1]:016x}" if prefix else ""


def capacity_tokens(info: EngineInfo) -> int:
    """Tokens of KV that fit on an engine, 0 where unknown; of one without KV, tokens that may be
    there."""
    if not info.generates:
        return max(info.max_context_tokens, POOLING_STEPS * info.max_batch_tokens)
    paged = info.num_blocks * info.block_size
    return paged or _UNPAGED_CONTEXTS * info.max_context_tokens


def _engine_named(
    name: str, model: str, engines: Mapping[EngineId, RemoteEngine]
) -> EngineId | None:
    """The engine of a model that takes new work under this name or id, if there is one."""
    found = (
        each.id
        for each in engines.values()
        if name in (each.name, each.id) and each.info.model == model and each.takes_calls
    )
    return next(found, None)
