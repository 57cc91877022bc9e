"""One unfinished call or transform of a session: its inputs, its text so far, its waiting client.

This is the executor's working state; the executor decides when it runs.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from parrot_scheduler.task import THROUGHPUT

from parrot_gateway.calls.requests.call import PATHS, CallRequest, in_thread_if_large
from parrot_gateway.exceptions import (
    AnswerError,
    CallCancelledError,
    GatewayError,
    InvalidRequestError,
    ValueTooLargeError,
)
from parrot_gateway.semantic.call_spec import CallSpec
from parrot_gateway.semantic.contexts import ContextUse, enter
from parrot_gateway.semantic.graph.node import CallNode, ForeignInput, TransformNode
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.sessions import SessionStore
from parrot_gateway.semantic.templates.body_template import BodyTemplate
from parrot_gateway.semantic.transforms.transform import Transform
from parrot_gateway.semantic.variable import Failure, Variable, size_of
from parrot_gateway.telemetry.call_record import CLIENT_LEFT, CallRecord

#: Length from which a transform runs in a separate thread.
_LONG_TEXT = 100_000


@dataclass(eq=False)
class Job:
    """One call or transform. Made by `job_of_call` and `job_of_transform`."""

    node: CallNode | TransformNode
    session: Session
    #: The submitted spec; a transform's has only output and transform.
    spec: CallSpec
    #: Template of the spec's body; None for a transform.
    template: BodyTemplate | None = None
    #: The variables that the template needs, by id.
    inputs: Mapping[str, Variable] = field(kw_only=True)
    #: Sessions of inputs from other sessions of the tenant.
    foreign: Mapping[str, Session] = field(default_factory=dict)
    #: The variable that its text fills.
    output: Variable | None = field(kw_only=True)
    #: True: a client waits for it on its own connection.
    attended: bool = False
    #: Record of a call; a transform's is never shown.
    record: CallRecord = field(kw_only=True)
    #: Its use of a named context.
    context: ContextUse | None = None
    #: True once inputs are ready that were not ready at submission.
    is_ready: bool = False
    has_waited: bool = False
    #: True once the model has written text.
    has_text: bool = False
    #: Reason of its failure or cancellation.
    failure: Failure | None = None
    #: Name of the engine that caches its prompt's prefix.
    preferred_engine: str | None = None
    #: The error for the client of an attended call.
    error: GatewayError | None = None
    timer: asyncio.TimerHandle | None = None
    #: The task that runs it; for an attended call the client's.
    task: asyncio.Task[object] | None = None
    _unsubscribe: list[Callable[[], None]] = field(default_factory=list)
    _waiter: asyncio.Future[None] | None = None
    #: Text for the transform.
    _parts: list[str] = field(default_factory=list)
    _parts_bytes: int = 0
    _copied: str | None = None

    @property
    def id(self) -> str:
        return self.node.id

    @property
    def call(self) -> CallNode:
        """The node of a call; not for transforms."""
        assert isinstance(self.node, CallNode)
        return self.node

    @property
    def is_transform(self) -> bool:
        return isinstance(self.node, TransformNode)

    @property
    def held_bytes(self) -> int:
        return self.spec.size_bytes

    @property
    def output_name(self) -> str | None:
        return self.output.name if self.output is not None else None

    @property
    def has_inputs(self) -> bool:
        """Return true if every input is ready and it has its turn on its context."""
        if self.context is not None and not self.context.is_granted:
            return False
        return all(variable.state == "ready" for variable in self.inputs.values())

    def failed_input(self) -> Variable | None:
        return next((each for each in self.inputs.values() if each.failure is not None), None)

    def watch(self, variable: Variable, listener: Callable[[Job], None]) -> None:
        """Call `listener` when an input is final.

        Raises:
            OverloadedError: it has too many listeners.
        """
        self._unsubscribe.append(variable.subscribe(lambda _: listener(self), last_only=True))

    def stop_watching(self) -> None:
        """End all watches."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe.clear()

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def bound_request(self) -> CallRequest:
        """Return the request with its inputs' values, after its context's contents.

        Raises:
            RequestTooLargeError: the values are too large.
            GatewayError: the context cannot take it, see `ContextUse.compose`.
        """
        request = self.known_request("")
        return request if self.context is None else self.context.compose(request)

    async def take_prompt(self, request: CallRequest) -> None:
        """Give its record the request with values, if the record keeps content."""
        content = self.record.wanted_content()
        if content is not None:
            body = await in_thread_if_large(lambda: request.body, request.size)
            content.asked(PATHS[request.kind], body, is_bound=True)

    def known_request(self, marker: str) -> CallRequest:
        """Return the request with the ready values, and `marker` in place of the others."""
        assert self.template is not None
        assert self.spec.request is not None
        values = {
            key: marker if variable.value is None else variable.value
            for key, variable in self.inputs.items()
        }
        return self.spec.request.bound(self.template, values)

    def changed(self) -> asyncio.Future[None]:
        """Return a future for an attended call's client: done when the inputs are ready or the call
        ended.
        """
        if self._waiter is None:
            self._waiter = asyncio.get_running_loop().create_future()
            if self.is_ready or self.node.is_finished:
                self._waiter.set_result(None)
        return self._waiter

    def notify(self) -> None:
        """Complete the future of `changed`."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def stop_running(self) -> None:
        """Cancel the task that runs it, unless it is the current one."""
        task = self.task
        if task is not None and not task.done() and task is not asyncio.current_task():
            task.cancel()

    def append(self, text: str, now: float) -> None:
        """Append text that the model has written.

        Raises:
            ValueTooLargeError: the text exceeds the size limit of a variable.
            GatewayError: the variable is final already.
        """
        if not text:
            return
        self.has_text = True
        if isinstance(self.node, CallNode):
            self.node.tokens += 1
            if self.node.first_token is None:
                self.node.first_token = now
        if self.context is not None:
            self.context.append(text)
        if self.output is None:
            return
        if self.spec.transform is None:
            self.output.append(text)
            return
        self._parts_bytes += size_of(text)
        if self._parts_bytes > self.output.max_value_bytes:
            raise ValueTooLargeError(self.output.name, self.output.max_value_bytes)
        self._parts.append(text)

    def take_input(self, now: float) -> None:
        """Append the value of a transform's input."""
        (variable,) = self.inputs.values()
        self.append(variable.value or "", now)

    async def value(self) -> str:
        """Return the text so far, transformed.

        Raises:
            TransformError: the transform does not fit the text.
        """
        assert self.output is not None
        if self._copied is not None:
            return self._copied
        transform, cut_tokens = self.spec.transform, self.spec.cut_tokens
        if transform is None:
            return self.output.text
        text = "".join(self._parts)
        limit = self.output.max_value_bytes

        def apply() -> str:
            return transform.apply(text, max_characters=limit, cut_tokens=cut_tokens)

        return await asyncio.to_thread(apply) if len(text) > _LONG_TEXT else apply()

    async def copy(self, twin: Variable) -> bool:
        """Wait for an identical call's value and take it.

        Returns:
            False if that call was cancelled, so that this one must run.

        Raises:
            GatewayError: the other call failed.
        """
        ended = asyncio.Event()
        unsubscribe = twin.subscribe(lambda _: ended.set(), last_only=True)
        try:
            if not twin.is_final:
                await ended.wait()
        finally:
            unsubscribe()
        if twin.state == "failed" and twin.failure is not None:
            raise twin.failure.to_error(twin.name)
        self._copied = twin.value
        return twin.value is not None

    def end_record(self) -> None:
        """End the record of a deferred call. An attended call's record ends with its answer."""
        record, failure = self.record, self.failure
        if self.attended:
            return
        if (content := record.wanted_content()) is not None and self.output is not None:
            is_own = self.spec.transform is not None and self._copied is None
            text = "".join(self._parts) if is_own else self.output.text
            if text:
                content.wrote(text, record.finish_reason or "stop")
        if failure is None:
            record.status = 200
        else:
            record.note_failure(failure.code, failure.message)
            if self.node.state == "cancelled":
                record.status = CLIENT_LEFT
            else:
                record.status = 500 if self.error is None else _answered_status(self.error)
        record.end()

    def client_error(self) -> GatewayError:
        """Return the error of an attended call that ended without an answer."""
        if self.error is not None:
            return self.error
        reason = self.failure.message if self.failure is not None else "it was cancelled"
        return CallCancelledError(f"Call '{self.id}' was not finished: {reason}.")

    def failure_of(self, error: GatewayError) -> Failure:
        return Failure(error.code or "failed", error.message, self.output_name, self.id)


