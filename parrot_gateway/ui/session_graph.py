"""The graph of one session as the live page draws it, kept up to date while somebody watches.

A node combines the session's own graph, the linking process and the call's record. It is rebuilt
when one of them has changed, and kept as JSON.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec

from parrot_gateway.exceptions import LinkingBehindError, VariableNotFoundError
from parrot_gateway.linking.process.wire import LinksChanged, session_id_of
from parrot_gateway.linking.service import LinkingService
from parrot_gateway.routing.explanations import Explanations
from parrot_gateway.semantic.graph.node import FINISHED, CallNode, ForeignInput, Node
from parrot_gateway.semantic.graph.snapshot import (
    NodeView,
    VariableView,
    node_to_json,
    variable_to_json,
    view_of,
    view_of_foreign,
    view_of_linked,
    view_of_variable,
)
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.variable import Variable
from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.ui.history import CallHistory

#: Maximum calls shown, the newest ones.
MAX_CALLS = 1000
#: Nodes built in one turn of the event loop.
_AT_ONCE = 50
#: Longest first wait for the linking process.
_FIRST_ASK_S = 2.0
#: A running call is updated after 2 ** this many tokens.
_TOKENS_SHIFT = 5

Live: TypeAlias = Mapping[str, CallRecord]


def epoch_of(record: CallRecord, moment: float | None) -> float | None:
    """Convert a time of a record to seconds since the epoch."""
    return None if moment is None else record.started_at + (moment - record.started)


def state_of(record: CallRecord, is_queued: bool) -> str:
    """Derive a call's state from its record alone."""
    if record.ended is None:
        return "waiting" if is_queued else "running"
    if record.client_left:
        return "cancelled"
    return "failed" if record.error_code is not None or record.status >= 400 else "done"


