"""`/v1/sessions` and `/v1/calls`: what runs, how it hangs together, and an end to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from parrot_gateway.generation.requests.validation import check_choice
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.http.route_table import Query, route
from parrot_gateway.semantic.contexts import NamedContext, find_context, free_context
from parrot_gateway.semantic.drawing import to_json, to_mermaid, to_svg
from parrot_gateway.semantic.graph.node import CallNode
from parrot_gateway.semantic.graph.snapshot import GraphSnapshot
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.semantic.session import Session

#: Sessions listed at most, last used first.
MAX_LISTED = 1000

#: By format of a graph, the media type, and what draws it.
_FORMATS: dict[str, tuple[bytes, Callable[[GraphSnapshot], bytes]]] = {
    "json": (b"application/json", lambda graph: msgspec.json.encode(to_json(graph))),
    "mermaid": (b"text/vnd.mermaid; charset=utf-8", lambda graph: to_mermaid(graph).encode()),
    "svg": (b"image/svg+xml", lambda graph: to_svg(graph).encode()),
}


@dataclass(frozen=True)
class SessionRoutes:
    service: SemanticService

    @route("GET", "/v1/sessions")
    async def list_all(self, exchange: Exchange) -> None:
        """List sessions, last used first."""
        Query(exchange)
        sessions = self.service.sessions.of_tenant(exchange.tenant)
        data = [describe_session(session) for session in sessions[:MAX_LISTED]]
        has_more = len(sessions) > MAX_LISTED
        await exchange.respond_json({"object": "list", "data": data, "has_more": has_more})

    @route("GET", "/v1/sessions/{id}")
    async def get(self, exchange: Exchange, name: str) -> None:
        """Describe a session, by id or name."""
        await exchange.respond_json(describe_session(self._find(exchange, name)))

    @route("DELETE", "/v1/sessions/{id}")
    async def delete(self, exchange: Exchange, name: str) -> None:
        """Cancel the calls of a session and free everything."""
        session = self._find(exchange, name)
        self.service.close_session(session)
        await exchange.respond_json({"id": session.id, "object": "session", "deleted": True})

    @route("GET", "/v1/sessions/{id}/graph")
    async def graph(self, exchange: Exchange, name: str) -> None:
        """Draw the graph of a session as JSON, Mermaid or SVG."""
        query = Query(exchange, "format")
        requested = query.text("format") or _accepted(exchange)
        check_choice("format", requested, tuple(_FORMATS))
        media_type, draw = _FORMATS[requested]
        graph = self.service.snapshot(self._find(exchange, name))
        await exchange.respond(200, draw(graph), [(b"content-type", media_type)])

    @route("GET", "/v1/sessions/{id}/contexts")
    async def list_contexts(self, exchange: Exchange, name: str) -> None:
        """List the named contexts of a session, with kinds and sizes."""
        Query(exchange)
        session = self._find(exchange, name)
        found = (find_context(session, each) for each in sorted(session.contexts))
        data = [_describe_context(context) for context in found]
        await exchange.respond_json({"object": "list", "data": data, "has_more": False})

    @route("GET", "/v1/sessions/{id}/contexts/{name}")
    async def get_context(self, exchange: Exchange, name: str, context: str) -> None:
        """Describe a named context, with what it holds."""
        Query(exchange)
        found = find_context(self._find(exchange, name), context)
        contents: dict[str, Any] = {}
        if found.contents is not None and found.contents.kind == "chat":
            contents["messages"] = [msgspec.Raw(raw) for raw in found.contents.messages]
        elif found.contents is not None:
            contents["text"] = found.contents.text
        await exchange.respond_json(_describe_context(found) | contents)

    @route("DELETE", "/v1/sessions/{id}/contexts/{name}")
    async def delete_context(self, exchange: Exchange, name: str, context: str) -> None:
        """Free a named context."""
        Query(exchange)
        freed = free_context(self._find(exchange, name), context)
        await exchange.respond_json({"name": freed.name, "object": "context", "deleted": True})

    @route("GET", "/v1/calls/{id}")
    async def get_call(self, exchange: Exchange, call_id: str) -> None:
        """Describe a call."""
        await exchange.respond_json(_describe_call(self.service.call(exchange.tenant, call_id)))

    @route("DELETE", "/v1/calls/{id}")
    async def cancel_call(self, exchange: Exchange, call_id: str) -> None:
        """Cancel a call; what depends on it fails."""
        tenant = exchange.tenant
        self.service.cancel_call(tenant, call_id)
        await exchange.respond_json(_describe_call(self.service.call(tenant, call_id)))

    def _find(self, exchange: Exchange, name: str) -> Session:
        return self.service.sessions.find(exchange.tenant, name, self.service.clock())


def describe_session(session: Session) -> dict[str, Any]:
    graph = session.graph
    return {
        "id": session.id,
        "object": "session",
        "name": session.name,
        "created": session.created,
        "last_used": session.last_used,
        "variables": session.num_variables,
        "value_bytes": session.value_bytes,
        "calls": {
            "unfinished": graph.num_unfinished,
            "finished": len(graph) - graph.num_unfinished + graph.num_pruned,
        },
        "contexts": sorted(session.contexts),
    }


def _describe_context(context: NamedContext) -> dict[str, Any]:
    contents = context.contents
    return {
        "name": context.name,
        "object": "context",
        "kind": None if contents is None else contents.kind,
        "bytes": context.size_bytes,
        "busy": not context.is_idle,
    }


def _describe_call(node: CallNode) -> dict[str, Any]:
    return {
        "id": node.id,
        "object": "call",
        "name": node.name,
        "session": node.session_id,
        "model": node.model,
        "state": node.state,
        "inputs": list(dict.fromkeys(node.inputs)),
        "output": node.output,
        "objective": str(node.objective),
        "priority": node.priority,
        "engine": node.engine,
        "placement": node.placement or None,
        "run": node.run,
        "parent": node.parent,
        "group": node.group,
        "tokens": node.tokens,
        "submitted": node.submitted,
        "started": node.started,
        "first_token": node.first_token,
        "finished": node.finished,
        "failure": None if node.failure is None else node.failure.to_dict(),
    }


def _accepted(exchange: Exchange) -> str:
    accept = (exchange.headers.get(b"accept") or b"").lower()
    if b"image/svg" in accept:
        return "svg"
    return "mermaid" if b"mermaid" in accept else "json"
