"""`/v1/sessions` and `/v1/calls`: what runs, how it hangs together, and an end to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from parrot_gateway.calls.requests.field_checks import check_choice
from parrot_gateway.exceptions import LinkingBehindError, NotFoundError, SessionNotFoundError
from parrot_gateway.http.exchange import Exchange, call_id_of_request
from parrot_gateway.http.route_table import Query, route
from parrot_gateway.linking.service import LinkingService
from parrot_gateway.linking.session_titles import declared_title
from parrot_gateway.routing.explanations import Explanations
from parrot_gateway.semantic.contexts import NamedContext, find_context, free_context
from parrot_gateway.semantic.drawing import to_json, to_mermaid
from parrot_gateway.semantic.graph.node import CallNode
from parrot_gateway.semantic.graph.snapshot import GraphSnapshot, with_explanations, with_links
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.semantic.session import Session

#: Sessions listed at most, last used first.
MAX_LISTED = 1000

#: By format of a graph, the media type, and what draws it.
_FORMATS: dict[str, tuple[bytes, Callable[[GraphSnapshot], bytes]]] = {
    "json": (b"application/json", lambda graph: msgspec.json.encode(to_json(graph))),
    "mermaid": (b"text/vnd.mermaid; charset=utf-8", lambda graph: to_mermaid(graph).encode()),
}


#: Of a call that the linker has not seen.
_NOT_LINKED: dict[str, Any] = {
    "request_id": None,
    "response_id": None,
    "inferred": False,
    "error": None,
    "tools": [],
    "links": [],
}


@dataclass(frozen=True)
class SessionRoutes:
    service: SemanticService
    linking: LinkingService
    #: Why calls ran where they did, if that is remembered.
    explanations: Explanations | None = None

    @route("GET", "/v1/sessions")
    async def list_all(self, exchange: Exchange) -> None:
        """List sessions, last used first, inferred ones too."""
        Query(exchange)
        sessions = self.service.sessions.of_tenant(exchange.tenant)
        inferred = await self.linking.ask(exchange.tenant, "sessions")
        data = [describe_session(session) for session in sessions[:MAX_LISTED]]
        has_more = len(sessions) > MAX_LISTED
        if inferred is not None:
            data += inferred["data"]
            data.sort(key=lambda each: -float(each["last_used"]))
            has_more = has_more or inferred["has_more"] or len(data) > MAX_LISTED
            del data[MAX_LISTED:]
        await exchange.respond_json({"object": "list", "data": data, "has_more": has_more})

    @route("GET", "/v1/sessions/{id}")
    async def get(self, exchange: Exchange, name: str) -> None:
        """Describe a session, by id or name."""
        try:
            description = describe_session(self._find(exchange, name))
        except SessionNotFoundError:
            description = await self.linking.ask(exchange.tenant, "session", name)
            if description is None:
                raise
        await exchange.respond_json(description)

    @route("DELETE", "/v1/sessions/{id}")
    async def delete(self, exchange: Exchange, name: str) -> None:
        """Cancel the calls of a session and free everything."""
        session = self._find(exchange, name)
        self.service.close_session(session)
        await exchange.respond_json({"id": session.id, "object": "session", "deleted": True})

    @route("GET", "/v1/sessions/{id}/graph")
    async def graph(self, exchange: Exchange, name: str) -> None:
        """Draw the graph of a session as JSON or Mermaid."""
        query = Query(exchange, "format")
        requested = query.text("format") or _accepted(exchange)
        check_choice("format", requested, tuple(_FORMATS))
        media_type, draw = _FORMATS[requested]
        graph = await self._graph(exchange, name)
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
        """Describe a call, its links and why it ran where it did, by its id or that of its request
        or response."""
        tenant = exchange.tenant
        linked, behind = None, None
        try:
            linked = await self.linking.ask(tenant, "call", call_id)
        except LinkingBehindError as error:
            behind = error
        id_ = linked["id"] if linked else call_id_of_request(call_id)
        explanation = self._explanation(tenant, id_)
        try:
            described = _describe_call(self.service.call(tenant, id_))
        except NotFoundError as unknown:
            if linked is None and (behind is not None or explanation is None):
                raise (behind or unknown) from None
            described = {} if linked else {"id": id_, "object": "call"}
        answer = (linked or _NOT_LINKED) | described | {"explanation": explanation}
        await exchange.respond_json(answer)

    @route("GET", "/v1/linking/profiles")
    async def list_profiles(self, exchange: Exchange) -> None:
        """List templates of prompts with what their calls do, those used last first."""
        Query(exchange)
        found = await self.linking.ask(exchange.tenant, "profiles")
        await exchange.respond_json(found or {"object": "list", "data": []})

    @route("DELETE", "/v1/calls/{id}")
    async def cancel_call(self, exchange: Exchange, call_id: str) -> None:
        """Cancel a call; what depends on it fails."""
        tenant = exchange.tenant
        self.service.cancel_call(tenant, call_id)
        await exchange.respond_json(_describe_call(self.service.call(tenant, call_id)))

    def _explanation(self, tenant: str, call_id: str) -> dict[str, Any] | None:
        return None if self.explanations is None else self.explanations.of(tenant, call_id)

    async def _graph(self, exchange: Exchange, name: str) -> GraphSnapshot:
        try:
            session = self._find(exchange, name)
        except SessionNotFoundError:
            linked = await self.linking.ask(exchange.tenant, "graph", name)
            if linked is None or not linked["inferred"]:
                raise
            id_ = linked["session"]
            graph = GraphSnapshot(id_, id_, self.service.clock(), (), (), inferred=True)
        else:
            linked = await self.linking.ask(exchange.tenant, "graph", session.id)
            graph = self.service.snapshot(session)
        if linked is not None:
            graph = with_links(graph, linked["calls"])
        texts = {
            node.id: found["text"]
            for node in graph.nodes
            if (found := self._explanation(exchange.tenant, node.id)) is not None
        }
        return with_explanations(graph, texts)

    def _find(self, exchange: Exchange, name: str) -> Session:
        return self.service.sessions.find(exchange.tenant, name, self.service.clock())


def describe_session(session: Session) -> dict[str, Any]:
    graph = session.graph
    return {
        "id": session.id,
        "object": "session",
        "name": session.name,
        "title": declared_title(session.name),
        "inferred": False,
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
    if b"mermaid" in accept:
        return "mermaid"
    # A client that takes nothing but SVG gets the error that lists the formats, not JSON.
    is_svg_alone = b"image/svg" in accept and b"json" not in accept and b"*/*" not in accept
    return "svg" if is_svg_alone else "json"
