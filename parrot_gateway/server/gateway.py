"""The parts of a running gateway and their lifetime, without HTTP.

`Gateway` makes all parts, starts engines and upstream clients, and stops everything again.
`server.app` gives the routes the parts that they need.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parrot_scheduler.events import ApplicationFinished
from parrot_scheduler.scheduler import Scheduler

from parrot_gateway import __version__
from parrot_gateway.api.streams.stream import Streams
from parrot_gateway.backends.own.adapters import AdapterService
from parrot_gateway.backends.own.downloads import Downloads
from parrot_gateway.backends.own.model_manager import ModelManager
from parrot_gateway.backends.own.registry import EngineRegistry
from parrot_gateway.backends.own.standby import Standby
from parrot_gateway.backends.own.supervisor import EngineSupervisor
from parrot_gateway.backends.upstreams.client import Upstream
from parrot_gateway.batches.service import BatchService
from parrot_gateway.calls.metadata import CallMetadata
from parrot_gateway.calls.responses.background import BackgroundTasks
from parrot_gateway.calls.responses.store import ResponseStore
from parrot_gateway.http.dispatch import CallGate
from parrot_gateway.linking.inferred_metadata import InferredMetadata
from parrot_gateway.linking.service import LinkingService
from parrot_gateway.routing.engine_events import EngineEventForwarder
from parrot_gateway.routing.event_log_file import EventLogFile
from parrot_gateway.routing.explanations import Explanations
from parrot_gateway.routing.fleet.fleet import UpstreamFleet
from parrot_gateway.routing.model_directory import ModelDirectory
from parrot_gateway.routing.placer import SchedulerRunner
from parrot_gateway.routing.task_updates import TaskUpdater
from parrot_gateway.routing.upstream_table import AnyUpstream, UpstreamTable
from parrot_gateway.semantic.execution.call_runner import CallRunner
from parrot_gateway.semantic.execution.fill_ahead import FillAhead
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.semantic.session import Session
from parrot_gateway.server.call_tracing import CallFactsReader, create_tracers
from parrot_gateway.settings.config_file import ConfigError
from parrot_gateway.settings.model import (
    EngineLinkSettings,
    SchedulerSettings,
    Settings,
    UpstreamSettings,
    admin_key_of,
    api_key_of,
)
from parrot_gateway.settings.secret_reference import read_secret
from parrot_gateway.telemetry.call_record import CallRecord, CallRecords, WantedContents
from parrot_gateway.telemetry.kept_content import KeptContent
from parrot_gateway.telemetry.metrics.gauges import Parts
from parrot_gateway.telemetry.metrics.page import Metrics
from parrot_gateway.ui.engine_table import EngineTable
from parrot_gateway.ui.feed import LiveFeed
from parrot_gateway.ui.history import CallHistory

logger = logging.getLogger(__name__)


class Gateway:
    """Everything behind the HTTP surface.

    Args:
        settings: as checked by `load_settings`.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.started_at = time.time()
        link = settings.engines
        #: Key of our own engine processes: new at each start, never stored.
        self.own_join_key = secrets.token_urlsafe(32)
        self.remote_join_key = None if link.join_key is None else read_secret(link.join_key)
        self.registry = EngineRegistry(max_engines=link.max_engines)
        self.supervisor = EngineSupervisor(
            settings.models,
            registry=self.registry,
            load_timeout_s=link.load_timeout_s,
            standby=Standby() if _keeps_standby(link) else None,
        )
        self._has_key = api_key_of(settings) is not None
        self._has_admin_key = admin_key_of(settings) is not None
        telemetry = settings.telemetry
        has_traces = telemetry.traces_endpoint is not None
        wanted = None
        if telemetry.keep_content or (has_traces and telemetry.traces_content):
            wanted = WantedContents(telemetry.keep_content, telemetry.content_exclude_tenants)
        self.call_records = CallRecords(
            telemetry.traces_sample_ratio if has_traces else None, wanted
        )
        self.kept_content = KeptContent(telemetry) if telemetry.keep_content else None
        if self.kept_content is not None:
            self.call_records.sinks.append(self.kept_content.ended)
        self.gate = CallGate(settings.server.max_running_calls)
        self.responses = ResponseStore(settings.responses)
        self.background = BackgroundTasks(settings.responses.max_background)
        self.streams = Streams(settings.streams, settings.server.keep_alive_s)
        self.scheduling = _scheduling(settings.scheduler, self.registry, self._is_drained)
        self.engine_events = EngineEventForwarder(self.registry, self.scheduling)
        self.task_updater = TaskUpdater(self.scheduling.notify, self._metadata_now)
        self.upstreams = UpstreamTable(settings.upstreams, self._make_upstream)
        last_used: dict[str, float] = {}
        self.model_manager = ModelManager(
            settings.models,
            link,
            self.registry,
            self.supervisor,
            Downloads(link.max_downloads, link.max_download_bytes, link.download_stall_s),
            last_used=last_used,
            reserved=self._reserved_names,
            waiting=self.scheduling.waiting,
            refuse_waiting=self.scheduling.refuse_waiting,
        )
        self.adapters = AdapterService(
            self.registry,
            {name: item.served_name for item in settings.models for name in item.adapters},
            lambda name: self.models.knows(name),
            link.load_timeout_s,
        )
        self.models = ModelDirectory(
            self.registry,
            self.supervisor,
            self.model_manager,
            last_used,
            self.upstreams,
            settings.aliases,
            self.scheduling,
            self.task_updater,
            self.adapters.base_of,
        )
        self.batches = BatchService(
            settings.batches, self.models, clock=time.time, on_ended=self._application_ended
        )
        self.linking = LinkingService(settings.linking)
        self.inferred = InferredMetadata(
            self.linking, self._application_ended, memory_needed=self.scheduling.memory_needed
        )
        call_timeout_s = settings.server.call_timeout_s
        self.semantic = SemanticService(
            settings.sessions,
            CallRunner(self.models, call_timeout_s, clock=time.time),
            call_timeout_s=call_timeout_s,
            fill_ahead=FillAhead(
                settings.sessions.fill_ahead_tokens, self.models.least_busy_engine
            ),
            on_session_closed=self._session_closed,
            on_call_changed=self.task_updater.changed,
        )
        facts = CallFactsReader(self.semantic, self.linking, self.scheduling.explanations)
        tracers = create_tracers(telemetry, facts)
        self.tracer = None if tracers is None else tracers.calls
        if tracers is not None:
            self.call_records.sinks.append(tracers.calls.ended)
            self.registry.observe(tracers.steps)
        self.metrics = Metrics(
            Parts(
                is_ready=self.is_ready,
                requests=self.gate,
                calls=self.call_records,
                registry=self.registry,
                supervisor=self.supervisor,
                upstreams=self.upstreams,
                scheduling=self.scheduling,
                responses=self.responses,
                semantic=self.semantic.describe,
                batches=self.batches.describe,
                linking=self.linking.describe,
            )
        )
        if settings.telemetry.metrics:
            self.call_records.batch_sinks.append(self.metrics.calls.count)
        self.feed = LiveFeed(
            self.semantic,
            self.linking,
            CallHistory(self.call_records, self._is_queued),
            EngineTable(self.registry, self.supervisor, self.upstreams, self.scheduling),
            self.scheduling.explanations,
            self._overview,
            settings.ui.max_streams,
        )

    def _make_upstream(self, item: UpstreamSettings) -> AnyUpstream:
        if len(item.servers) == 1:
            return Upstream(item, gateway_has_key=self._has_key)
        return UpstreamFleet(
            item, self.scheduling, self.task_updater, gateway_has_key=self._has_key
        )

    def take_settings(self, settings: Settings, upstreams: Mapping[str, AnyUpstream]) -> None:
        """Apply the aliases of new settings, and their prepared upstreams.

        Never waits and never fails.
        """
        self.settings = settings
        self.upstreams.exchange(upstreams, settings.server.call_timeout_s)
        self.models.set_aliases(settings.aliases)

    def _reserved_names(self) -> list[str]:
        """Return the names of upstreams and aliases, which no model may have."""
        reserved = [name for name in self.settings.aliases if "*" not in name]
        for item in self.settings.upstreams:
            reserved += [item.name, *item.servers]
        return reserved

    def _is_drained(self, model: str) -> bool:
        """Return true if the operator has drained all engines of a model, by its scheduler name."""
        upstream = self.upstreams.get(model)
        return model in self.registry.drained or (upstream is not None and upstream.drained)

    def _metadata_now(self, metadata: CallMetadata) -> CallMetadata:
        """Return current metadata of a session's call, or the given metadata once the call has
        ended.
        """
        job = self.semantic.executor.unfinished.find(metadata.call)
        return metadata if job is None else self.semantic.metadata_of(job)

    def _session_closed(self, session: Session) -> None:
        self._application_ended(session.id)
        self.metrics.session_ended(*session.final_shape)

    def _is_queued(self, record: CallRecord) -> bool:
        """Return true if a call waits for an engine of our own."""
        model, registry = record.served_model, self.registry
        return record.placed is None and (
            model in registry.serving
            or model in registry.adapted
            # The model is loading, or all its engines were drained.
            or model in self.supervisor.served
            or model in registry.drained
        )

    def _overview(self) -> dict[str, Any]:
        """Return the state of the whole gateway for the live page."""
        return {
            "version": __version__,
            "uptime_s": round(time.time() - self.started_at, 1),
            "draining": self.gate.is_draining,
            # Without an admin key there are no actions; with one, only its holders see the page.
            "needs_admin_key_for_actions": not self._has_admin_key,
            "calls": {
                "running": self.gate.running,
                "accepted": self.gate.accepted,
                "refused": self.gate.refused,
            },
            "models": [
                *self.models.engine_models(),
                *(name for each in self.upstreams.values() for name in each.models()),
            ],
        }

    def _application_ended(self, application: str) -> None:
        self.scheduling.notify(ApplicationFinished(application))

    async def start(self, join_url: str | None) -> None:
        """Start upstream clients and engine processes; returns before models are loaded.

        Args:
            join_url: URL of this gateway's link for our own engine processes; None if none
                    may be started (no address of our own).
        """
        self.semantic.start()
        await self.linking.start()
        if self.kept_content is not None:
            self.kept_content.start()
        if self.tracer is not None:
            self.tracer.start()
        await self.upstreams.start()
        if join_url is not None:
            await self.supervisor.start(join_url, self.own_join_key)
            self.model_manager.start()

    async def wait_ready(self) -> None:
        """Wait until each configured model is served or has failed, and each upstream has answered
        or run out of time.
        """
        await asyncio.gather(self.supervisor.wait_ready(), self.upstreams.wait_ready())

    def can_serve(self) -> bool:
        """Return true if anything can be served, now or once an upstream or engine appears."""
        if self.upstreams or self.remote_join_key is not None:
            return True
        return len(self.failures()) < len(self.supervisor.models())

    def join_keys(self) -> list[str]:
        """Return the keys with which engines may join."""
        return [self.own_join_key, *([self.remote_join_key] if self.remote_join_key else [])]

    def failures(self) -> dict[str, str]:
        """Return the configured models that cannot be served, with reasons."""
        reasons = {name: self.supervisor.failure(name) for name in self.supervisor.models()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def is_ready(self) -> bool:
        """Return true if calls can be answered: a model is available, and the gateway is neither
        closing nor drained.
        """
        if self.gate.is_draining:
            return False
        return (
            bool(self.registry.serving)
            # The next call loads it.
            or any(self.supervisor.state(name) == "idle" for name in self.supervisor.models())
            or any(each.ready and not each.drained for each in self.upstreams.values())
        )

    async def stop_engines(self) -> None:
        """Stop our own engine processes, and downloads."""
        await self.model_manager.close()
        await self.supervisor.close()

    async def close(self) -> None:
        """End background and deferred calls, stop engine processes and close connections."""
        self.feed.close()
        await self.adapters.close()
        self.streams.close()
        await self.background.close()
        await self.batches.close()
        await self.semantic.close()
        if self.kept_content is not None:
            await self.kept_content.close()
        if self.tracer is not None:
            await self.tracer.close()
        await self.linking.close()
        self.scheduling.close()
        await self.stop_engines()
        await self.upstreams.close()

    async def describe(self) -> dict[str, Any]:
        """Return the state of all parts as plain types, for `/health`."""
        return {
            "uptime_s": round(time.time() - self.started_at, 1),
            "calls": {
                "running": self.gate.running,
                "accepted": self.gate.accepted,
                "refused": self.gate.refused,
            },
            "semantic": self.semantic.describe(),
            "scheduler": self.scheduling.describe(),
            "linking": await self.linking.describe(),
            "responses": self.responses.statistics()._asdict(),
            "streams": self.streams.statistics()._asdict(),
            "batches": self.batches.describe(),
            "models": self.models.engine_models(),
            "engines": [engine.describe() for engine in self.registry.joined.values()],
            "engine_processes": self.supervisor.describe(),
            "upstreams": [upstream.describe() for upstream in self.upstreams.values()],
        }


def _keeps_standby(settings: EngineLinkSettings) -> bool:
    if settings.standby is None:
        return Path("/dev/nvidiactl").exists()
    return settings.standby


def _scheduling(
    settings: SchedulerSettings, registry: EngineRegistry, is_drained: Callable[[str], bool]
) -> SchedulerRunner:
    try:
        config = settings.config
        scheduler = Scheduler(config)
    except ValueError as error:
        raise ConfigError(f"scheduler.{error}") from None
    event_log = None
    if settings.record is not None:
        try:
            event_log = EventLogFile(settings.record, config, settings.record_max_bytes)
        except OSError as error:
            raise ConfigError(f"scheduler.record: {error}") from None

    def drop_kept(engine_id: str, application: str) -> None:
        engine = registry.joined.get(engine_id)
        if engine is not None:
            engine.drop_kept(application)

    def name_of(engine_id: str) -> str:
        engine = registry.joined.get(engine_id)
        return engine_id if engine is None else engine.name

    explanations = None
    if settings.explain_calls:
        explanations = Explanations(name_of, is_drained=is_drained)
    return SchedulerRunner(scheduler, drop_kept, event_log=event_log, explanations=explanations)
