"""Calls with semantic variables, over the ordinary routes.

Decides which of three ways a call goes: with nothing semantic in it, the ordinary one, untouched;
deferred, answered with a reference and run by the executor; attended, waiting here for its inputs
and then answered on the client's own exchange like any other, with an observer that lets the text
fill the output variable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgspec

from parrot_gateway.api.call_shape import CallShape
from parrot_gateway.api.event_stream import EventStream
from parrot_gateway.api.ignored_fields import name_ignored
from parrot_gateway.api.openai.shape import OPENAI
from parrot_gateway.api.semantic.fields import Given, SemanticFields, read_fields
from parrot_gateway.api.semantic.identity import SessionIdentity
from parrot_gateway.calls.metadata import ORDINARY_CALL, CallMetadata
from parrot_gateway.calls.observer import GenerationObserver
from parrot_gateway.calls.requests.call import CallRequest, in_thread_if_large, prepare
from parrot_gateway.calls.requests.prepared import PreparedCall
from parrot_gateway.exceptions import (
    GatewayError,
    InvalidRequestError,
    UnsupportedError,
    invalid_value,
)
from parrot_gateway.http.exchange import EVENT_STREAM, ClientDisconnected, Exchange, Headers
from parrot_gateway.linking.service import LinkingService
from parrot_gateway.routing.model_directory import ModelDirectory
from parrot_gateway.semantic.call_spec import CallSpec
from parrot_gateway.semantic.contexts import parse_context
from parrot_gateway.semantic.execution.call_runner import JobObserver
from parrot_gateway.semantic.execution.job import Job, template_of
from parrot_gateway.semantic.recorded_calls import MAX_MODEL_CHARACTERS
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.templates.body_template import BodyTemplate, read_template
from parrot_gateway.semantic.templates.reference import has_reference, reference_of
from parrot_gateway.semantic.templates.text_template import Binding
from parrot_gateway.semantic.transforms.transform import token_cutter
from parrot_gateway.semantic.variable import Failure, Variable

_PROMPTS = msgspec.json.Decoder(list[msgspec.Raw])
_NULL = msgspec.Raw(b"null")
_NO_TOOLS = (b"null", b"[]")
#: What a list of token ids is written with.
_OF_TOKEN_IDS = b"-+.0123456789eE, \t\r\n"


class CallContext(NamedTuple):
    """A call's surroundings besides its request; by default those of an ordinary call."""

    metadata: CallMetadata = ORDINARY_CALL
    observers: tuple[GenerationObserver, ...] = ()
    #: The request, checked against a model of own engines before values were bound.
    checked: PreparedCall[Any] | None = None
    #: How its answer is written.
    shape: CallShape = OPENAI


#: Answers a call: exchange, request, context.
Answerer: TypeAlias = Callable[[Exchange, CallRequest, CallContext], Awaitable[None]]


