"""`/v1/variables` and `/v1/resolve`: variables read, written and listed by themselves.

A read waits for the value, or streams it as it is written. Who may see a variable is decided by the
session store.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec
from parrot_scheduler.task import LATENCY

from parrot_gateway.api.event_stream import DONE, KEEP_ALIVE, data_event
from parrot_gateway.calls.requests.call import decode
from parrot_gateway.exceptions import (
    DoubleProducerError,
    GatewayError,
    VariableStateError,
    invalid_value,
    missing_parameter,
)
from parrot_gateway.http.exchange import EVENT_STREAM, Exchange
from parrot_gateway.http.route_table import Query, route
from parrot_gateway.semantic.call_spec import parse_objective
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.templates.body_template import BodyTemplate, read_template
from parrot_gateway.semantic.templates.reference import reference_of, variable_id_of
from parrot_gateway.semantic.variable import Variable
from parrot_gateway.settings.model import ServerSettings


class _Creation(msgspec.Struct, forbid_unknown_fields=True):
    session: str | None = None
    name: str | None = None
    value: str | None = None


class _Writing(msgspec.Struct, forbid_unknown_fields=True):
    value: str | None = None


class _Resolution(msgspec.Struct, forbid_unknown_fields=True):
    text: str | None = None
    value: msgspec.Raw = msgspec.Raw(b"")
    timeout: float | None = None


_creation_decoder = msgspec.json.Decoder(_Creation)
_writing_decoder = msgspec.json.Decoder(_Writing)
_resolution_decoder = msgspec.json.Decoder(_Resolution)


@dataclass(frozen=True)
class VariableRoutes:
    service: SemanticService
    server: ServerSettings

    @route("GET", "/v1/variables")
    async def list_all(self, exchange: Exchange) -> None:
        """List the variables of one session, oldest first, without values."""
        query = Query(exchange, "session")
        name = query.text("session")
        if name is None:
            raise missing_parameter("session")
        session = self.service.sessions.find(exchange.tenant, name, self.service.clock())
        data = [describe_variable(variable, with_value=False) for variable in session]
        await exchange.respond_json({"object": "list", "data": data})

    @route("POST", "/v1/variables")
    async def create(self, exchange: Exchange) -> None:
        """Create a variable of the user's, with a value or without."""
        body = decode(await self._body(exchange), _creation_decoder)
        if body.session is None:
            raise missing_parameter("session")
        session = self.service.session(exchange.tenant, body.session)
        variable = _create(session, body.name)
        if body.value is not None:
            try:
                self.service.set_value(variable, body.value)
            except GatewayError:
                # Not one more variable than the client knows of.
                if body.name is None:
                    session.delete(variable.id)
                raise
        await exchange.respond_json(describe_variable(variable), status=201)

    @route("GET", "/v1/variables/{id}")
    async def get(self, exchange: Exchange, source: str) -> None:
        """Wait for the value of a variable, or stream it as it is written."""
        query = Query(exchange, "timeout", "objective")
        objective_text = query.text("objective")
        objective = (
            LATENCY if objective_text is None else parse_objective(objective_text, "objective")
        )
        variable = self._find(exchange, source)
        timeout_s = query.seconds("timeout", self.server.call_timeout_s)
        exchange.cancel_on_disconnect()
        if _wants_events(exchange):
            await self._stream(exchange, variable, timeout_s)
            return
        if timeout_s is None:
            try:
                await self.service.readers.value(variable, objective=objective)
            except GatewayError as error:
                await _respond_failure(exchange, variable, error)
                return
        else:
            await self.service.readers.wait(variable, timeout_s, objective=objective)
            if variable.failure is not None:
                failed = variable.failure.to_error(variable.name)
                await _respond_failure(exchange, variable, failed)
                return
        await exchange.respond_json(describe_variable(variable))

    @route("PUT", "/v1/variables/{id}")
    async def put(self, exchange: Exchange, source: str) -> None:
        """Set the value of a variable, once."""
        body = decode(await self._body(exchange), _writing_decoder)
        if body.value is None:
            raise missing_parameter("value")
        variable = self._find(exchange, source)
        self.service.set_value(variable, body.value)
        await exchange.respond_json(describe_variable(variable))

    @route("DELETE", "/v1/variables/{id}")
    async def delete(self, exchange: Exchange, source: str) -> None:
        """Delete a variable."""
        variable = self._find(exchange, source)
        session = self.service.sessions.owner_of(variable)
        if session is not None:
            session.delete(variable.id)
        await exchange.respond_json({"id": variable.id, "object": "variable", "deleted": True})

    @route("POST", "/v1/resolve")
    async def resolve(self, exchange: Exchange) -> None:
        """Put values in place of references in a text, or in any JSON value."""
        raw_body = await self._body(exchange)
        body = decode(raw_body, _resolution_decoder)
        value = bytes(body.value)
        if (body.text is None) == (not value):
            raise invalid_value(
                "text", "give either 'text' or 'value', in which references are to be replaced."
            )
        is_text = body.text is not None
        raw = msgspec.json.encode(body.text) if is_text else value
        template = await read_template(lambda: BodyTemplate.everywhere(raw), len(raw))
        timeout_s = self.server.call_timeout_s
        if body.timeout is not None:
            if not body.timeout >= 0:
                raise invalid_value("timeout", "expected a time in seconds.")
            timeout_s = min(body.timeout, timeout_s)
        exchange.cancel_on_disconnect()
        rendered = await self.service.resolve(exchange.tenant, template, timeout_s)
        name = b"text" if is_text else b"value"
        await exchange.respond(200, b'{"%s":%s}' % (name, rendered))

    # -- parts ------------------------------------------------------------------------------

    async def _body(self, exchange: Exchange) -> bytes:
        return await exchange.body(self.server.max_body_bytes)

    def _find(self, exchange: Exchange, source: str) -> Variable:
        return self.service.sessions.variable(
            exchange.tenant, variable_id_of(source) or source, self.service.clock(), param="id"
        )

    async def _stream(
        self, exchange: Exchange, variable: Variable, timeout_s: float | None
    ) -> None:
        """Text as it is written, each piece as `{"text": …}`; at the end the variable itself."""
        service, keep_alive_s = self.service, self.server.keep_alive_s
        limit_s = self.server.call_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        seen = 0
        await exchange.start_stream(200, EVENT_STREAM, KEEP_ALIVE)
        while True:
            fresh = variable.text_after(seen)
            if fresh:
                seen += len(fresh)
                await exchange.write(data_event({"text": fresh}))
            if variable.is_final and not variable.text_after(seen):
                break
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            if not await service.readers.wait(variable, min(keep_alive_s, left_s), after=seen):
                await exchange.write(KEEP_ALIVE)
        last: dict[str, Any] = describe_variable(variable, with_value=False)
        if variable.failure is not None:
            last = {"error": variable.failure.to_error(variable.name).to_dict(), "variable": last}
        await exchange.end_stream(data_event(last) + DONE)


