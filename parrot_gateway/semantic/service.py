"""Sessions and the calls in them: what every API with semantic variables is built on. No HTTP.

The shape, for those who build on it:

    service.session(tenant, name)        the session of that name or id, made on first use
    service.bind(session, source)        what a placeholder stands for -> Binding
    service.submit(session, CallSpec)    -> Job; runs it once its inputs are there
    service.submit_transform(session, …) -> Job; the same of a text function between variables
    service.set_value(variable, text)    the user writes it
    service.readers.wait(variable, …)    returns when it is final, or time is up
    service.readers.value(variable, …)   -> its text, or raises why there is none
    service.resolve(tenant, template)    -> the template with the values that it needs
    service.cancel_call(tenant, id)      and what depends on it
    service.close_session(session)       cancels, frees, forgets

A call with several outputs is several calls, each with the text before it (earlier outputs as
references or inputs) as its prompt: the engine finds what they share in its prefix cache.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

from parrot_scheduler.task import LATENCY

from parrot_gateway.exceptions import (
    DoubleProducerError,
    NotFoundError,
    SessionNotFoundError,
    VariableNotFoundError,
)
from parrot_gateway.generation.placement import CallMetadata
from parrot_gateway.generation.requests.call import CallRequest
from parrot_gateway.semantic.call_spec import CallSpec
from parrot_gateway.semantic.contexts import free_all_contexts
from parrot_gateway.semantic.execution.call_runner import CallRunner
from parrot_gateway.semantic.execution.executor import Executor
from parrot_gateway.semantic.execution.fill_ahead import FillAhead
from parrot_gateway.semantic.execution.job import Job, job_of_call, job_of_transform
from parrot_gateway.semantic.execution.objective_tracker import ObjectiveTracker
from parrot_gateway.semantic.graph.node import CallNode
from parrot_gateway.semantic.graph.snapshot import GraphSnapshot
from parrot_gateway.semantic.readers import Readers
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.sessions import SessionStore
from parrot_gateway.semantic.templates.body_template import BodyTemplate
from parrot_gateway.semantic.templates.reference import (
    find_references,
    is_variable_id,
    mint_variable_id,
)
from parrot_gateway.semantic.templates.text_template import Binding
from parrot_gateway.semantic.transforms.transform import Transform
from parrot_gateway.semantic.variable import Variable
from parrot_gateway.settings.model import SessionSettings

#: How often idle sessions are looked for.
SWEEP_S = 30.0


def _mint_session_id() -> str:
    """An unguessable id."""
    return "s" + secrets.token_hex(16)


class SemanticService:
    """The sessions of a gateway. Used in the event loop's thread only.

    Args:
        limits: how much is kept, and for how long.
        runner: lets models answer deferred calls.
        call_timeout_s: how long a call may run, and any wait last that names no time of its own.
        fill_ahead: fills prompt prefixes of waiting calls; None fills none.
        on_session_closed: is told the id of a session that is gone.
        on_call_changed: is told the id of a running call for which something else holds than when
            it began.
        clock: the time in seconds since the epoch.
    """

    def __init__(
        self,
        limits: SessionSettings,
        runner: CallRunner,
        *,
        call_timeout_s: float,
        fill_ahead: FillAhead | None = None,
        on_session_closed: Callable[[str], None] = lambda session_id: None,
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
        #: What calls are run for.
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

    # -- lifetime ---------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to forget idle sessions in time."""

        async def sweep() -> None:
            while True:
                await asyncio.sleep(min(SWEEP_S, self.limits.ttl_s))
                self.sessions.sweep(self.clock())

        self._sweeper = asyncio.get_running_loop().create_task(sweep(), name="session-sweep")

    async def drain(self, timeout_s: float) -> bool:
        """Wait until no call runs or could run; False when time ran out first."""
        return await self.executor.drain(timeout_s)

    async def close(self) -> None:
        """Cancel all calls and free everything; returns when nothing runs any more."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
            self._sweeper = None
        await self.executor.close()
        if self.fill_ahead is not None:
            await self.fill_ahead.close()
        self.sessions.close_all()

    # -- sessions ---------------------------------------------------------------------------

    def session(self, tenant: str, name: str | None) -> Session:
        """The tenant's session of that id or name, made when there is none; None makes one.

        Raises:
            InvalidRequestError: it cannot be a name.
            OverloadedError: too many sessions, none of them idle.
        """
        return self.sessions.get_or_create(tenant, name, self.clock())

    def close_session(self, session: Session) -> None:
        """End its calls, free what it holds and forget it."""
        self.executor.cancel_session(session.id, "its session was closed")
        self.sessions.close(session)

    def snapshot(self, session: Session) -> GraphSnapshot:
        """Its graph, as it is now."""

        def find(variable_id: str) -> Variable | None:
            try:
                return self.sessions.variable(session.tenant, variable_id)
            except VariableNotFoundError:
                return None

        return session.snapshot(self.clock(), find)

    def _session_closed(self, session: Session) -> None:
        self.executor.cancel_session(session.id, "its session was closed")
        self.executor.forget_session(session.id)
        free_all_contexts(session)
        self.objectives.forget(session)
        self._on_session_closed(session.id)

    # -- variables --------------------------------------------------------------------------

    def variable(self, session: Session, source: str, param: str = "variable") -> Variable:
        """The variable that `source` means: a name within the session (made empty if new), or an
        id or a reference of any session of the same tenant.

        Raises:
            VariableNotFoundError: an id or reference that is unknown, expired or foreign.
            InvalidRequestError, SessionFullError: as `Session.variable`.
        """
        plain = source.strip()
        found = find_references(plain)
        if len(found) == 1 and (found[0].start, found[0].end) == (0, len(plain)):
            plain = found[0].variable_id
        if is_variable_id(plain):
            return self.sessions.variable(session.tenant, plain, self.clock(), param)
        return session.variable(plain, param)

    def bind(self, session: Session, source: str, param: str = "inputs") -> Binding:
        """What a placeholder stands for, see `variable`."""
        return Binding(variable_id=self.variable(session, source, param).id)

    def set_value(self, variable: Variable, value: str) -> None:
        """The user writes a variable.

        Raises:
            DoubleProducerError: a call is going to write it.
            VariableStateError: it was written before, or failed.
            ValueTooLargeError, SessionFullError, OverloadedError: it does not fit.
        """
        if variable.producer is not None and not variable.is_final:
            raise DoubleProducerError(
                variable.name, f"call '{variable.producer}'", param="variable"
            )
        variable.set(value, "its user")

    async def resolve(self, tenant: str, template: BodyTemplate, timeout_s: float) -> bytes:
        """The template with the values that it needs, once all are there.

        Raises:
            VariableNotFoundError: one is unknown, expired or foreign.
            DependencyFailedError, DeadlineError: as `Readers.value`.
        """
        variables = self.sessions.variables(tenant, template.variables, self.clock())
        return template.render(await self.readers.values(variables, timeout_s))

    # -- calls ------------------------------------------------------------------------------

    def submit(
        self,
        session: Session,
        spec: CallSpec,
        *,
        attended: bool = False,
        template: BodyTemplate | None = None,
    ) -> Job:
        """Take a call in.

        A deferred one runs by itself once its inputs are there, at once if they are. Of an
        attended one, `Job.changed` tells when its inputs are there; whoever answers it calls
        `executor.begin`, `Job.append` and `executor.complete`, `fail` or `cancel`.

        Args:
            template: of the spec, for those that read it aside (`job_maker.template_of`).

        Raises:
            SessionNotFoundError: the session was closed.
            InvalidRequestError: the body is no JSON object; a placeholder is not declared, or
                a declared one does not occur.
            VariableNotFoundError: a reference is unknown, expired or foreign.
            CycleError, DoubleProducerError, SessionFullError: see `Graph.add`.
            OverloadedError: too many calls wait already.
            GatewayError: it cannot go on from its context, see `contexts.enter`.
        """
        if session.is_closed:
            raise SessionNotFoundError(session.name)
        job = job_of_call(
            spec, session, self.sessions, self.clock(), attended=attended, template=template
        )
        try:
            self.executor.submit(job)
        except BaseException:
            if job.context is not None:
                job.context.leave()
            raise
        self.objectives.regroup(session, job.call.group)
        if attended or spec.objective is not None:
            self.objectives.want_call(session, job.call, spec.objective or LATENCY)
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
        """Let `output` take what `transform` makes of `source`, once that is there.

        Args:
            session: of both variables.

        Raises:
            VariableNotFoundError: one of them is not in the session.
            CycleError, DoubleProducerError, SessionFullError, OverloadedError: as `submit`.
        """
        job = job_of_transform(source, transform, output, session, self.clock(), name)
        self.executor.submit(job)
        self.objectives.inherit(session, output)
        return job

    def cancel_call(self, tenant: str, call_id: str) -> None:
        """Cancel an unfinished call; what depends on it fails.

        Raises:
            NotFoundError: it is not there any more, or another tenant's.
        """
        self.call(tenant, call_id)
        job = self.executor.unfinished.find(call_id)
        if job is not None:
            self.executor.cancel(job)

    def call(self, tenant: str, call_id: str) -> CallNode:
        """A kept call, finished or not.

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
        """What the scheduler needs to know of a call now."""
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
        # What it wrote can be read for as long as if its client had come by just now.
        self.sessions.touch(job.session, self.clock())

    # -- the whole --------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Gauges and counters as plain types, for `/health`."""
        return {
            "sessions": self.sessions.statistics()._asdict(),
            "calls": self.executor.statistics()._asdict(),
            "fill_ahead": {} if self.fill_ahead is None else self.fill_ahead.statistics()._asdict(),
            "readers": self.readers.count,
        }
