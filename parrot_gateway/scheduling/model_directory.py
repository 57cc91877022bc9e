"""Models by name: who serves them, and placements of calls on the engines of one."""

from __future__ import annotations

from collections.abc import Mapping

from parrot_gateway.engines.catalog import Catalog, EngineTarget, Target
from parrot_gateway.engines.registry import EngineRegistry
from parrot_gateway.engines.remote import RemoteEngine
from parrot_gateway.engines.supervisor import EngineSupervisor
from parrot_gateway.engines.upstream import Upstream
from parrot_gateway.exceptions import GatewayError, ModelLoadingError, OverloadedError
from parrot_gateway.generation.placement import CallMetadata, Placer
from parrot_gateway.scheduling.placer import ModelPlacer
from parrot_gateway.scheduling.runner import SchedulerRunner
from parrot_gateway.scheduling.tasks import TaskUpdater


class ModelDirectory:
    """The models of own engines and of upstreams.

    Args:
        registry: the engines that joined.
        supervisor: the engine processes of this gateway, which may still be loading.
        upstreams: by name, in the order of the settings.
        aliases: from the settings.
        scheduler: places calls.
        updater: passes on what becomes known of calls later.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        supervisor: EngineSupervisor,
        upstreams: Mapping[str, Upstream],
        aliases: Mapping[str, str],
        scheduler: SchedulerRunner,
        updater: TaskUpdater,
    ) -> None:
        self.upstreams = upstreams
        self.catalog = Catalog(self.engine_models, upstreams, aliases)
        self._registry = registry
        self._supervisor = supervisor
        self._scheduler = scheduler
        self._updater = updater

    def engine_models(self) -> list[str]:
        """Models of engines that joined, and of own engines that are still loading."""
        joined = [model.id for model in self._registry.models()]
        return [*joined, *(name for name in self._supervisor.models() if name not in joined)]

    def resolve(self, model: str) -> Target:
        """See `Catalog.resolve`."""
        return self.catalog.resolve(model)

    def engines_for(self, model: str) -> list[RemoteEngine]:
        """The engines of a model that have joined."""
        return list(self._registry.engines_for(model))

    def least_busy_engine(self, model: str) -> RemoteEngine | None:
        """The engine where the next call for a model, as callers name it, will probably run; None
        when there is none."""
        try:
            target = self.resolve(model)
        except GatewayError:
            return None
        if not isinstance(target, EngineTarget):
            return None
        engines = self._registry.engines_for(target.model)
        return min(engines, key=lambda each: (each.queued_tokens, each.running), default=None)

    def engine_of(self, model: str) -> RemoteEngine:
        """Any engine of a model, for what all of them have in common.

        Raises:
            ModelLoadingError: no engine of it is ready yet.
            OverloadedError: its engines could not be started.
        """
        engines = self._registry.engines_for(model)
        if not engines:
            if self._supervisor.failure(model) is not None:
                # NOTE: why is the operator's: an engine's last words may be a stack trace.
                raise OverloadedError(
                    f"The engine of model '{model}' could not be started. The operator's log has "
                    "the details, and so has /health.",
                    code="engine_failed",
                    retry_after_s=30.0,
                )
            raise ModelLoadingError(f"The model '{model}' is still being loaded.")
        return engines[0]

    def placer(self, model: str, metadata: CallMetadata) -> Placer:
        """The engines of a model for one call.

        Args:
            model: as engines know it.
            metadata: of the call.

        Raises:
            ModelLoadingError, OverloadedError: as `engine_of`.
        """
        return ModelPlacer(
            self._scheduler, self._updater, self._registry, self.engine_of(model), metadata
        )