def describe_variable(variable: Variable, *, with_value: bool = True) -> dict[str, Any]:
    described: dict[str, Any] = {
        "id": variable.id,
        "object": "variable",
        "name": variable.name,
        "reference": reference_of(variable.id),
        "session": variable.session_id,
        "state": variable.state,
        "producer": variable.producer,
        "size_bytes": variable.size_bytes,
        "failure": None if variable.failure is None else variable.failure.to_dict(),
    }
    if with_value:
        described["value"] = variable.value
    return described


def _create(session: Session, name: str | None) -> Variable:
    """A new variable, or one that calls only read so far.

    Raises:
        DoubleProducerError, VariableStateError: it has a producer, or a value.
    """
    if name is None:
        return session.anonymous_variable("variable")
    variable = session.variable(name, "name")
    if variable.producer is not None:
        raise DoubleProducerError(variable.name, f"call '{variable.producer}'", param="name")
    if variable.is_final:
        raise VariableStateError(variable.name, "be created again", variable.story)
    return variable


def _wants_events(exchange: Exchange) -> bool:
    return b"text/event-stream" in (exchange.headers.get(b"accept") or b"").lower()


async def _respond_failure(exchange: Exchange, variable: Variable, error: GatewayError) -> None:
    """An ordinary error, and what is known of the variable."""
    body = {"error": error.to_dict(), "variable": describe_variable(variable)}
    await exchange.respond(error.status, msgspec.json.encode(body), error.headers())
