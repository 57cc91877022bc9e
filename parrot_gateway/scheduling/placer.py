"""Placement of calls on engines: submits tasks, waits for placements, reports progress."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from parrot_engine.kv_cache.block_hash import prompt_hashes
from parrot_engine.protocol import EngineInfo, Retention
from parrot_scheduler.actions import Place
from parrot_scheduler.events import ApplicationFinished, TaskUpdated
from parrot_scheduler.task import OBJECTIVE_KINDS, Task

from parrot_gateway.engines.registry import EngineRegistry
from parrot_gateway.engines.remote import RemoteEngine
from parrot_gateway.exceptions import EngineLostError
from parrot_gateway.generation.placement import CallMetadata
from parrot_gateway.generation.request import GenerationRequest
from parrot_gateway.scheduling.runner import PlacementRequest, SchedulerRunner

logger = logging.getLogger(__name__)

#: Tokens whose hashes are made in place, in about a millisecond.
_INLINE_TOKENS = 8192
#: What an engine without pages is taken to hold, in contexts of full length.
_UNPAGED_CONTEXTS = 16
#: Blocks that say which template a prompt was made from, where nothing else does.
_TEMPLATE_BLOCKS = 4


class EnginePlacement:
    """See `parrot_gateway.generation.placement.Placement`.

    Args:
        placer: of the model.
        request: what is to be run.
    """

    def __init__(self, placer: ModelPlacer, request: GenerationRequest) -> None:
        self.priority = 0
        self.retention: Retention = "normal"
        self.application = ""
        self.engine_name = ""
        self.queued_s = 0.0
        self.reason = ""
        self._placer = placer
        self._request = request
        self._requested_at = time.perf_counter()
        self._submitted: PlacementRequest | None = None
        self._succeeded = False

    async def engine(self) -> RemoteEngine:
        if self._submitted is None:
            self._submitted = await self._placer._submit(self._request)
        placement = self._submitted
        place = await placement.placed()
        # A caller's own priority comes first, as far as he has one.
        self.priority = place.priority - len(OBJECTIVE_KINDS) * self._placer.metadata.priority
        self.retention = place.retention
        self.application = placement.task.application
        engine = self._placer._engine(place)
        self.engine_name = engine.name
        self.queued_s = time.perf_counter() - self._requested_at
        self.reason = in_words(placement.task, place)
        logger.debug(
            "task %d of %s runs on %s after %.3f s: %s (cost %.4g of %s; %s)",
            placement.task.id,
            placement.task.application,
            engine.name,
            self.queued_s,
            self.reason,
            place.reasons.cost,
            place.reasons.policy,
            place.reasons.details,
        )
        return engine

    def progress(self, *, filled: int, cached: int, generated: int) -> None:
        if self._submitted is not None:
            self._submitted.progress(filled=filled, cached=cached, generated=generated)

    def succeed(self) -> None:
        self._succeeded = True

    def close(self) -> None:
        if self._submitted is None:
            return
        self._placer.updater.ended(self._placer.metadata, self._submitted)
        self._submitted.finish(succeeded=self._succeeded)
        self._submitted.cancel()
        if not self._placer.metadata.application:
            self._placer.runner.notify(ApplicationFinished(self._submitted.task.application))


class ModelPlacer:
    """The engines of one model for one call; see `parrot_gateway.generation.placement.Placer`.

    Args:
        runner: the scheduler.
        updater: passes on what becomes known of calls later.
        registry: where its engines are.
        sample: any engine of the model, for what all of them have in common.
        metadata: of the call.
        parses_reasoning: see `ServedModel`.
    """

    def __init__(
        self,
        runner: SchedulerRunner,
        updater: TaskUpdater,
        registry: EngineRegistry,
        sample: RemoteEngine,
        metadata: CallMetadata,
        *,
        parses_reasoning: bool = True,
    ) -> None:
        self.runner = runner
        self.updater = updater
        self.info = sample.info
        self.tokenizer = sample.tokenizer
        self.metadata = metadata
        self.parses_reasoning = parses_reasoning
        self._registry = registry

    def place(self, request: GenerationRequest) -> EnginePlacement:
        return EnginePlacement(self, request)

    async def _submit(self, request: GenerationRequest) -> PlacementRequest:
        prefix = await prefix_of(request, self.info)
        # It may have been some time since the call began.
        self.metadata = self.updater.now(self.metadata)
        prefers = self._engine_named(self.metadata.prefers)

        def make(task_id: int) -> Task:
            return task_of(
                task_id, request, self.metadata, info=self.info, prefix=prefix, prefers=prefers
            )

        placement = self.runner.submit(make)
        self.updater.submitted(self.metadata, placement)
        return placement

    def _engine(self, place: Place) -> RemoteEngine:
        engine = self._registry.get(place.engine_id)
        if engine is None:
            raise EngineLostError("The engine that was to run this call has just left.")
        return engine

    def _engine_named(self, name: str | None) -> str | None:
        if name is None:
            return None
        model = self.info.model
        found = (e.id for e in self._registry.engines_for(model) if name in (e.name, e.id))
        return next(found, None)


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


async def prefix_of(request: GenerationRequest, info: EngineInfo) -> tuple[int, ...]:
    """Hashes of the blocks of a call's first prompt, under which engines know them."""
    if not info.block_size:
        return ()
    tokens = request.prompts[0].token_ids
    if len(tokens) <= _INLINE_TOKENS:
        return prompt_hashes(tokens, info.block_size, request.salt)
    return await asyncio.to_thread(prompt_hashes, tokens, info.block_size, request.salt)


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
    template = metadata.template
    if not template and prefix:
        template = f"{prefix[min(_TEMPLATE_BLOCKS, len(prefix)) - 1]:016x}"
    return Task(
        id=task_id,
        model=info.model,
        tenant=metadata.tenant,
        application=metadata.application or f"call-{task_id}",
        prompt_tokens=prompt_tokens,
        # 0 would mean that no caller waits for it.
        max_tokens=max(1, request.sampling.max_tokens),
        prefix=prefix,
        template=template,
        objective=metadata.objective,
        groups=metadata.groups,
        # The API's priority is larger for earlier, as OpenAI's peers have it.
        priority=-metadata.priority,
        successors=metadata.successors,
        num_sequences=sequences,
        bound_to=bound_to,
        prefers=prefers,
    )