def _answered_status(error: GatewayError) -> int:
    """Return the HTTP status that a waiting client gets."""
    relayed = error.upstream_status if isinstance(error, AnswerError) else None
    return relayed or error.status


def mint_call_id() -> str:
    """Make a fresh id of a call or transform."""
    return "call_" + secrets.token_hex(12)


def template_of(spec: CallSpec) -> BodyTemplate:
    """Return a call's body as a template.

    Raises:
        InvalidRequestError: it is no JSON object.
    """
    assert spec.request is not None
    return BodyTemplate.of_call(spec.request, spec.inputs, verbatim=spec.verbatim)


def job_of_call(
    spec: CallSpec,
    session: Session,
    sessions: SessionStore,
    now: float,
    *,
    attended: bool,
    template: BodyTemplate | None = None,
    record: CallRecord | None = None,
) -> Job:
    """Make the job of a call to a model; it queues for its named context from here on.

    Args:
        template: the result of `template_of`, if the caller has it.
        record: the call's record, if the caller keeps it; gets session and id.

    Raises:
        InvalidRequestError: the body is no JSON object; a placeholder is not declared, or a
            declared one does not occur.
        VariableNotFoundError: a reference is unknown, expired or foreign.
        GatewayError: it cannot continue its context, see `contexts.enter`.
    """
    assert spec.request is not None
    if template is None:
        template = template_of(spec)
    if not spec.verbatim:
        _check_placeholders(template)
    inputs = sessions.variables(session.tenant, template.variables, now)
    foreign = {
        variable_id: owner
        for variable_id, variable in inputs.items()
        if variable.session_id != session.id and (owner := sessions.owner_of(variable)) is not None
    }
    output = None if spec.output is None else session.lookup(spec.output, "output")
    node = CallNode(
        id=mint_call_id(),
        session_id=session.id,
        inputs=tuple(v for v in inputs if v not in foreign),
        foreign=tuple(
            ForeignInput(variable_id, inputs[variable_id].name, owner.name)
            for variable_id, owner in foreign.items()
        ),
        output=spec.output,
        name=spec.name or (output.name if output is not None else ""),
        submitted=now,
        model=spec.request.semantic_head.model or "",
        given_objective=spec.objective,
        objective=spec.objective or THROUGHPUT,
        priority=spec.priority,
        run=spec.run,
        parent=spec.parent,
        group=spec.group,
    )
    if record is None:
        record = CallRecord("", node.id, time.perf_counter(), tenant=session.tenant)
    record.call_id, record.session, record.model = node.id, session.id, node.model
    context = spec.context and enter(session, spec.context, spec.request)
    return Job(
        node,
        session,
        spec,
        template,
        inputs=inputs,
        foreign=foreign,
        output=output,
        attended=attended,
        record=record,
        context=context,
    )


