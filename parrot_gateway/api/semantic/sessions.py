"""`/v1/sessions` and `/v1/calls`: what runs, how it hangs together, and an end to it."""

from __future__ import annotations

from typing import Any

import msgspec

from parrot_gateway.exceptions import InvalidRequestError
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.http.route_table import Query, RouteTable
from parrot_gateway.semantic.contexts import NamedContext, find_context, free_context
from parrot_gateway.semantic.drawing import to_json, to_mermaid, to_svg
from parrot_gateway.semantic.graph.node import CallNode
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.semantic.session import Session

#: Sessions listed at most, last used first.
MAX_LISTED = 1000

_MEDIA_TYPES = {
    "json": b"application/json",
    "mermaid": b"text/vnd.mermaid; charset=utf-8",
    "svg": b"image/svg+xml",
}


class SessionRoutes:
    """The routes.

    Args:
        service: the sessions.
    """

    def __init__(self, service: SemanticService) -> None:
        self._service = service

    def register(self, table: RouteTable) -> None:
        table.add("GET", "/v1/sessions", self.list_all)
        table.add("GET", "/v1/sessions/{id}", self.get)
        table.add("DELETE", "/v1/sessions/{id}", self.delete)
        table.add("GET", "/v1/sessions/{id}/graph", self.graph)
        table.add("GET", "/v1/sessions/{id}/contexts", self.list_contexts)
        table.add("GET", "/v1/sessions/{id}/contexts/{name}", self.get_context)
        table.add("DELETE", "/v1/sessions/{id}/contexts/{name}", self.delete_context)
        table.add("GET", "/v1/calls/{id}", self.get_call)
        table.add("DELETE", "/v1/calls/{id}", self.cancel_call)

    async def list_all(self, exchange: Exchange) -> None:
        """`GET /v1/sessions`: last used first."""
        Query(exchange)
        sessions = self._service.sessions.of_tenant(exchange.tenant)
        data = [describe_session(session) for session in sessions[:MAX_LISTED]]
        has_more = len(sessions) > MAX_LISTED
        await exchange.respond_json({"object": "list", "data": data, "has_more": has_more})

    async def get(self, exchange: Exchange, name: str) -> None:
        """`GET /v1/sessions/{id}`: by id or name."""
        await exchange.respond_json(describe_session(self._find(exchange, name)))

    async def delete(self, exchange: Exchange, name: str) -> None:
        """`DELETE /v1/sessions/{id}`: cancels its calls and frees everything."""
        session = self._find(exchange, name)
        self._service.close_session(session)
        await exchange.respond_json({"id": session.id, "object": "session", "deleted": True})

    async def graph(self, exchange: Exchange, name: str) -> None:
        """`GET /v1/sessions/{id}/graph`: as JSON, Mermaid or SVG."""
        query = Query(exchange, "format")
        requested = query.text("format") or _accepted(exchange)
        if requested not in _MEDIA_TYPES:
            raise InvalidRequestError(
                f"'format' must be one of {', '.join(_MEDIA_TYPES)}.",
                param="format",
                code="invalid_value",
            )
        snapshot = self._service.snapshot(self._find(exchange, name))
        if requested == "json":
            body = msgspec.json.encode(to_json(snapshot))
        else:
            draw = to_mermaid if requested == "mermaid" else to_svg
            body = draw(snapshot).encode()
        await exchange.respond(200, body, [(b"content-type", _MEDIA_TYPES[requested])])

    async def list_contexts(self, exchange: Exchange, name: str) -> None:
        """`GET /v1/sessions/{id}/contexts`: their names, kinds and sizes."""
        Query(exchange)
        session = self._find(exchange, name)
        found = (find_context(session, each) for each in sorted(session.contexts))
        data = [_describe_context(context) for context in found]
        await exchange.respond_json({"object": "list", "data": data, "has_more": False})

    async def get_context(self, exchange: Exchange, name: str, context: str) -> None:
        """`GET /v1/sessions/{id}/contexts/{name}`: with what it holds."""
        Query(exchange)
        found = find_context(self._find(exchange, name), context)
        contents: dict[str, Any] = {}
        if found.contents is not None and found.contents.kind == "chat":
            contents["messages"] = [msgspec.Raw(raw) for raw in found.contents.messages]
        elif found.contents is not None:
            contents["text"] = found.contents.text
        await exchange.respond_json(_describe_context(found) | contents)

    async def delete_context(self, exchange: Exchange, name: str, context: str) -> None:
        """`DELETE /v1/sessions/{id}/contexts/{name}`: frees it."""
        Query(exchange)
        freed = free_context(self._find(exchange, name), context)
        await exchange.respond_json({"name": freed.name, "object": "context", "deleted": True})

    async def get_call(self, exchange: Exchange, call_id: str) -> None:
        """`GET /v1/calls/{id}`."""
        await exchange.respond_json(_describe_call(self._service.call(exchange.tenant, call_id)))

    async def cancel_call(self, exchange: Exchange, call_id: str) -> None:
        """`DELETE /v1/calls/{id}`: cancels it; what depends on it fails."""
        tenant = exchange.tenant
        self._service.cancel_call(tenant, call_id)
        await exchange.respond_json(_describe_call(self._service.call(tenant, call_id)))

    def _find(self, exchange: Exchange, name: str) -> Session:
        return self._service.sessions.find(exchange.tenant, name, self._service.clock())


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
