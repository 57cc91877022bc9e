"""Ordinary calls that name a session: recorded in its graph as they run, and unchanged otherwise.

Such a call has no variables and no inputs and never waits in the gateway. Its request and answer
are the same as without a session. A call that cannot be recorded (too many sessions or calls) is
counted, and runs all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from parrot_scheduler.task import LATENCY

from parrot_gateway.calls.metadata import CallMetadata
from parrot_gateway.calls.observer import GenerationObserver
from parrot_gateway.calls.usage import Usage
from parrot_gateway.exceptions import GatewayError, SessionFullError
from parrot_gateway.semantic.execution.job import mint_call_id
from parrot_gateway.semantic.graph.node import CallNode
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.sessions import SessionStore
from parrot_gateway.semantic.variable import Failure

#: A model's name is kept with its calls, and some upstreams accept any name, so its length is
#: limited.
MAX_MODEL_CHARACTERS = 1024


class RecordedCallCounts(NamedTuple):
    """Counters since the start."""

    recorded: int
    #: Calls skipped because there was no room in the session, or for a session.
    skipped: int


@dataclass(eq=False)
class RecordedCall(GenerationObserver):
    """One call in its session's graph, from start to end."""

    session: Session
    node: CallNode
    clock: Callable[[], float]
    reads_text: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        tenant = self.session.tenant
        self.metadata = CallMetadata(
            tenant=tenant, application=self.session.id, explained_as=(tenant, self.node.id)
        )

    def started(self, engine: str, queued_s: float, reason: str) -> None:
        self.node.engine, self.node.placement = engine, reason
        if self.node.state == "waiting" and self._is_kept:
            self.session.graph.start(self.node.id, self.clock())

    def first_token(self) -> None:
        self.node.first_token = self.clock()

    def ended(self, usage: Usage | None, finish_reason: str | None = None) -> None:
        if usage is not None:
            self.node.tokens = usage.completion_tokens
        self.finish()

    def failed(self, error: BaseException, usage: Usage | None = None) -> None:
        node = self.node
        if node.is_finished or not self._is_kept:
            return
        now, graph = self.clock(), self.session.graph
        if isinstance(error, GatewayError):
            failure = Failure(error.code or "error", error.message, call_id=node.id)
            graph.finish(node.id, "failed", now, failure)
        elif isinstance(error, asyncio.CancelledError):
            failure = Failure("cancelled", "its client went away", call_id=node.id)
            graph.finish(node.id, "cancelled", now, failure)
        else:
            failure = Failure("server_error", "the gateway failed to run it", call_id=node.id)
            graph.finish(node.id, "failed", now, failure)

    def finish(self) -> None:
        """End the call; ignored if it has failed, or its session was closed."""
        if not self.node.is_finished and self._is_kept:
            self.session.graph.finish(self.node.id, "done", self.clock())

    @property
    def _is_kept(self) -> bool:
        return self.node.id in self.session.graph


@dataclass(eq=False)
class RecordedCalls:
    """Puts recorded calls into the graphs of their sessions."""

    sessions: SessionStore
    #: Seconds since the epoch.
    clock: Callable[[], float]
    _recorded: int = field(default=0, init=False)
    _skipped: int = field(default=0, init=False)

    def begin(self, tenant: str, session_name: str, name: str, model: str) -> RecordedCall | None:
        """Record a call that runs from now on; return None if there is no room.

        Args:
            session_name: created on first use.
            name: label of the call in pictures.
        """
        now = self.clock()
        session = self.sessions.get_or_record(tenant, session_name, now)
        if session is not None:
            node = CallNode(
                id=mint_call_id(),
                session_id=session.id,
                name=name,
                submitted=now,
                model=model[:MAX_MODEL_CHARACTERS],
                client_objective=LATENCY,
                objective=LATENCY,
            )
            try:
                session.graph.add(node)
            except SessionFullError:
                session = None
        if session is None:
            self._skipped += 1
            return None
        self._recorded += 1
        return RecordedCall(session, node, self.clock)

    def statistics(self) -> RecordedCallCounts:
        return RecordedCallCounts(self._recorded, self._skipped)