@dataclass(frozen=True)
class SemanticCalls:
    """The semantic side of the call routes."""

    service: SemanticService
    models: ModelDirectory
    #: Finds the session of a call that does not name one.
    identity: SessionIdentity
    linking: LinkingService
    _: KW_ONLY
    #: Silence after which the stream of a waiting call gets a comment.
    keep_alive_s: float
    #: Answers a call whose inputs are there.
    answer_call: Answerer

    async def answer(
        self, exchange: Exchange, request: CallRequest, shape: CallShape = OPENAI
    ) -> bool:
        """Answer a call of which `may_be_semantic` is true.

        Args:
            exchange: its body has been read.
            request: that body.
            shape: how its answer is written.

        Returns:
            False when there is nothing semantic in it, and nothing was done.

        Raises:
            GatewayError: nothing has been sent yet.
            ClientDisconnected: the client went away.
        """
        fields = read_fields(exchange.scope["headers"], request.known_fields)
        variables: Collection[str] = ()
        if fields.session is None and has_reference(request.body):
            # Also those of other sessions: the first of them may say which session is meant.
            template = await read_template(lambda: BodyTemplate.of_call(request), request.size)
            variables = template.variables
        if fields.is_empty and not variables:
            return False
        checked = await self._check(request, fields)
        known = len(self.service.sessions)
        session = self._session(exchange, request, fields, variables)
        is_new = len(self.service.sessions) > known
        session.pin()
        try:
            job = await self._submit(session, exchange, request, fields, checked)
        except BaseException:
            session.unpin()
            if is_new and session.is_idle and not session.num_variables and not len(session.graph):
                self.service.close_session(session)
            raise
        try:
            if fields.defer:
                await self._answer_deferred(exchange, request, job, shape)
            else:
                await self._attend(exchange, job, shape)
        finally:
            session.unpin()
        return True

    async def _check(
        self, request: CallRequest, fields: SemanticFields
    ) -> PreparedCall[Any] | None:
        """Check a call before it becomes part of a session.

        Returns:
            a deferred call for an own engine, checked against its model.

        Raises:
            InvalidRequestError: it would fill a variable with several texts, or has a field that an
                own engine refuses.
            ContextLengthError: it is deferred, and its prompt is too long as it stands.
            ModelNotFoundError: nothing serves its model.
        """
        head = request.semantic_head
        model = request.model
        if len(model) > MAX_MODEL_CHARACTERS:
            raise InvalidRequestError(
                f"Invalid 'model': longer than {MAX_MODEL_CHARACTERS} characters.",
                param="model",
                code="string_above_max_length",
            )
        if fields.transform is not None and fields.output is None and not fields.defer:
            raise invalid_value(
                "transform",
                "it is applied to what fills a variable: name an output, or defer the call.",
            )
        target = self.models.resolve(model)
        if (
            fields.transform is not None
            and fields.transform.needs_tokens
            and target.upstream is not None
        ):
            raise UnsupportedError(
                f"The model '{model}' belongs to the upstream '{target.upstream}', whose "
                "tokenizer this gateway does not have: count characters instead of tokens.",
                param="transform",
                code="unsupported_value",
            )
        if fields.defer or fields.output is not None:
            _check_one_text(head.n, request)
        if fields.defer:
            _check_no_tools(request)
        if fields.transform is not None and target.upstream is None:
            # Its tokenizer may be needed.
            await self.models.loaded(target.model)
        if not fields.defer or target.upstream is not None:
            return None
        await in_thread_if_large(lambda: request.typed, request.size)
        checked = prepare(request, await self.models.loaded_engine(target.model))
        if not fields.inputs and not has_reference(request.body):
            await checked.check_fits()
        return checked

    def _token_cutter(
        self, request: CallRequest, fields: SemanticFields
    ) -> Callable[[str, int], str] | None:
        """The function that cuts texts to tokens of the call's model, if its transform needs one.

        Raises:
            ModelLoadingError, OverloadedError: as `ModelDirectory.engine_of`.
        """
        if fields.transform is None or not fields.transform.needs_tokens:
            return None
        target = self.models.resolve(request.model)
        return token_cutter(self.models.engine_of(target.model).tokenizer)

    async def _submit(
        self,
        session: Session,
        exchange: Exchange,
        request: CallRequest,
        fields: SemanticFields,
        checked: PreparedCall[Any] | None,
    ) -> Job:
        """Submit the call; after an error the session is as before."""
        made: list[Variable] = []

        def variable(source: str, param: str) -> Variable:
            before = session.num_variables
            found = self.service.variable(session, source, param)
            if session.num_variables > before:
                made.append(found)
            return found

        try:
            context = None if fields.context is None else parse_context(fields.context)
            inputs = {
                name: Binding(value=source.value)
                if isinstance(source, Given)
                else Binding(variable_id=variable(source, "inputs").id)
                for name, source in fields.inputs.items()
            }
            output = None
            if fields.output is not None:
                output = variable(fields.output, "output")
            elif fields.defer:
                output = session.anonymous_variable()
                made.append(output)
            spec = CallSpec(
                request=request,
                checked=checked,
                inputs=inputs,
                output=None if output is None else output.id,
                context=context,
                transform=fields.transform,
                cut_tokens=self._token_cutter(request, fields),
                objective=fields.objective,
                priority=fields.priority,
                dedupe=fields.dedupe and context is None,
                name=fields.name,
                run=fields.run,
                parent=fields.parent,
                group=fields.group,
                headers=list(exchange.scope["headers"]),
            )
            template = await read_template(lambda: template_of(spec), request.size)
            job = self.service.submit(
                session, spec, attended=not fields.defer, template=template, record=exchange.record
            )
            exchange.record.deferred = fields.defer
            return job
        except BaseException:
            for each in made:
                _discard(session, each)
            raise

    def _session(
        self,
        exchange: Exchange,
        request: CallRequest,
        fields: SemanticFields,
        variables: Collection[str],
    ) -> Session:
        """The session that the request names, else that of the first variable it refers to."""
        tenant = exchange.tenant
        name = fields.session
        if name is None:
            identity = self.identity.find(exchange.scope["headers"], request.semantic_head)
            name = None if identity is None else identity.name
        if name is None and fields.context is not None:
            raise InvalidRequestError(
                "A context belongs to a session: name it (X-Parrot-Session, or parrot.session).",
                param="session",
                code="missing_required_parameter",
            )
        if name is None:
            for variable_id in sorted(variables):
                variable = self.service.sessions.variable(tenant, variable_id)
                owner = self.service.sessions.owner_of(variable)
                if owner is not None:
                    return owner
        return self.service.session(tenant, name)

    # -- deferred ---------------------------------------------------------------------------

    async def _answer_deferred(
        self, exchange: Exchange, request: CallRequest, job: Job, shape: CallShape
    ) -> None:
        assert job.output is not None
        name_ignored(exchange, request.ignored)
        answer = shape.deferred(request, job.id, reference_of(job.output.id))
        content_type = EVENT_STREAM if request.semantic_head.stream else ()
        await exchange.respond(200, answer, [*content_type, *_headers(job)])

    # -- attended ---------------------------------------------------------------------------

    async def _attend(self, exchange: Exchange, job: Job, shape: CallShape) -> None:
        executor = self.service.executor
        task = asyncio.current_task()
        assert task is not None
        observer = _AttendedCall(exchange, job, self.service.clock)
        exchange.on_headers(observer.add_headers)
        exchange.cancel_on_disconnect()
        try:
            await self._wait_for_inputs(exchange, job, shape)
            if job.node.is_finished:
                raise job.client_error()
            executor.begin(job)
            observer.begin()
            metadata = self.service.metadata_of(job)
            context = CallContext(metadata, (observer,), job.spec.checked, shape)
            request = job.bound_request()
            await job.take_prompt(request)
            answer = partial(self.answer_call, exchange, request, context)
            if self.linking.is_running:
                body = await in_thread_if_large(lambda: request.body, request.size)
                await self.linking.follow(exchange, body, answer, job.session.id, job.id)
            else:
                await answer()
            # The answer is out: a client that leaves now leaves in good order.
            exchange.finish()
            try:
                observer.finish()
                await executor.complete(job)
            except GatewayError as error:
                executor.fail(job, job.failure_of(error))
        except GatewayError as error:
            executor.fail(job, job.failure_of(error))
            raise
        except ClientDisconnected:
            executor.cancel(job, "its client went away")
            raise
        except asyncio.CancelledError:
            if exchange.disconnected or job.node.state != "cancelled":
                executor.cancel(job, "its client went away")
                raise
            task.uncancel()
            raise job.client_error() from None
        except BaseException:
            executor.fail(job, Failure("server_error", "the gateway failed to run it"))
            raise

    async def _wait_for_inputs(self, exchange: Exchange, job: Job, shape: CallShape) -> None:
        """Wait; from the first comment on, failures are reported in the stream."""
        changed = job.changed()
        assert job.spec.request is not None
        if changed.done() or not job.spec.request.head.stream:
            await changed
            return
        stream = EventStream(exchange, self.keep_alive_s, failure=shape.failure)
        while not changed.done():
            await asyncio.wait({changed}, timeout=self.keep_alive_s)
            if not changed.done():
                await stream.keep_alive()


