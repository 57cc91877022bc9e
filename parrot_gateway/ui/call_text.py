"""The text of a call for the live page, from places where it is kept anyway.

These are the latest calls that the operator keeps, stored responses, and the values of the
session's variables. Excluded tenants have no text here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from parrot_gateway.calls.responses.store import ResponseStore, StoredResponse
from parrot_gateway.exceptions import NotFoundError, VariableNotFoundError
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.variable import Variable
from parrot_gateway.settings.model import TelemetrySettings
from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.telemetry.content.content import TEXT_ROUTES, CallContent, ReadContent
from parrot_gateway.telemetry.content.parts import Room
from parrot_gateway.telemetry.kept_content import KeptContent

#: Maximum inputs of a call with displayed values.
_MAX_VARIABLES = 64


class CallTexts:
    """Finds the text of calls and variables.

    Args:
        settings: limits of displayed text, and excluded tenants.
        kept: prompts and answers; None if the operator keeps none.
        service: the sessions and their variables.
        responses: responses stored for their clients.
    """

    def __init__(
        self,
        settings: TelemetrySettings,
        kept: KeptContent | None,
        service: SemanticService,
        responses: ResponseStore,
    ) -> None:
        self._settings = settings
        self._kept = kept
        self._service = service
        self._responses = responses

    async def of_call(
        self, call_id: str, session_id: str | None, record: CallRecord | None
    ) -> dict[str, Any]:
        """Return a call's prompt, answer and request as far as they are kept, or the reason why
        not.

        Args:
            session_id: id of its declared session, if it has no record.
            record: the call's record, if remembered.

        Raises:
            NotFoundError: the call is unknown.
        """
        session = self._session(call_id, session_id, record)
        if record is not None:
            call_id, tenant = record.call_id, record.tenant
        elif session is not None:
            tenant = session.tenant
        else:
            raise NotFoundError(
                f"Call '{call_id[:80]}' is unknown or no longer kept.", code="call_not_found"
            )
        found: dict[str, Any] = {
            "object": "call.text", "id": call_id, "source": None, "why": None, "path": None,
            "request": None, "system_instructions": [], "input_messages": [],
            "output_messages": [], "cut_characters": 0, "variables": [],
        }  # fmt: skip
        if tenant in self._settings.content_exclude_tenants:
            return found | {"why": _EXCLUDED}
        if session is not None:
            found["variables"] = self._variables(call_id, session)
        read = None if self._kept is None else self._kept.find(call_id)
        if read is not None:
            return found | msgspec.structs.asdict(read) | {"source": "kept"}
        stored = self._stored(tenant, record)
        if stored is not None:
            read = await self._of_response(stored)
            return found | msgspec.structs.asdict(read) | {"source": "response", "request": None}
        return found | {"why": self._why(record)}

    def of_variable(self, session_id: str, variable_id: str) -> dict[str, Any]:
        """Return the value of a variable that a session owns or reads.

        Raises:
            VariableNotFoundError: there is none.
        """
        session = self._service.sessions.get(session_id)
        variable = None if session is None else session.get(variable_id)
        if session is not None and variable is None:
            variable = self._service.sessions.variable(session.tenant, variable_id)
        if session is None or variable is None:
            raise VariableNotFoundError(variable_id)
        if session.tenant in self._settings.content_exclude_tenants:
            return _of_variable(variable, None) | {"why": _EXCLUDED}
        return _of_variable(variable, Room(self._settings.max_content_characters)) | {"why": None}

    def _session(
        self, call_id: str, session_id: str | None, record: CallRecord | None
    ) -> Session | None:
        """Return the declared session whose graph contains the call."""
        if record is not None:
            call_id, session_id = record.call_id, record.session
        session = None if session_id is None else self._service.sessions.get(session_id)
        return session if session is not None and call_id in session.graph else None

    def _variables(self, call_id: str, session: Session) -> list[dict[str, Any]]:
        """Return the variables that a declared session's call reads and writes."""
        node = session.graph.get(call_id)
        if node is None:
            return []
        reads = [*node.inputs, *(each.id for each in node.foreign)][:_MAX_VARIABLES]
        writes = [] if node.output is None else [node.output]
        room = Room(self._settings.max_content_characters)
        return [
            {"direction": direction} | _of_variable(variable, room)
            for direction, ids in (("writes", writes), ("reads", reads))
            for variable in self._known(session.tenant, ids)
        ]

    def _known(self, tenant: str, ids: Sequence[str]) -> list[Variable]:
        variables = []
        for each in ids:
            with suppress(VariableNotFoundError):
                variables.append(self._service.sessions.variable(tenant, each))
        return variables

    def _stored(self, tenant: str, record: CallRecord | None) -> StoredResponse | None:
        if record is None or record.response_id is None:
            return None
        return self._responses.peek(tenant, record.response_id)

    async def _of_response(self, stored: StoredResponse) -> ReadContent:
        instructions = msgspec.json.decode(stored.answer).get("instructions")
        given = [item.to_dict() for item in stored.input_items]
        content = CallContent()
        body = msgspec.json.encode({"instructions": instructions, "input": given})
        content.asked("/v1/responses", body)
        content.answered(stored.answer)
        return await content.read(self._settings.max_content_characters)

    def _why(self, record: CallRecord | None) -> str:
        """Explain to the operator why a call has no text."""
        if record is not None and record.path not in TEXT_ROUTES:
            return f"Calls of {record.path} have no text that is kept."
        if record is not None and record.ended is None and self._kept is not None:
            return "It is there when the call has ended."
        if record is not None and record.batch is not None:
            return f"It stands in the files of batch {record.batch}."
        if self._kept is None:
            return (
                "Prompts and answers are not kept. With the setting telemetry.keep_content those "
                "of the latest calls are, in memory."
            )
        return (
            "It is no longer kept: the latest calls needed the room "
            "(setting telemetry.max_content_bytes)."
        )


_EXCLUDED = (
    "No text of this tenant's calls is kept or shown (setting telemetry.content_exclude_tenants)."
)


def _of_variable(variable: Variable, room: Room | None) -> dict[str, Any]:
    """Return a variable with its value, or without it if there is no room."""
    value = variable.text if room is not None else None
    return {
        "id": variable.id,
        "name": variable.name,
        "state": variable.state,
        "value": None if value is None or room is None else room.take(value),
        "characters": None if value is None else len(value),
    }
