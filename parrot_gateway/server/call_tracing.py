"""Makes the tracers of a gateway, and collects a call's facts for its span."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from parrot_gateway.exceptions import LinkingBehindError, SessionNotFoundError
from parrot_gateway.extras import advice_on
from parrot_gateway.linking.service import LinkingService
from parrot_gateway.routing.explanations import Explanations
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.settings.config_file import ConfigError
from parrot_gateway.settings.model import TelemetrySettings
from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.telemetry.span_fields import CallFacts, Source

if TYPE_CHECKING:
    from parrot_gateway.telemetry.tracing import CallTracer, StepTracer


class CallFactsReader:
    """Collects the facts that the gateway's parts know about an ended call.

    Args:
        semantic: knows declared sessions and their edges.
        linking: knows inferred ones.
        explanations: reasons for calls' placements, if they are kept.
    """

    def __init__(
        self, semantic: SemanticService, linking: LinkingService, explanations: Explanations | None
    ) -> None:
        self._semantic = semantic
        self._linking = linking
        self._explanations = explanations

    async def read(self, record: CallRecord) -> CallFacts:
        """Read the facts that the parts know now."""
        explanation = None
        if self._explanations is not None:
            found = self._explanations.of(record.tenant, record.call_id)
            explanation = None if found is None else str(found["text"])
        id_, name, is_inferred = record.session, None, False
        sources: list[Source] = []
        if id_ is not None:
            # The session may have been closed meanwhile.
            with suppress(SessionNotFoundError):
                session = self._semantic.sessions.find(record.tenant, id_)
                name = session.name
                if record.call_id in session.graph:
                    nodes = session.graph.producers(record.call_id)
                    sources = [Source(node.id, "input", 1.0) for node in nodes]
        linked = None
        with suppress(LinkingBehindError):
            linked = await self._linking.ask(record.tenant, "call", record.call_id)
        if linked is not None:
            if id_ is None:
                id_, is_inferred = linked["session"], linked["inferred"]
            declared = {each.call for each in sources}
            sources += [
                Source(each["from"], each["kind"], each["confidence"])
                for each in linked["links"]
                if each["from"] not in declared
            ]
        return CallFacts(id_, name, is_inferred, sources, explanation)


class Tracers(NamedTuple):
    """Exporters of traces."""

    calls: CallTracer
    steps: StepTracer


def create_tracers(settings: TelemetrySettings, facts: CallFactsReader) -> Tracers | None:
    """Make the exporters of calls' and engines' traces; None if the settings name no receiver.

    Raises:
        ConfigError: the required libraries are not installed.
    """
    if settings.traces_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        from parrot_gateway.telemetry.span_writer import SpanWriter
        from parrot_gateway.telemetry.tracing import CallTracer, StepTracer
    except ImportError as error:
        raise ConfigError(
            f"telemetry.traces_endpoint: {error.name} is not installed; {advice_on('tracing')}"
        ) from None
    exporter = OTLPSpanExporter(endpoint=settings.traces_endpoint)
    # A character takes about two bytes if it has to be escaped.
    span_bytes = 2 * settings.max_content_characters if settings.traces_content else 1024
    writer = SpanWriter(settings.traces_service_name, exporter, span_bytes)
    return Tracers(
        CallTracer(settings, facts.read, writer), StepTracer(writer, settings.traces_sample_ratio)
    )
