"""A receiver of OTLP over HTTP, which keeps the spans that are exported to it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

trace_service = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    reason="pip install 'parrot-gateway[tracing]'",
)


@dataclass
class Span:
    """One received span."""

    name: str
    trace: str
    id: str
    parent: str
    begin: int
    end: int
    error: str
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    #: Span id, kind of edge.
    links: list[tuple[str, str]]


class Receiver:
    """An HTTP server that decodes what is exported to it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.take(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing is printed."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, name="receiver")

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def take(self, body: bytes) -> None:
        for group in trace_service.ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = _plain(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [_span(each) for each in scope.spans]


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(each) for each in found.values] if kind == "array_value" else found


def _span(span: Any) -> Span:
    return Span(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.message if span.status.code == 2 else "",
        _plain(span.attributes),
        [(each.name, each.time_unix_nano, _plain(each.attributes)) for each in span.events],
        [(each.span_id.hex(), _plain(each.attributes)["parrot.link.kind"]) for each in span.links],
    )