class _AttendedCall(JobObserver):
    """Fills the variable of a call whose client waits, and adds headers for session and engine.

    Args:
        exchange: not answered yet.
        job: the call.
        clock: the time for the job.
    """

    def __init__(self, exchange: Exchange, job: Job, clock: Callable[[], float]) -> None:
        super().__init__(job, clock)
        self._started_at = exchange.started
        self._begun = False
        self._engine: str | None = None
        #: Seconds that it waited for its inputs, and for an engine.
        self._waited_s = 0.0

    def begin(self) -> None:
        """Its inputs are there."""
        self._begun = True
        self._waited_s = time.perf_counter() - self._started_at

    def started(self, engine: str, queued_s: float, reason: str) -> None:
        super().started(engine, queued_s, reason)
        self._engine = engine
        self._waited_s += queued_s

    def add_headers(self, headers: Headers) -> None:
        names = {name for name, _ in headers}
        if self._engine is not None and b"x-parrot-engine" not in names:
            headers.append((b"x-parrot-engine", self._engine.encode()))
        if self._begun:
            headers.append((b"x-parrot-queue-ms", b"%d" % (self._waited_s * 1000)))
        headers += _headers(self._job)
        is_stream = any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in headers
        )
        if self.usage is not None and not is_stream:
            # A whole answer reports how much of its prompt was found in the cache.
            headers.append((b"x-parrot-cached-tokens", b"%d" % self.usage.cached_tokens))


def _discard(session: Session, variable: Variable) -> None:
    """Forget a variable that was made for a call that is not to be."""
    if session.get(variable.id) is variable and not variable.num_listeners:
        try:
            session.delete(variable.id)
        except GatewayError:
            return


def _headers(job: Job) -> Headers:
    headers = [(b"x-parrot-session", job.session.id.encode()), (b"x-parrot-call", job.id.encode())]
    if job.output is not None:
        headers.append((b"x-parrot-variable", job.output.id.encode()))
    return headers


def _check_no_tools(request: CallRequest) -> None:
    """Refuse tools that a deferred call may use: its answer is a reference to text alone."""
    fields = request.fields
    for tools, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        given = bytes(fields.get(tools, _NULL))
        if b"".join(given.split()) in _NO_TOOLS or bytes(fields.get(choice, _NULL)) == b'"none"':
            continue
        raise UnsupportedError(
            f"A deferred call answers with a reference to its text, and cannot call '{tools}': "
            f"send it without 'defer', without '{tools}', or with '{choice}' \"none\".",
            param="parrot.defer",
        )


def _check_one_text(n: int | None, request: CallRequest) -> None:
    if n is not None and n != 1:
        raise invalid_value("n", "a call that fills a variable has one answer, so 'n' must be 1.")
    prompt = bytes(request.fields.get("prompt", _NULL))
    if prompt.startswith(b"[") and prompt.strip(b"[]").translate(None, _OF_TOKEN_IDS):
        items = _PROMPTS.decode(prompt)
        if len(items) > 1:
            raise invalid_value("prompt", "a call that fills a variable has one prompt.")
