"""Calls with semantic variables, over the ordinary routes.

Decides which of three ways a call goes: with nothing semantic in it, the ordinary one, untouched;
deferred, answered with a reference and run by the executor; attended, waiting here for its inputs
and then answered by the ordinary handler on the client's own exchange.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

import msgspec

from parrot_gateway.api.semantic.deferred import deferred_answer, deferred_stream
from parrot_gateway.api.semantic.fields import Given, SemanticFields, may_be_semantic, read_fields
from parrot_gateway.api.semantic.identity import identify
from parrot_gateway.api.semantic.internal import Answerer
from parrot_gateway.api.semantic.response_observer import ResponseObserver
from parrot_gateway.api.semantic.submission import check_deferrable
from parrot_gateway.exceptions import GatewayError, InvalidRequestError
from parrot_gateway.generation.requests.validation import decode
from parrot_gateway.http.exchange import (
    EVENT_STREAM,
    ClientDisconnected,
    Exchange,
    Headers,
    size_of_headers,
)
from parrot_gateway.http.tenants import tenant_of
from parrot_gateway.semantic.call_spec import CallSpec
from parrot_gateway.semantic.contexts import parse_context
from parrot_gateway.semantic.execution.call_metadata import metadata_of
from parrot_gateway.semantic.execution.job import CutTokens, Job
from parrot_gateway.semantic.execution.job_maker import template_of
from parrot_gateway.semantic.session import Session
from parrot_gateway.semantic.templates.body_template import Binding, BodyTemplate, read_aside
from parrot_gateway.semantic.templates.reference import has_reference, reference_of
from parrot_gateway.semantic.transforms.token_cut import token_cutter
from parrot_gateway.semantic.variable import Failure, Variable
from parrot_gateway.server.gateway import Gateway


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Call(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


_call_decoder = msgspec.json.Decoder(_Call)


class SemanticCalls:
    """The semantic side of the call routes.

    Args:
        gateway: the parts.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._service = gateway.semantic

    async def answer(self, exchange: Exchange, body: bytes, ordinary: Answerer) -> bool:
        """Answer a call that may be semantic.

        Args:
            exchange: its body has been read.
            body: that body.
            ordinary: answers without anything semantic.

        Returns:
            False when there is nothing semantic in it, and nothing was done.

        Raises:
            GatewayError: nothing has been sent yet.
            ClientDisconnected: the client went away.
        """
        headers = exchange.scope["headers"]
        if not may_be_semantic(headers, body):
            return False
        fields = read_fields(headers, body)
        variables: Collection[str] = ()
        if fields.session is None and has_reference(body):
            template = await read_aside(lambda: BodyTemplate.of(body, exchange.path), len(body))
            variables = template.variables
        if fields.is_empty and not variables:
            return False
        await check_deferrable(self._gateway, exchange.path, body, fields)
        # NOTE: before anything is submitted: what runs must not be answered with an error.
        call = decode(body, _call_decoder)
        cut_tokens = self._token_cutter(fields, call)
        known = len(self._service.sessions)
        session = self._session(exchange, body, fields, variables)
        is_new = len(self._service.sessions) > known
        session.pin()
        try:
            job = await self._submit(session, exchange, body, fields)
        except BaseException:
            session.unpin()
            if is_new and session.is_idle and not session.num_variables and not len(session.graph):
                self._service.close_session(session)
            raise
        try:
            job.cut_tokens = cut_tokens
            if fields.defer:
                await self._answer_deferred(exchange, call, job)
            else:
                await self._attend(exchange, bool(call.stream), job, ordinary)
        finally:
            session.unpin()
        return True

    def _token_cutter(self, fields: SemanticFields, call: _Call) -> CutTokens | None:
        """What cuts texts to tokens of the call's model, if its transform wants that.

        Raises:
            ModelLoadingError, OverloadedError: as `Gateway.engine_of`.
        """
        if fields.transform is None or not fields.transform.needs_tokens:
            return None
        target = self._gateway.resolve(call.model or "")
        return token_cutter(self._gateway.engine_of(target.model).tokenizer)

    async def _submit(
        self, session: Session, exchange: Exchange, body: bytes, fields: SemanticFields
    ) -> Job:
        """Submit the call; after an error the session is as before."""
        made: list[Variable] = []
        try:
            spec = self._spec(session, exchange, body, fields, made)
            template = await read_aside(lambda: template_of(spec), len(body))
            return self._service.submit(session, spec, attended=not fields.defer, template=template)
        except BaseException:
            for variable in made:
                _discard(session, variable)
            raise

    def _spec(
        self,
        session: Session,
        exchange: Exchange,
        body: bytes,
        fields: SemanticFields,
        made: list[Variable],
    ) -> CallSpec:
        """The call as the service takes it; variables made for it are added to `made`."""
        context = None if fields.context is None else parse_context(fields.context)
        inputs: dict[str, Binding] = {}
        for name, source in fields.inputs.items():
            if isinstance(source, Given):
                inputs[name] = Binding(value=source.value)
                continue
            variable = self._variable(session, source, "inputs", made)
            inputs[name] = Binding(variable_id=variable.id)
        output = None
        if fields.output is not None:
            output = self._variable(session, fields.output, "output", made)
        elif fields.defer:
            output = session.anonymous_variable()
            made.append(output)
        return CallSpec(
            path=exchange.path,
            body=body,
            inputs=inputs,
            output=None if output is None else output.id,
            context=context,
            transform=fields.transform,
            objective=fields.objective,
            priority=fields.priority,
            dedupe=fields.dedupe and context is None,
            name=fields.name,
            run=fields.run,
            parent=fields.parent,
            group=fields.group,
            origin=list(exchange.scope["headers"]),
            origin_bytes=size_of_headers(exchange.scope["headers"]),
        )

    def _variable(
        self, session: Session, source: str, param: str, made: list[Variable]
    ) -> Variable:
        before = session.num_variables
        variable = self._service.variable(session, source, param)
        if session.num_variables > before:
            made.append(variable)
        return variable

    def _session(
        self,
        exchange: Exchange,
        body: bytes,
        fields: SemanticFields,
        variables: Collection[str],
    ) -> Session:
        """The session that the request names, else that of the first variable it refers to."""
        tenant = tenant_of(exchange)
        name = fields.session
        if name is None:
            identity = identify(exchange.scope["headers"], body)
            name = None if identity is None else identity.name
        if name is None and fields.context is not None:
            raise InvalidRequestError(
                "A context belongs to a session: name it (X-Parrot-Session, or parrot.session).",
                param="session",
                code="missing_required_parameter",
            )
        if name is None:
            for variable_id in sorted(variables):
                variable = self._service.sessions.variable(tenant, variable_id)
                owner = self._service.sessions.owner_of(variable)
                if owner is not None:
                    return owner
        return self._service.session(tenant, name)

    # -- deferred ---------------------------------------------------------------------------

    async def _answer_deferred(self, exchange: Exchange, call: _Call, job: Job) -> None:
        assert job.output is not None
        text, model = reference_of(job.output.id), call.model or ""
        headers = _headers(job)
        if call.stream:
            options = call.stream_options
            usage = options is not None and bool(options.include_usage)
            events = deferred_stream(exchange.path, job.id, model, text, include_usage=usage)
            await exchange.respond(200, events, [*EVENT_STREAM, *headers])
            return
        answer = deferred_answer(exchange.path, job.id, model, text)
        await exchange.respond(200, msgspec.json.encode(answer), headers)

    # -- attended ---------------------------------------------------------------------------

    async def _attend(self, exchange: Exchange, stream: bool, job: Job, ordinary: Answerer) -> None:
        executor = self._service.executor
        task = asyncio.current_task()
        assert task is not None
        headers = _headers(job)
        tee = ResponseObserver(exchange, job, headers, self._service.clock)
        exchange.cancel_on_disconnect(task)
        try:
            await self._wait_for_inputs(job, tee, stream)
            if job.node.is_finished:
                raise job.client_error()
            job.task = task
            executor.begin(job)
            tee.waited_s = time.perf_counter() - exchange.started
            exchange.metadata = metadata_of(job, self._service.objectives, tenant_of(exchange))
            await ordinary(exchange, job.render())
            # The answer is out: a client that leaves now leaves in good order.
            exchange.finish()
            try:
                tee.finish()
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

    async def _wait_for_inputs(self, job: Job, tee: ResponseObserver, stream: bool) -> None:
        keep_alive_s = self._gateway.settings.server.keep_alive_s if stream else None
        changed = job.changed()
        while not changed.done():
            await asyncio.wait({changed}, timeout=keep_alive_s)
            if stream and not changed.done():
                await tee.keep_alive()


def _discard(session: Session, variable: Variable) -> None:
    """Forget a variable that was made for a call that is not to be."""
    if session.get(variable.id) is variable and not variable.num_listeners:
        try:
            session.delete(variable.id)
        except GatewayError:
            return


def _headers(job: Job) -> Headers:
    headers = [
        (b"x-parrot-session", job.session.id.encode()),
        (b"x-parrot-call", job.id.encode()),
    ]
    if job.output is not None:
        headers.append((b"x-parrot-variable", job.output.id.encode()))
    return headers
