"""Chats and completions: routes a call by its `model` to engines of our own, or to an upstream.

Reads `model` and `stream` only; the body is decoded where an own engine answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial

from parrot_gateway.api.event_stream import answer_call
from parrot_gateway.api.ignored_fields import name_ignored
from parrot_gateway.api.semantic.calls import CallContext, SemanticCalls
from parrot_gateway.api.semantic.fields import MARKER, PREFIX, may_be_semantic
from parrot_gateway.api.semantic.identity import SessionIdentity
from parrot_gateway.api.semantic.recorded_exchange import RecordedExchange, RecordedExchanges
from parrot_gateway.api.streams.stream import Streams
from parrot_gateway.api.upstream.passthrough import ForwardedCall
from parrot_gateway.backends.upstreams.answer import upstream_body
from parrot_gateway.backends.upstreams.client import UpstreamClient
from parrot_gateway.backends.upstreams.failure import FailedAttempt, Returned
from parrot_gateway.calls.metadata import ORDINARY_CALL, CallMetadata
from parrot_gateway.calls.requests.call import (
    MAX_INLINE_BYTES,
    CallKind,
    CallRequest,
    PreparationTurns,
    in_thread_if_large,
    prepare,
)
from parrot_gateway.exceptions import InvalidRequestError
from parrot_gateway.http.dispatch import Handler
from parrot_gateway.http.exchange import Exchange, Headers
from parrot_gateway.linking.inferred_metadata import InferredMetadata, explained
from parrot_gateway.linking.service import LinkingService
from parrot_gateway.routing.fallback import answer_with_fallbacks
from parrot_gateway.routing.model_directory import ModelDirectory, Target
from parrot_gateway.routing.stream_failover import StreamFailover
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.settings.model import ServerSettings

#: Names of headers that are remembered as ordinary, and bytes of each.
_MAX_ORDINARY_HEADERS = 256
_MAX_ORDINARY_HEADER_BYTES = 64

_ORDINARY = CallContext()


class CallRoutes:
    """The handlers of chats and completions, and what the other routes share with them.

    Args:
        models: who serves which.
        service: the sessions.
        server: bounds and deadlines.
        linking: infers edges and sessions.
        inferred: what the scheduler gets to know of calls by that.
        streams: those that can be resumed.
        identity: what names the sessions of calls.
    """

    def __init__(
        self,
        models: ModelDirectory,
        service: SemanticService,
        server: ServerSettings,
        linking: LinkingService,
        inferred: InferredMetadata,
        streams: Streams,
        identity: Sequence[str],
    ) -> None:
        self.models = models
        self.server = server
        self.linking = linking
        self.inferred = inferred
        self.streams = streams
        #: Names of headers seen so far that neither are ours nor may name a session.
        self._ordinary_headers: set[bytes] = set()
        self._turns = PreparationTurns()
        self._identity = SessionIdentity(identity)
        self.recorded = RecordedExchanges(self._identity, service)
        self.semantic = SemanticCalls(
            service, models, self._identity, linking, keep_alive_s=server.keep_alive_s,
            answer_call=self.answer,
        )  # fmt: skip
        #: `POST /v1/completions` and `POST /v1/chat/completions`.
        self.completions: Handler = partial(self._call, "completions")
        self.chat_completions: Handler = partial(self._call, "chat")

    async def _call(self, kind: CallKind, exchange: Exchange) -> None:
        body = await exchange.body(self.server.max_body_bytes)
        request = CallRequest(kind, body)
        if (
            request.size <= MAX_INLINE_BYTES
            and exchange.headers.keys() <= self._ordinary_headers
            and MARKER.search(body) is None
            and not request.head.may_name_session
        ):
            linking = self.linking
            observed = linking.observe(exchange, body) if linking.is_running else None
            if observed is None:
                await self.answer(exchange, request, _ORDINARY)
                return
            with observed:
                if linking.names_sessions:
                    await linking.name_session(exchange, observed)
                await self.answer(exchange, request, _ORDINARY)
        else:
            await self._answer_in_session(kind, exchange, request)

    async def _answer_in_session(
        self, kind: CallKind, exchange: Exchange, request: CallRequest
    ) -> None:
        """Answer a call that may be semantic, or name a session in which it is recorded."""
        self._note_ordinary(exchange.headers)
        headers = exchange.scope["headers"]
        if request.size <= MAX_INLINE_BYTES:
            is_semantic = may_be_semantic(headers, request.body)
        else:
            is_semantic = await asyncio.to_thread(_read_large, headers, request)
        if is_semantic:
            self.streams.adopt(exchange, request)
            if await self.semantic.answer(exchange, request):
                return
        recorded = self.recorded.begin(exchange, kind, request.model, request.head)
        with recorded or nullcontext():
            answer = partial(self.answer, exchange, request, context_of(recorded))
            await self.linked(exchange, request.body, answer, recorded)

    async def linked(
        self,
        exchange: Exchange,
        body: bytes,
        answer: Callable[[], Awaitable[None]],
        recorded: RecordedExchange | None = None,
    ) -> None:
        """Answer a call, and let the linker know what it and its answer say."""
        if not self.linking.is_running:
            await answer()
        elif recorded is None:
            await self.linking.follow(exchange, body, answer)
        else:
            node = recorded.call.node
            await self.linking.follow(exchange, body, answer, node.session_id, node.id)

    def _note_ordinary(self, headers: Iterable[bytes]) -> None:
        """Remember names of headers that mean nothing here; there are few, as clients make them."""
        for name in headers:
            if (
                len(name) <= _MAX_ORDINARY_HEADER_BYTES
                and len(self._ordinary_headers) < _MAX_ORDINARY_HEADERS
                and not name.startswith(PREFIX)
                and not self._identity.reads(name)
            ):
                self._ordinary_headers.add(name)

    def answer(
        self, exchange: Exchange, request: CallRequest, context: CallContext
    ) -> Awaitable[None]:
        """The answering of a call, to be awaited."""
        exchange.record.model = request.model
        target = self.models.resolve(request.model)
        attempts = CallAttempts(self, exchange, request, context)
        if target.upstream is None:
            return attempts.on_engine(target.model)
        return answer_with_fallbacks(self.models, target, attempts)

    def upstream(
        self, name: str, exchange: Exchange, body: bytes, metadata: CallMetadata = ORDINARY_CALL
    ) -> UpstreamClient:
        """An upstream for one call, of which no more may be known than what its body tells."""
        return self.models.upstream(name, lambda: self._known(exchange, body, metadata))

    def _known(self, exchange: Exchange, body: bytes, metadata: CallMetadata) -> CallMetadata:
        if metadata is ORDINARY_CALL and self.linking.is_running:
            return explained(exchange, self.inferred.at_once(exchange, body))
        return explained(exchange, metadata)

    def failover(
        self, target: Target, exchange: Exchange, request: CallRequest, metadata: CallMetadata
    ) -> StreamFailover | None:
        """Find what goes on with a stream of an upstream that breaks off; None: nothing does."""
        settings = self.models.upstreams[target.upstream or ""].settings
        if settings.stream_failure.mode == "terminate" or not request.head.stream:
            return None
        return StreamFailover(
            self.models,
            target,
            request,
            lambda: self._known(exchange, request.body, metadata),
            exchange.started + self.server.call_timeout_s,
        )

    async def generate(
        self, exchange: Exchange, request: CallRequest, model: str, context: CallContext
    ) -> None:
        """Answer with an own engine.

        A client that goes away cancels the call: the current task is cancelled, and the engine's
        contexts are freed on the way out.

        Raises:
            GatewayError: nothing has been sent yet; a stream's later failures are reported in band.
        """
        exchange.cancel_on_disconnect()
        await self.models.loaded(model)
        metadata = context.metadata
        if metadata is ORDINARY_CALL and self.linking.is_running:
            metadata = await self.inferred.of(exchange, request.body)
        if self.models.explains:
            metadata = explained(exchange, metadata)
        placer = self.models.placer(model, metadata)
        await self._turns.wait()
        if request.size > MAX_INLINE_BYTES:
            await asyncio.to_thread(lambda: request.typed)
        call = prepare(request, placer, context.checked)
        if request.ignored or call.ignored:
            name_ignored(exchange, (*request.ignored, *call.ignored))
        generation_request = await call.generation_request(metadata.salt)
        await answer_call(
            exchange,
            placer,
            generation_request,
            context.shape.answers[request.kind](
                call.request, placer, request.model, generation_request
            ),
            stream=bool(call.request.stream),
            deadline=exchange.started + self.server.call_timeout_s,
            keep_alive_s=self.server.keep_alive_s,
            observers=context.observers,
        )


@dataclass(frozen=True, slots=True)
class CallAttempts:
    """Answers one chat or completion; see `Attempts`."""

    routes: CallRoutes
    exchange: Exchange
    request: CallRequest
    context: CallContext

    def on_engine(self, model: str) -> Awaitable[None]:
        """See `Attempts`."""
        self.exchange.record.served_model = model
        return self.routes.generate(self.exchange, self.request, model, self.context)

    async def on_upstream(
        self, upstream: str, model: str, *, returned: Returned
    ) -> FailedAttempt | None:
        """See `Attempts`."""
        routes, exchange, request, context = self.routes, self.exchange, self.request, self.context
        exchange.record.served_model = model
        client = routes.upstream(upstream, exchange, request.body, context.metadata)
        body = await in_thread_if_large(
            lambda: upstream_body(request, client, model, context.metadata), request.size
        )
        call = ForwardedCall(
            exchange,
            client,
            body,
            routes.server.call_timeout_s,
            returned,
            context.observers,
            routes.failover(Target(model, upstream), exchange, request, context.metadata),
        )
        return await context.shape.forward(request, call)


def context_of(recorded: RecordedExchange | None) -> CallContext:
    """Surroundings of an ordinary call, or of one that is recorded."""
    if recorded is None:
        return _ORDINARY
    return CallContext(recorded.call.metadata, (recorded.call,))


def _read_large(headers: Headers, request: CallRequest) -> bool:
    """`may_be_semantic`; what everybody reads of the body is then decoded."""
    if not may_be_semantic(headers, request.body):
        _ = request.head
        return False
    with suppress(InvalidRequestError):
        _ = request.known_fields, request.semantic_head
    return True
