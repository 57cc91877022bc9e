"""Sessions and the calls in them, for every API with semantic variables. No HTTP.

service.session(tenant, name)        the session of that name or id, made on first use
service.submit(session, CallSpec)    -> Job; runs once its inputs are ready
service.submit_transform(session, …) -> Job; a transform between two variables
service.set_value(variable, text)    the user writes it
service.readers.wait(variable, …)    returns when it is final, or after a time-out
service.readers.value(variable, …)   -> its text, or raises its failure
service.resolve(tenant, template)    -> the template with values
service.cancel_call(tenant, id)      cancels it; dependents fail
service.close_session(session)       cancels, frees, forgets
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

from parrot_scheduler.task import LATENCY

from parrot_gateway.calls.metadata import CallMetadata
from parrot_gateway.calls.requests.call import CallRequest
from parrot_gateway.exceptions import (
    DoubleProducerError,
    NotFoundError,
    SessionNotFoundError,
    VariableNotFoundError,
)
from parrot_gateway.semantic.call_spec import CallSpec
from parrot_gateway.semantic.contexts import free_all_contexts
from parrot_gateway.semantic.execution.call_runner import CallRunner
from parrot_gateway.semantic.execution.executor import Executor
from parrot_gateway.semantic.execution.fill_ahead import FillAhead
from parrot_gateway.semantic.execution.job import Job, job_of_call, job_of_transform
from parrot_gateway.semantic.execution.objective_tracker import ObjectiveTracker
from parrot_gateway.semantic.graph.node import CallNode
from parrot_gateway.semantic.graph.snapshot import GraphSnapshot, snapshot_of
from parrot_gateway.semantic.readers import Readers
from parrot_gateway.semantic.recorded_calls import RecordedCalls
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.sessions import SessionStore
from parrot_gateway.semantic.templates.body_template import BodyTemplate
from parrot_gateway.semantic.templates.reference import (
    is_variable_id,
    mint_variable_id,
    variable_id_of,
)
from parrot_gateway.semantic.transforms.transform import Transform
from parrot_gateway.semantic.variable import Variable
from parrot_gateway.settings.model import SessionSettings
from parrot_gateway.telemetry.call_record import CallRecord

#: Interval between searches for idle sessions to close.
SWEEP_S = 30.0


def _mint_session_id() -> str:
    return "s" + secrets.token_hex(16)


class SemanticService:
    """The sessions of a gateway. Used in the event loop's thread only.

    Args:
        call_timeout_s: longest run of a call, and default limit of waits.
        fill_ahead: None turns filling ahead off.
        on_session_closed: called with a closed session.
        on_call_changed: called with the id of a running call whose metadata changed.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        limits: SessionSettings,
        runner: CallRunner,
        *,
        call_timeout_s: float,
        fill_ahead: FillAhead | None = None,
        on_session_closed: Callable[[Session], None] = lambda session: None,
        on_call_changed: Callable[[str], None] = lambda call_id: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self.call_timeout_s = call_timeout_s
        self.clock = clock
        self.sessions = SessionStore(
            limits,
            mint_session_id=_mint_session_id,
            mint_variable_id=mint_variable_id,
            on_close=self._session_closed,
        )
        self.recorded_calls = RecordedCalls(self.sessions, clock)
        self.objectives = ObjectiveTracker(self.sessions.owner_of, on_call_changed)
        self.readers = Readers(self.sessions, self.objectives, timeout_s=call_timeout_s)
        self.executor = Executor(
            limits,
            run_timeout_s=call_timeout_s,
            clock=clock,
            run=self._run,
            on_wait=self._waits,
            on_start=self._starts,
            on_end=self._has_ended,
        )
        self.fill_ahead = fill_ahead
        self._runner = runner
        self._on_session_closed = on_session_closed
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start closing idle sessions in time."""

        async def sweep() -> None:
            while True:
                await asyncio.sleep(min(SWEEP_S, self.limits.ttl_s))
                self.sessions.sweep(self.clock())

        self._sweeper = asyncio.get_running_loop().create_task(sweep(), name="session-sweep")

    async def close(self) -> None:
        """Cancel all calls and free everything; return when nothing runs any more."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
            self._sweeper = None
        await self.executor.close()
        if self.fill_ahead is not None:
            await self.fill_ahead.close()
        self.sessions.close_all()

    def session(self, tenant: str, name: str | None) -> Session:
        """See `SessionStore.get_or_create`."""
        return self.sessions.get_or_create(tenant, name, self.clock())

    def close_session(self, session: Session) -> None:
        """Cancel a session's calls, free it and forget it."""
        self.executor.cancel_session(session.id, "its session was closed")
        self.sessions.close(session)

    def snapshot(self, session: Session) -> GraphSnapshot:
        """Take a snapshot of a session's graph, with the variables it reads from other sessions."""

        def find(variable_id: str) -> Variable | None:
            try:
                return self.sessions.variable(session.tenant, variable_id)
            except VariableNotFoundError:
                return None

        return snapshot_of(session.graph, self.clock(), session.id, find)

    def _session_closed(self, session: Session) -> None:
        self.executor.cancel_session(session.id, "its session was closed")
        self.executor.deduplication.forget(session.id)
        free_all_contexts(session)
        self.objectives.forget(session)
        self._on_session_closed(session)

    def variable(self, session: Session, source: str, param: str = "variable") -> Variable:
        """Return the variable of a name in the session (created empty if new), or of an id or
        reference in the tenant.

        Raises:
            VariableNotFoundError: an id or reference is unknown, expired or foreign.
            InvalidRequestError, SessionFullError: as `Session.variable`.
        """
        plain = variable_id_of(source) or source.strip()
        if is_variable_id(plain):
            return self.sessions.variable(session.tenant, plain, self.clock(), param)
        return session.variable(plain, param)

    def set_value(self, variable: Variable, value: str) -> None:
        """Write a variable for the user.

        Raises:
            DoubleProducerError: a call is going to write it.
            VariableStateError: it is final.
            ValueTooLargeError, SessionFullError, OverloadedError: it does not fit.
        """
        if variable.producer is not None and not variable.is_final:
            raise DoubleProducerError(
                variable.name, f"call '{variable.producer}'", param="variable"
            )
        variable.set(value, "its user")

    async def resolve(self, tenant: str, template: BodyTemplate, timeout_s: float) -> bytes:
        """Return the template with the values that it needs, once all are ready.

        Raises:
            VariableNotFoundError: one is unknown, expired or foreign.
            DependencyFailedError, DeadlineError: as `Readers.value`.
        """
        variables = self.sessions.variables(tenant, template.variables, self.clock())
        return template.render(await self.readers.values(variables, timeout_s))

    def submit(
        self,
        session: Session,
        spec: CallSpec,
        *,
        attended: bool = False,
        template: BodyTemplate | None = None,
        record: CallRecord | None = None,
    ) -> Job:
        """Submit a call.

        A deferred one runs once its inputs are ready. The future `Job.changed` of an attended one
        is done when its inputs are ready; its client's handler then calls `executor.begin`,
        `Job.append` and `executor.complete`, `fail` or `cancel`.

        Args:
            template: the result of `template_of`, if the caller has it.
            record: record of the call; ends with a deferred call.

        Raises:
            SessionNotFoundError: the session was closed.
            InvalidRequestError: the body is no JSON object; a placeholder is not declared, or
                a declared one does not occur.
            VariableNotFoundError: a reference is unknown, expired or foreign.
            CycleError, DoubleProducerError, SessionFullError: see `Graph.add`.
            OverloadedError: too many calls wait already.
            GatewayError: it cannot continue its context, see `contexts.enter`.
        """
        if session.is_closed:
            raise SessionNotFoundError(session.name)
        job = job_of_call(
            spec,
            session,
            self.sessions,
            self.clock(),
            attended=attended,
            template=template,
            record=record,
        )
        try:
            self.executor.submit(job)
        except BaseException:
            if job.context is not None:
                job.context.leave()
            raise
        self.objectives.regroup(session, job.call.group)
        if attended or spec.objective is not None:
            self.objectives.set_client_objective(session, job.call, spec.objective or LATENCY)
        self.objectives.inherit(session, job.output)
        return job

    def submit_transform(
        self,
        session: Session,
        source: Variable,
        transform: Transform,
        output: Variable,
        name: str = "",
    ) -> Job:
        """Fill `output` with the transformed value of `source`, once that is ready.

        Args:
            session: the session of both variables.

        Raises:
            VariableNotFoundError: one of them is not in the session.
            CycleError, DoubleProducerError, SessionFullError, OverloadedError: as `submit`.
        """
        job = job_of_transform(source, transform, output, session, self.clock(), name)
        self.executor.submit(job)
        self.objectives.inherit(session, output)
        return job

    def cancel_call(self, tenant: str, call_id: str) -> None:
        """Cancel an unfinished call; dependents fail. Raises as `call`."""
        self.call(tenant, call_id)
        job = self.executor.unfinished.find(call_id)
        if job is not None:
            self.executor.cancel(job)

    def call(self, tenant: str, call_id: str) -> CallNode:
        """Return a kept call, finished or not.

        Raises:
            NotFoundError: it is not kept, or another tenant's.
        """
        for session in self.sessions.of_tenant(tenant):
            node = session.graph.get(call_id)
            if isinstance(node, CallNode):
                return node
        raise NotFoundError(
            f"Call '{call_id}' is unknown or no longer kept.", param="call", code="call_not_found"
        )

    def metadata_of(self, job: Job) -> CallMetadata:
        """Return a call's current metadata for the scheduler."""
        return self.objectives.metadata_of(job)

    async def _run(self, job: Job, request: CallRequest) -> None:
        await self._runner.run(job, request, self.metadata_of(job))

    def _waits(self, job: Job) -> None:
        if self.fill_ahead is not None:
            self.fill_ahead.consider(job)

    def _starts(self, job: Job) -> None:
        if self.fill_ahead is not None:
            self.fill_ahead.stop(job)
        self.objectives.update(job.session)

    def _has_ended(self, job: Job) -> None:
        if self.fill_ahead is not None:
            self.fill_ahead.stop(job)
        if isinstance(job.node, CallNode):
            self.objectives.regroup(job.session, job.node.group)
        # The end of a call counts as use of its session, so that its output can still be read.
        self.sessions.touch(job.session, self.clock())

    def describe(self) -> dict[str, Any]:
        """Return gauges and counters as plain types, for `/health`."""
        return {
            "sessions": self.sessions.statistics()._asdict(),
            "calls": self.executor.statistics()._asdict(),
            "recorded_calls": self.recorded_calls.statistics()._asdict(),
            "fill_ahead": {} if self.fill_ahead is None else self.fill_ahead.statistics()._asdict(),
            "readers": self.readers.count,
        }