class SessionGraph:
    """A session's nodes, variables and links, as JSON.

    Args:
        session_id: id of a declared or inferred session.
        tenant: the session's tenant.
        explanations: reasons for calls' placements, if they are kept.
    """

    def __init__(
        self,
        session_id: str,
        tenant: str,
        service: SemanticService,
        linking: LinkingService,
        calls: CallHistory,
        explanations: Explanations | None,
    ) -> None:
        self.id = session_id
        self._tenant = tenant
        self._service = service
        self._linking = linking
        self._calls = calls
        self._explanations = explanations
        self._session = service.sessions.get(session_id)
        self._name = session_id if self._session is None else self._session.name
        #: Origin of all times: the start of the watch.
        self._begin = service.clock()
        #: True if everything must be read again, because the session was merged.
        self.is_outdated = False
        self._clear()

    def _clear(self) -> None:
        self._nodes: dict[str, bytes] = {}
        self._signatures: dict[str, object] = {}
        #: Nodes that may change without an event.
        self._open: dict[str, None] = {}
        self._linked: dict[str, dict[str, Any]] = {}
        #: Numbers of unnamed calls in order of arrival.
        self._numbers: dict[str, int] = {}
        self._counted = 0
        #: Stages by the session's own graph, and with the linking process's edges.
        self._declared_stages: dict[str, int] = {}
        self._stages: dict[str, int] = {}
        self._dirty: dict[str, None] = {}
        #: Calls that turned out to belong to another session.
        self._moved: dict[str, None] = {}
        self._variables: dict[str, bytes] = {}
        self._variable_signatures: dict[str, object] = {}
        #: Variables that are not final, and inputs from other sessions.
        self._open_variables: dict[str, None] = {}
        self._foreign: dict[str, ForeignInput] = {}
        self._links: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._version = -1
        self._pruned = 0

    @property
    def is_closed(self) -> bool:
        """Return true if the session was closed and nothing more will come."""
        return self._session is not None and self._session.is_closed

    async def load(self) -> None:
        """Read everything, again if needed."""
        # A graph already shown may wait for the linking process; a new one may not.
        timeout_s = None if self._nodes else _FIRST_ASK_S
        self._clear()
        self.is_outdated = False
        # The calls arrive as changes before the answer; if it times out, as they change.
        with suppress(LinkingBehindError):
            await self._linking.ask(self._tenant, "watched_calls", self.id, timeout_s)
        begins = [call["submitted"] for call in self._linked.values()]
        if self._session is not None:
            begins += [node.submitted for node in self._session.graph]
        self._begin = min(begins, default=self._begin)
        self.changes(self._calls.live())
        while self._dirty:
            await asyncio.sleep(0)
            self.changes(self._calls.live())

    def take(self, changes: LinksChanged) -> None:
        """Apply findings of the linking process."""
        for summary in changes.sessions:
            if self.id in summary.merged or (summary.id == self.id and summary.merged):
                self.id = summary.id
                self.is_outdated = True
        for call in changes.calls:
            if call["session"] == self.id:
                self._linked[call["id"]] = call
                self._dirty[call["id"]] = None
            elif call["id"] in self._nodes:
                self._moved[call["id"]] = None

    def to_json(self) -> dict[str, Any]:
        """Return everything in the form of `/v1/sessions/{id}/graph`, with more fields per call."""
        now = self._service.clock()
        return {
            "object": "graph",
            "session": {"id": self.id, "name": self._name},
            "duration_s": round(now - self._begin, 6),
            "calls": [msgspec.Raw(node) for node in self._nodes.values()],
            "variables": [msgspec.Raw(variable) for variable in self._variables.values()],
            "links": list(self._links.values()),
            "inferred": self._session is None,
            "calls_not_kept": self._pruned,
            "begin_at": self._begin,
            "now_s": round(now - self._begin, 6),
            "closed": self.is_closed,
        }

    def changes(self, live: Live) -> dict[str, Any] | None:
        """Return the changes since the last time; None if there are none.

        Args:
            live: the running calls, by id.
        """
        found = self._look(live)
        nodes: list[msgspec.Raw] = []
        touched: list[Node] = []
        for call in found[:_AT_ONCE]:
            self._dirty.pop(call, None)
            node = None if self._session is None else self._session.graph.get(call)
            view = self._view(call, node, live)
            if view is not None:
                self._nodes[call] = view
                nodes.append(msgspec.Raw(view))
                if node is not None:
                    touched.append(node)
        self._dirty |= dict.fromkeys(found[_AT_ONCE:])
        gone = self._forget()
        variables = self._changed_variables(touched)
        links = self._new_links(found[:_AT_ONCE])
        if not (nodes or gone or variables or links):
            return None
        now = self._service.clock()
        return {
            "nodes": nodes,
            "variables": variables,
            "links": links,
            "gone": gone,
            "calls_not_kept": self._pruned,
            "taken_at": now,
            "now_s": round(now - self._begin, 6),
        }

    def _look(self, live: Live) -> list[str]:
        """Return the ids of changed calls, in order of arrival."""
        session = self._session
        if session is not None and session.graph.version != self._version:
            self._version = session.graph.version
            stages = session.graph.stages()
            newest = sorted(session.graph, key=lambda node: node.submitted)[-MAX_CALLS:]
            self._pruned = session.graph.num_pruned + len(session.graph) - len(newest)
            for node in newest:
                if self._declared_stages.get(node.id) != stages[node.id]:
                    self._declared_stages[node.id] = stages[node.id]
                    self._dirty[node.id] = None
        elif session is None:
            for call in live:
                if call not in self._signatures and session_id_of(call) == self.id:
                    self._dirty[call] = None
        for call in self._open:
            if self._signature(call, live) != self._signatures.get(call):
                self._dirty[call] = None
        # NOTE: the linking process may report an older call later; numbers and stages follow age.
        return sorted(self._dirty, key=lambda call: self._arrival(call, live))

    def _arrival(self, call: str, live: Live) -> float:
        node = None if self._session is None else self._session.graph.get(call)
        if node is not None:
            return node.submitted
        linked = self._linked.get(call)
        if linked is not None:
            return float(linked["submitted"])
        record = self._record(call, live)
        return math.inf if record is None else record.started_at

    def _record(self, call: str, live: Live) -> CallRecord | None:
        return live.get(call) or self._calls.ended(call)

    def _signature(self, call: str, live: Live) -> object:
        """Return a value that differs when the call has changed."""
        node = None if self._session is None else self._session.graph.get(call)
        record = self._record(call, live)
        return (
            node and (node.state, node.started, node.finished),
            isinstance(node, CallNode)
            and (node.first_token, node.engine, node.tokens >> _TOKENS_SHIFT),
            record
            and (record.placed, record.first_token, record.ended, record.submitted, record.engine),
        )

    def _view(self, call: str, node: Node | None, live: Live) -> bytes | None:
        """Return a call as JSON; None if nothing is known about it any more."""
        record, linked = self._record(call, live), self._linked.get(call)
        if node is not None:
            view = view_of(node, self._declared_stages.get(call, 0))
            if not node.name and record is not None:
                view = replace(view, name=f"{_kind_of(record)} {self._number(call)}")
            if linked is not None:
                view = replace(view, tools=tuple(linked["tools"]))
            if view.state == "waiting" and record is not None and record.submitted is not None:
                # An upstream reports the beginning of a call only with its answer.
                view = _with_record(view, record, self._calls.is_queued(record))
        elif self._session is not None:
            return None
        elif linked is not None:
            view = view_of_linked(linked, self._number(call))
        elif record is not None:
            view = _view_of_record(record, self._number(call))
        else:
            return None
        if node is None and record is not None:
            view = _with_record(view, record, self._calls.is_queued(record))
        if linked is not None:
            view = replace(view, stage=self._linked_stage(view.stage, linked))
        self._stages[call] = view.stage
        explanation = None
        if self._explanations is not None:
            explanation = self._explanations.of(self._tenant, call)
        if explanation is not None:
            view = replace(view, explanation=explanation["text"])
        self._signatures[call] = self._signature(call, live)
        if view.state in FINISHED and (record is None or record.ended is not None):
            self._open.pop(call, None)
        else:
            self._open[call] = None
        plain = node_to_json(view, self._service.clock(), self._begin)
        return msgspec.json.encode(plain | _of_record(record, self._begin))

    def _number(self, call: str) -> int:
        number = self._numbers.get(call)
        if number is None:
            self._counted += 1
            number = self._numbers[call] = self._counted
        return number

    def _linked_stage(self, stage: int, linked: Mapping[str, Any]) -> int:
        sources = (self._stages.get(link["from"], -1) + 1 for link in linked["links"])
        return max(stage, *sources, 0)

    def _forget(self) -> list[str]:
        """Drop the calls that are no longer kept; return their ids."""
        session = self._session
        if session is not None:
            gone = [call for call in self._nodes if call not in session.graph]
        else:
            gone, self._moved = list(self._moved), {}
        excess = len(self._nodes) - len(gone) - MAX_CALLS
        if excess > 0:
            dropped = [call for call in self._nodes if call not in gone][:excess]
            if session is None:
                self._pruned += len(dropped)
            gone += dropped
        if not gone:
            return gone
        for call in gone:
            for kept in (self._nodes, self._signatures, self._open, self._linked, self._numbers,
                         self._stages, self._declared_stages):  # fmt: skip
                kept.pop(call, None)
        nodes = self._nodes
        self._links = {
            key: link for key, link in self._links.items() if key[0] in nodes and key[1] in nodes
        }
        if session is not None:
            self._forget_variables(session)
        return gone

    def _forget_variables(self, session: Session) -> None:
        """Drop variables that no shown call names, once there are many."""
        if len(self._variables) <= 2 * MAX_CALLS:
            return
        kept: set[str | None] = set()
        for node in session.graph:
            kept.update(node.inputs, (each.id for each in node.foreign), (node.output,))
        for variable_id in self._variables.keys() - kept:
            self._variables.pop(variable_id)
            self._variable_signatures.pop(variable_id, None)
            self._open_variables.pop(variable_id, None)
            self._foreign.pop(variable_id, None)

    def _new_links(self, calls: Iterable[str]) -> list[dict[str, Any]]:
        new = []
        for call in calls:
            for link in self._linked.get(call, {}).get("links", ()):
                key = link["from"], call, link["kind"]
                if key not in self._links and link["from"] in self._nodes and call in self._nodes:
                    self._links[key] = {**link, "to": call}
                    new.append(self._links[key])
        return new

    def _changed_variables(self, nodes: Iterable[Node]) -> list[msgspec.Raw]:
        """Return the changed variables among those of these nodes and those not final yet."""
        session = self._session
        if session is None:
            return []
        looked_at = dict(self._open_variables)
        for node in nodes:
            looked_at |= dict.fromkeys(node.inputs)
            self._foreign |= {each.id: each for each in node.foreign}
            looked_at |= dict.fromkeys(each.id for each in node.foreign)
            if node.output is not None:
                looked_at[node.output] = None
        changed = []
        for variable_id in looked_at:
            variable, signature = self._look_at(session, variable_id)
            if variable is None or variable.is_final:
                self._open_variables.pop(variable_id, None)
            else:
                self._open_variables[variable_id] = None
            if self._variable_signatures.get(variable_id) != signature:
                self._variable_signatures[variable_id] = signature
                view = self._view_of_variable(session, variable_id, variable)
                self._variables[variable_id] = msgspec.json.encode(variable_to_json(view))
                changed.append(msgspec.Raw(self._variables[variable_id]))
        return changed

    def _look_at(self, session: Session, variable_id: str) -> tuple[Variable | None, object]:
        """Return a variable that the session's nodes name, and a value that differs when it has
        changed.
        """
        variable = session.get(variable_id)
        if variable is None and variable_id in self._foreign:
            with suppress(VariableNotFoundError):
                variable = self._service.sessions.variable(self._tenant, variable_id)
        if variable is None:
            return None, "gone"
        return variable, (
            variable.state, variable.size_bytes, variable.producer, len(variable.consumers)
        )  # fmt: skip

    def _view_of_variable(
        self, session: Session, variable_id: str, variable: Variable | None
    ) -> VariableView:
        foreign = self._foreign.get(variable_id)
        if foreign is not None:
            return view_of_foreign(foreign, variable, list(session.graph))
        if variable is None:
            return VariableView(variable_id, variable_id, "cancelled")
        return view_of_variable(session.graph, variable)