def job_of_transform(
    source: Variable,
    transform: Transform,
    output: Variable,
    session: Session,
    now: float,
    name: str,
) -> Job:
    """Make the job that fills `output` with the transformed value of `source`."""
    node = TransformNode(
        id=mint_call_id(),
        session_id=session.id,
        inputs=(source.id,),
        output=output.id,
        name=name or output.name,
        submitted=now,
        pipeline=transform.text,
    )
    return Job(
        node,
        session,
        CallSpec(request=None, output=output.id, transform=transform, dedupe=False),
        inputs={source.id: source},
        output=output,
        record=CallRecord("", node.id, time.perf_counter()),
    )


def _check_placeholders(template: BodyTemplate) -> None:
    if template.undeclared:
        names = ", ".join(f"'{name}'" for name in sorted(template.undeclared))
        raise InvalidRequestError(
            f"The prompt has placeholders that 'inputs' does not declare: {names}. "
            "Declare them, or write the prompt without double braces.",
            param="inputs",
            code="undeclared_placeholder",
        )
    if template.unused:
        names = ", ".join(f"'{name}'" for name in sorted(template.unused))
        raise InvalidRequestError(
            f"'inputs' declares what stands nowhere in the prompt: {names}.",
            param="inputs",
            code="unused_input",
        )
