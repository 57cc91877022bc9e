"""Placement of calls on engines: submits tasks, waits for placements, reports progress."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from parrot_engine.protocol import EngineInfo, Retention
from parrot_scheduler.actions import Place
from parrot_scheduler.events import ApplicationFinished
from parrot_scheduler.task import OBJECTIVE_KINDS, Task

from parrot_gateway.engines.registry import EngineRegistry
from parrot_gateway.engines.remote import RemoteEngine
from parrot_gateway.exceptions import EngineLostError
from parrot_gateway.generation.placement import CallMetadata
from parrot_gateway.generation.request import GenerationRequest
from parrot_gateway.scheduling.runner import PlacementRequest, SchedulerRunner
from parrot_gateway.scheduling.tasks import TaskUpdater, prefix_of, task_of

if TYPE_CHECKING:
    from parrot_engine.text import Tokenizer

logger = logging.getLogger(__name__)


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
        self._asked_at = time.perf_counter()
        self._submitted: PlacementRequest | None = None
        self._succeeded = False

    async def engine(self) -> RemoteEngine:
        """See `Placement`."""
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
        self.queued_s = time.perf_counter() - self._asked_at
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
        """See `Placement`."""
        if self._submitted is not None:
            self._submitted.progress(filled=filled, cached=cached, generated=generated)

    def succeed(self) -> None:
        """See `Placement`."""
        self._succeeded = True

    def close(self) -> None:
        """See `Placement`."""
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
    """

    def __init__(
        self,
        runner: SchedulerRunner,
        updater: TaskUpdater,
        registry: EngineRegistry,
        sample: RemoteEngine,
        metadata: CallMetadata,
    ) -> None:
        self.runner = runner
        self.updater = updater
        self._registry = registry
        self._sample = sample
        self.metadata = metadata

    @property
    def info(self) -> EngineInfo:
        """See `Placer`."""
        return self._sample.info

    @property
    def tokenizer(self) -> Tokenizer:
        """See `Placer`."""
        return self._sample.tokenizer

    def place(self, request: GenerationRequest) -> EnginePlacement:
        """See `Placer`."""
        return EnginePlacement(self, request)

    async def _submit(self, request: GenerationRequest) -> PlacementRequest:
        prefix = await prefix_of(request, self._sample.info)
        # It may have been some time since the call began.
        self.metadata = self.updater.now(self.metadata)
        prefers = self._engine_named(self.metadata.prefers)

        def make(task_id: int) -> Task:
            return task_of(
                task_id,
                request,
                self.metadata,
                info=self._sample.info,
                prefix=prefix,
                prefers=prefers,
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
        model = self._sample.info.model
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