def _kind_of(record: CallRecord) -> str:
    """Return the kind of call for its name, as the linking process does."""
    return "chat" if record.path.endswith("/chat/completions") else record.path.rpartition("/")[2]


def _view_of_record(record: CallRecord, number: int) -> NodeView:
    """Build a node from a call's record alone."""
    return NodeView(
        id=record.call_id,
        name=f"{_kind_of(record)} {number}",
        kind="call",
        state="running",
        model=record.model or "",
        submitted=record.started_at,
    )


def _with_record(view: NodeView, record: CallRecord, is_queued: bool) -> NodeView:
    """Add the run's facts from its record to a call of an inferred session."""
    return replace(
        view,
        state=state_of(record, is_queued),
        started=epoch_of(record, record.placed or (None if is_queued else record.submitted)),
        first_token=epoch_of(record, record.first_token),
        finished=epoch_of(record, record.ended),
        tokens=record.output_tokens or 0,
        engine=record.engine,
        placement=record.explanation or "",
        failure=view.failure if record.error_message is None else record.error_message,
    )


def _of_record(record: CallRecord | None, begin: float) -> dict[str, Any]:
    """Return the fields of a node besides those of `/v1/sessions/{id}/graph`."""
    if record is None:
        return dict.fromkeys(
            ("prompt_tokens", "cached_tokens", "output_tokens", "placed_s", "status",
             "error_code", "streamed")
        )  # fmt: skip
    placed = epoch_of(record, record.placed)
    return {
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "placed_s": None if placed is None else round(placed - begin, 6),
        "status": record.status or None,
        "error_code": record.error_code,
        "streamed": record.streamed,
    }