def capacity_tokens(info: EngineInfo) -> int:
    """Tokens of KV that fit on an engine, 0 where unknown."""
    paged = info.num_blocks * info.block_size
    return paged or _UNPAGED_CONTEXTS * info.max_context_tokens


@dataclass(slots=True)
class _Known:
    """A task, and what the scheduler knows of its call."""

    request: PlacementRequest
    metadata: CallMetadata


class TaskUpdater:
    """The tasks of sessions' calls that have not ended. Used in the event loop's thread only.

    Args:
        runner: the scheduler.
        current_metadata: gives what is known of a call now.
    """

    def __init__(
        self, runner: SchedulerRunner, current_metadata: Callable[[CallMetadata], CallMetadata]
    ) -> None:
        self._runner = runner
        self._current_metadata = current_metadata
        #: By call; its tries are one after another, so that the last one counts.
        self._known: dict[str, _Known] = {}

    def __len__(self) -> int:
        """Calls whose tasks have not ended."""
        return len(self._known)

    def now(self, metadata: CallMetadata) -> CallMetadata:
        """What is known of the call by now."""
        return self._current_metadata(metadata) if metadata.call else metadata

    def submitted(self, metadata: CallMetadata, request: PlacementRequest) -> None:
        """The scheduler has this task, and knows so much of it."""
        if metadata.call:
            self._known[metadata.call] = _Known(request, metadata)

    def ended(self, metadata: CallMetadata, request: PlacementRequest) -> None:
        """The task has ended."""
        known = self._known.get(metadata.call)
        if known is not None and known.request is request:
            del self._known[metadata.call]

    def changed(self, call_id: str) -> None:
        """What is known of a call has changed; notify the scheduler of the difference."""
        known = self._known.get(call_id)
        if known is None:
            return
        before, known.metadata = known.metadata, self._current_metadata(known.metadata)
        event = difference(known.request.task.id, before, known.metadata)
        if event is not None:
            self._runner.notify(event)


def difference(task_id: int, before: CallMetadata, after: CallMetadata) -> TaskUpdated | None:
    """The update that the scheduler needs, or None."""
    event = TaskUpdated(
        task_id,
        objective=None if before.objective == after.objective else after.objective,
        groups=None if before.groups == after.groups else after.groups,
        successors=None if before.successors == after.successors else after.successors,
    )
    return None if event == TaskUpdated(task_id) else event
