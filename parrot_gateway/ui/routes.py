"""`/ui/api`: what the live page shows, as JSON and as server-sent events.

The admin key opens these routes if one is set, otherwise the key of calls. They show names, times
and sizes; two of them show text of prompts and answers, as far as it is kept for other reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from parrot_gateway.exceptions import (
    AuthenticationError,
    ForbiddenError,
    LinkingBehindError,
    NotFoundError,
)
from parrot_gateway.http.dispatch import KeyCheck
from parrot_gateway.http.exchange import EVENT_STREAM, Exchange, Headers, call_id_of_request
from parrot_gateway.http.route_table import Query, RouteTable, route
from parrot_gateway.linking.service import LinkingService
from parrot_gateway.routing.explanations import Explanations
from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.ui.call_text import CallTexts
from parrot_gateway.ui.feed import LiveFeed, Watcher, event
from parrot_gateway.ui.session_graph import state_of

_KEEP_ALIVE = b": keep-alive\n\n"
_PRIVATE: Headers = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]


class LiveRoutes(RouteTable):
    """The routes, and the key check before each.

    Args:
        feed: source of the data.
        linking, explanations: further facts about single calls.
        texts: prompts and answers of calls.
        keys: the operator's keys if there are any, otherwise callers'.
        is_admin: true if they are the operator's.
        keep_alive_s: silence after which a comment is sent.
    """

    def __init__(
        self,
        feed: LiveFeed,
        linking: LinkingService,
        explanations: Explanations | None,
        texts: CallTexts,
        keys: KeyCheck,
        *,
        is_admin: bool,
        keep_alive_s: float,
    ) -> None:
        super().__init__(self, check=self._may_watch)
        self._feed = feed
        self._linking = linking
        self._explanations = explanations
        self._texts = texts
        self._keys = keys
        self._is_admin = is_admin
        self._keep_alive_s = keep_alive_s

    @route("GET", "/ui/api/overview")
    async def overview(self, exchange: Exchange) -> None:
        """Everything that the live page shows, but single graphs."""
        Query(exchange)
        exchange.cancel_on_disconnect()
        async with self._feed.watch():
            await exchange.respond(200, self._feed.overview(), _PRIVATE)

    @route("GET", "/ui/api/events")
    async def events(self, exchange: Exchange) -> None:
        """Follow it as events: an overview, then what changes."""
        Query(exchange)
        exchange.cancel_on_disconnect()
        async with self._feed.watch() as watcher:
            opening = b"event: overview\ndata: "
            await self._stream(exchange, watcher, lambda: opening + self._feed.overview() + b"\n\n")

    @route("GET", "/ui/api/sessions/{id}/events")
    async def session_events(self, exchange: Exchange, session_id: str) -> None:
        """Follow the graph of a session as events: the graph, then what changes."""
        Query(exchange)
        exchange.cancel_on_disconnect()
        async with self._feed.watch_session(session_id) as (watcher, graph):
            await self._stream(exchange, watcher, graph)

    @route("GET", "/ui/api/calls/{id}")
    async def call(self, exchange: Exchange, name: str) -> None:
        """Describe a call: its times, tokens, engine and links."""
        Query(exchange)
        calls = self._feed.calls
        record = calls.find(name)
        call_id = call_id_of_request(name) if record is None else record.call_id
        linked = behind = None
        try:
            linked = await self._linking.ask(
                exchange.tenant if record is None else record.tenant, "call", call_id
            )
        except LinkingBehindError as error:
            behind = error
        if record is None and linked is None:
            raise behind or NotFoundError(
                f"Call '{name[:80]}' is unknown or no longer kept.", code="call_not_found"
            )
        described = _of_linked(linked) if linked else dict(_UNKNOWN)
        if record is not None:
            described |= _of_record(record, calls.is_queued(record), described["session"])
        if self._explanations is not None:
            described["explanation"] = self._explanations.of(
                described["tenant"] or exchange.tenant, described["id"]
            )
        await exchange.respond_json(described)

    @route("GET", "/ui/api/calls/{id}/text")
    async def call_text(self, exchange: Exchange, name: str) -> None:
        """Read what a call said, where that is kept; `session` names that of an older call."""
        session_id = Query(exchange, "session").text("session")
        record = self._feed.calls.find(name)
        found = await self._texts.of_call(name, session_id, record)
        await exchange.respond(200, msgspec.json.encode(found), _PRIVATE)

    @route("GET", "/ui/api/sessions/{id}/variables/{variable}")
    async def variable(self, exchange: Exchange, session_id: str, variable_id: str) -> None:
        """Read the value of a variable of a session."""
        Query(exchange)
        found = self._texts.of_variable(session_id, variable_id)
        await exchange.respond(200, msgspec.json.encode(found), _PRIVATE)

    async def _stream(
        self, exchange: Exchange, watcher: Watcher, everything: Callable[[], bytes]
    ) -> None:
        """Send events until the client or the watcher is gone."""
        headers = [*EVENT_STREAM, (b"x-content-type-options", b"nosniff")]
        if exchange.scope["method"] == "HEAD":
            await exchange.start_stream(200, headers, b"", is_whole=True)
            return
        await exchange.start_stream(200, headers, watcher.begin(everything))
        while not watcher.is_closed:
            data = await watcher.read(self._keep_alive_s)
            if watcher.is_stale:
                data = watcher.begin(everything)
            await exchange.write(data or _KEEP_ALIVE)
        await exchange.end_stream(event("closed", {}))

    def _may_watch(self, exchange: Exchange) -> None:
        headers = exchange.headers
        if not self._keys.required:
            # Requests for images and the like by another server's page have no `Origin`.
            site = headers.get(b"sec-fetch-site", b"none")
            if b"origin" not in headers and site not in (b"same-origin", b"none"):
                raise ForbiddenError(
                    "This route is not for other pages.", code="origin_not_allowed"
                )
            return
        try:
            self._keys.check(headers.get(b"authorization"), headers.get(b"x-api-key"))
        except AuthenticationError as error:
            if not self._is_admin:
                raise
            raise AuthenticationError(
                "The live page takes the admin key (server.admin_key), as 'Authorization: Bearer "
                "KEY'; the key of calls does not open it.",
                code="invalid_admin_key",
            ) from error


#: Fields of a call with the same name in its record.
_RECORDED = (
    "request_id", "tenant", "path", "model", "served_model", "engine", "reason", "tried",
    "error_code", "error_message", "finish_reason", "streamed", "deferred", "prompt_tokens",
    "cached_tokens", "output_tokens",
)  # fmt: skip
#: Fields with the same name in the linking process.
_LINKED = ("id", "request_id", "session", "inferred", "model", "state", "tools", "links")
#: A call about which nothing is known.
_UNKNOWN: dict[str, Any] = dict.fromkeys(
    ("id", "request_id", "session", "inferred", "tenant", "path", "model", "served_model",
     "engine", "reason", "placement", "explanation", "state", "status", "error_code",
     "error_message", "finish_reason", "streamed", "deferred", "prompt_tokens", "cached_tokens",
     "output_tokens")
) | {"object": "call", "times": {}, "tools": [], "links": [], "tried": []}  # fmt: skip


def _of_linked(linked: dict[str, Any]) -> dict[str, Any]:
    return _UNKNOWN | {
        **{name: linked[name] for name in _LINKED},
        "status": linked["error"],
        "times": {"started_at": linked["submitted"]},
    }


def _of_record(record: CallRecord, is_queued: bool, session: str | None) -> dict[str, Any]:
    def since(moment: float | None) -> float | None:
        return None if moment is None else round(moment - record.started, 6)

    return {
        **{name: getattr(record, name) for name in _RECORDED},
        "id": record.call_id,
        "session": record.session or session,
        "inferred": record.session is None and session is not None,
        "placement": record.explanation,
        "state": state_of(record, is_queued),
        "status": record.status or None,
        "times": {
            "started_at": record.started_at,
            "ready_s": since(record.ready),
            "submitted_s": since(record.submitted),
            "queued_s": record.queued_s,
            "placed_s": since(record.placed),
            "first_token_s": since(record.first_token),
            "total_s": since(record.ended),
        },
    }
