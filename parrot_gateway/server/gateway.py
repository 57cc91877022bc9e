"""The parts of a running gateway and their lifetime. No HTTP in here.

`Gateway` starts engines and upstream clients, resolves models, places calls and stops everything
again. The API layer holds one and asks it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from parrot_scheduler.events import ApplicationFinished
from parrot_scheduler.scheduler import Scheduler

from parrot_gateway.engines.catalog import Catalog, Target
from parrot_gateway.engines.registry import EngineRegistry
from parrot_gateway.engines.remote import RemoteEngine
from parrot_gateway.engines.supervisor import EngineSupervisor
from parrot_gateway.engines.upstream import Upstream
from parrot_gateway.exceptions import ModelLoadingError, OverloadedError
from parrot_gateway.generation.placement import CallMetadata, Placer
from parrot_gateway.generation.responses.store import ResponseStore
from parrot_gateway.http.admission import CallGate
from parrot_gateway.scheduling.engine_events import EngineEventForwarder
from parrot_gateway.scheduling.placer import ModelPlacer
from parrot_gateway.scheduling.recorder import FileRecorder
from parrot_gateway.scheduling.runner import SchedulerRunner
from parrot_gateway.scheduling.task_updates import TaskUpdater
from parrot_gateway.semantic.execution.call_metadata import metadata_of
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.settings.config_file import ConfigError
from parrot_gateway.settings.model import SchedulerSettings, Settings, api_key_of
from parrot_gateway.settings.secret_reference import read_secret

logger = logging.getLogger(__name__)

#: How long the start waits for an upstream that does not answer.
UPSTREAM_PATIENCE_S = 3.0


class Gateway:
    """Everything behind the HTTP surface.

    Args:
        settings: as checked by `load_settings`.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.started_at = time.time()
        link = settings.engines
        #: Key of our own engine processes: made anew at each start, never stored.
        self.own_join_key = secrets.token_urlsafe(32)
        self.remote_join_key = None if link.join_key is None else read_secret(link.join_key)
        self.registry = EngineRegistry(max_engines=link.max_engines)
        self.supervisor = EngineSupervisor(
            settings.models, registry=self.registry, load_timeout_s=link.load_timeout_s
        )
        has_key = api_key_of(settings) is not None
        self.upstreams = {
            item.name: Upstream(item, gateway_has_key=has_key) for item in settings.upstreams
        }
        self.catalog = Catalog(self.engine_models, self.upstreams, settings.aliases)
        self.gate = CallGate(settings.server.max_running_calls)
        self.semantic = SemanticService(
            settings.sessions, call_timeout_s=settings.server.call_timeout_s
        )
        self.responses = ResponseStore(settings.responses)
        self.scheduling = _scheduling(settings.scheduler)
        self.engine_events = EngineEventForwarder(self.registry, self.scheduling)
        self.task_updater = TaskUpdater(self.scheduling, self._metadata_now)
        self.semantic.on_session_closed = self._session_closed
        self.semantic.on_call_changed = self.task_updater.changed

    def engine_models(self) -> list[str]:
        """Models of engines that joined, and of our own engines that are still loading."""
        joined = [model.id for model in self.registry.models()]
        return [*joined, *(name for name in self.supervisor.models() if name not in joined)]

    def resolve(self, model: str) -> Target:
        """See `Catalog.resolve`."""
        return self.catalog.resolve(model)

    def placer(
        self,
        model: str,
        metadata: CallMetadata,
        on_placed: Callable[[RemoteEngine, float, str], None],
    ) -> Placer:
        """The engines of a model for one call, which then asks for a place on one of them.

        Args:
            model: as engines know it.
            metadata: of the call.
            on_placed: told of the engine that it gets, of the seconds that it waited, and why it is
                this one.

        Raises:
            ModelLoadingError, OverloadedError: as `engine_of`.
        """
        engine = self.engine_of(model)
        return ModelPlacer(
            self.scheduling, self.task_updater, self.registry, engine, metadata, on_placed
        )

    def engine_of(self, model: str) -> RemoteEngine:
        """Any engine of a model, for what all of them have in common.

        Raises:
            ModelLoadingError: no engine of it is ready yet.
            OverloadedError: its engines could not be started.
        """
        engines = self.registry.engines_for(model)
        if not engines:
            if self.supervisor.failure(model) is not None:
                # NOTE: why is the operator's: an engine's last words may be a stack trace.
                raise OverloadedError(
                    f"The engine of model '{model}' could not be started. The operator's log has "
                    "the details, and so has /health.",
                    code="engine_failed",
                    retry_after_s=30.0,
                )
            raise ModelLoadingError(f"The model '{model}' is still being loaded.")
        return engines[0]

    def _metadata_now(self, metadata: CallMetadata) -> CallMetadata:
        """What is known now of a session's call; what was known before, once it has ended."""
        job = self.semantic.executor.unfinished.find(metadata.call)
        return (
            metadata if job is None else metadata_of(job, self.semantic.objectives, metadata.tenant)
        )

    def _session_closed(self, session_id: str) -> None:
        self.scheduling.notify(ApplicationFinished(session_id))

    async def start(self, join_url: str | None) -> None:
        """Start upstream clients and engine processes; returns before models are loaded.

        Args:
            join_url: where our own engine processes reach this gateway's link; None when none
                may be started (no address of our own).
        """
        self.semantic.start()
        for upstream in self.upstreams.values():
            await upstream.start()
        if join_url is not None:
            await self.supervisor.start(join_url, self.own_join_key)

    async def wait_ready(self) -> None:
        """Return once each configured model is served or has failed, and each upstream has
        answered or had `UPSTREAM_PATIENCE_S` to do so."""
        await asyncio.gather(
            self.supervisor.wait_ready(),
            *(_wait_briefly(upstream) for upstream in self.upstreams.values()),
        )

    def can_serve(self) -> bool:
        """Whether there is anything to serve, now or once an upstream or an engine turns up."""
        if self.upstreams or self.remote_join_key is not None:
            return True
        return len(self.failures()) < len(self.supervisor.models())

    def join_keys(self) -> list[str]:
        """Keys with which engines may join."""
        return [self.own_join_key, *([self.remote_join_key] if self.remote_join_key else [])]

    def failures(self) -> dict[str, str]:
        """Configured models that cannot be served, with the reason."""
        reasons = {name: self.supervisor.failure(name) for name in self.supervisor.models()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def is_ready(self) -> bool:
        """Whether calls can be answered: some model is there and the gateway is not closing."""
        if self.gate.draining:
            return False
        return bool(self.registry.models()) or any(
            upstream.ready for upstream in self.upstreams.values()
        )

    async def stop_engines(self) -> None:
        """Stop engine processes of our own."""
        await self.supervisor.close()

    async def close(self) -> None:
        """End deferred calls, stop engine processes and close connections."""
        await self.semantic.close()
        self.scheduling.close()
        await self.stop_engines()
        for upstream in self.upstreams.values():
            await upstream.close()

    def describe(self) -> dict[str, Any]:
        """The state of all parts as plain types, for `/health`."""
        return {
            "uptime_s": round(time.time() - self.started_at, 1),
            "calls": {
                "running": self.gate.running,
                "accepted": self.gate.accepted,
                "refused": self.gate.refused,
            },
            "semantic": self.semantic.describe(),
            "scheduler": self.scheduling.describe(),
            "responses": self.responses.statistics()._asdict(),
            "models": self.engine_models(),
            "engines": [engine.describe() for engine in self.registry.engines()],
            "engine_processes": self.supervisor.describe(),
            "upstreams": [upstream.describe() for upstream in self.upstreams.values()],
        }


def _scheduling(settings: SchedulerSettings) -> SchedulerRunner:
    recorder = None
    if settings.record is not None:
        try:
            recorder = FileRecorder(settings.record, settings.config, settings.record_max_bytes)
        except OSError as error:
            raise ConfigError(f"scheduler.record: {error}") from None
    return SchedulerRunner(Scheduler(settings.config), recorder=recorder)


async def _wait_briefly(upstream: Upstream) -> None:
    try:
        async with asyncio.timeout(UPSTREAM_PATIENCE_S):
            await upstream.wait_ready()
    except TimeoutError:
        logger.warning(
            "upstream '%s' has not told its models yet; its calls will be tried", upstream.name
        )
