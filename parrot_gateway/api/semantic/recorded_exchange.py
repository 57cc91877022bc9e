"""Records ordinary calls in the sessions that they name by headers or fields of other systems.

Only looks: the request is not changed, and nothing of it is decoded that routing did not decode.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass

from parrot_gateway.api.semantic.identity import SessionIdentity
from parrot_gateway.calls.requests.call import IdentityFields
from parrot_gateway.http.exchange import ClientDisconnected, Exchange, Headers
from parrot_gateway.semantic.recorded_calls import RecordedCall
from parrot_gateway.semantic.service import SemanticService

#: The routes besides chat and completions whose calls are recorded, and what they are called.
RECORDED_ROUTES: Mapping[str, str] = {"/v1/responses": "responses", "/v1/messages": "messages"}

#: Longest beginning of an answer that is searched for its id.
_MAX_SEARCHED = 4096
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')


class RecordedExchange:
    """One recorded call on its client's exchange; entered while it is answered.

    Args:
        exchange: not answered yet; its answer gets headers for session and call.
        call: what observes the answer.
        service: the sessions.
    """

    __slots__ = ("_service", "call", "outlives_exchange")

    def __init__(self, exchange: Exchange, call: RecordedCall, service: SemanticService) -> None:
        self.call = call
        #: Somebody else ends the call, after its client was answered.
        self.outlives_exchange = False
        self._service = service
        exchange.on_headers(self._add_headers)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            if not self.outlives_exchange:
                self.call.finish()
        elif isinstance(error, ClientDisconnected):
            self.call.failed(asyncio.CancelledError())
        else:
            self.call.failed(error)

    def read_first(self, data: bytes) -> None:
        """Read the id of a response from the beginning of an upstream's answer: a later call that
        names it as `previous_response_id` belongs to the same session."""
        found = _RESPONSE_ID.search(data, 0, _MAX_SEARCHED)
        if found is not None:
            self.answered_as(found[1].decode())

    def answered_as(self, response_id: str) -> None:
        """The answer is a response of that id."""
        alias = f"previous_response_id:{response_id}"
        self._service.sessions.add_alias(self.call.session, alias)

    def _add_headers(self, headers: Headers) -> None:
        headers.append((b"x-parrot-session", self.call.session.id.encode()))
        headers.append((b"x-parrot-call", self.call.node.id.encode()))


@dataclass(frozen=True)
class RecordedExchanges:
    """Records calls, each with its client's exchange."""

    #: Finds the session of a call.
    identity: SessionIdentity
    service: SemanticService

    def begin(
        self, exchange: Exchange, name: str, model: str, body: IdentityFields
    ) -> RecordedExchange | None:
        """Record a call; None where it names no session, or there is no room for one.

        Args:
            name: of the call, in pictures.
            model: as the request names it.
            body: of the request.
        """
        if not self.identity:
            return None
        found = self.identity.find(exchange.scope["headers"], body)
        if found is None:
            return None
        call = self.service.recorded_calls.begin(exchange.tenant, found.name, name, model)
        if call is None:
            return None
        exchange.record.session, exchange.record.call_id = call.session.id, call.node.id
        return RecordedExchange(exchange, call, self.service)
