"""Routes a call by its `model`: to engines of our own, or to an upstream.

Reads `model` and `stream` only; the body is decoded where an own engine answers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import partial

from parrot_gateway.api.anthropic.chat_request import count_tokens_request, messages_request
from parrot_gateway.api.anthropic.shape import AnthropicShape, openai_headers
from parrot_gateway.api.anthropic.token_count import count_on_upstream
from parrot_gateway.api.call_shape import CallShape
from parrot_gateway.api.event_stream import answer_call
from parrot_gateway.api.ignored_fields import name_ignored
from parrot_gateway.api.openai.embeddings import handle_embeddings
from parrot_gateway.api.openai.rerank import handle_rerank, handle_score
from parrot_gateway.api.responses.routes import ResponseRoutes
from parrot_gateway.api.semantic.calls import CallContext, SemanticCalls
from parrot_gateway.api.semantic.fields import MARKER, PREFIX, may_be_semantic, read_fields
from parrot_gateway.api.semantic.identity import SessionIdentity
from parrot_gateway.api.semantic.recorded_exchange import (
    RECORDED_ROUTES,
    RecordedExchange,
    RecordedExchanges,
)
from parrot_gateway.api.upstream.passthrough import ForwardedCall, envelope_of, forward_any
from parrot_gateway.backends.own.placement import Placer
from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.backends.upstreams.answer import upstream_body
from parrot_gateway.backends.upstreams.client import UpstreamClient
from parrot_gateway.calls.metadata import ORDINARY_CALL, CallMetadata
from parrot_gateway.calls.requests.call import (
    MAX_INLINE_BYTES,
    CallKind,
    CallRequest,
    PreparationTurns,
    in_thread_if_large,
    prepare,
)
from parrot_gateway.calls.requests.chat import ChatCall
from parrot_gateway.calls.responses.background import BackgroundTasks
from parrot_gateway.calls.responses.store import ResponseStore
from parrot_gateway.exceptions import (
    InvalidRequestError,
    NotFoundError,
    UnsupportedError,
    missing_parameter,
)
from parrot_gateway.http.dispatch import Handler
from parrot_gateway.http.exchange import Exchange, Headers
from parrot_gateway.linking.inferred_metadata import InferredMetadata, explained
from parrot_gateway.linking.service import LinkingService
from parrot_gateway.routing.model_directory import (
    EngineTarget,
    ModelDirectory,
    Target,
    UpstreamTarget,
)
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.semantic.templates.body_template import BodyTemplate, read_template
from parrot_gateway.semantic.templates.reference import has_reference
from parrot_gateway.settings.model import ServerSettings

#: Other routes whose texts may hold references, and what kind of request they take.
_REFERENCING = {"/v1/responses": "responses", "/v1/embeddings": "embeddings"}

#: By path, who answers for models of own engines that make vectors and scores.
POOLING_ROUTES: dict[str, Callable[[Exchange, Placer, str, bytes, float], Awaitable[None]]] = {
    "/v1/embeddings": handle_embeddings,
    "/v1/rerank": handle_rerank,
    "/v1/score": handle_score,
    "/v2/rerank": handle_rerank,
    "/rerank": handle_rerank,
    "/score": handle_score,
}

#: Names of headers that are remembered as ordinary, and bytes of each.
_MAX_ORDINARY_HEADERS = 256
_MAX_ORDINARY_HEADER_BYTES = 64

#: Where a response that was made in the background is fetched.
_RESPONSE = re.compile(r"/v1/responses/([^/]+)")

_ORDINARY = CallContext()
_KINDS: dict[str, CallKind] = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}


class CallRoutes:
    """The handlers of the hot paths.

    Args:
        models: who serves which.
        service: the sessions.
        store: what is kept of responses.
        background: responses that are made while no client waits.
        server: bounds and deadlines.
        linking: infers edges and sessions.
        inferred: what the scheduler gets to know of calls by that.
        identity: what names the sessions of calls.
    """

    def __init__(
        self,
        models: ModelDirectory,
        service: SemanticService,
        store: ResponseStore,
        background: BackgroundTasks,
        server: ServerSettings,
        linking: LinkingService,
        inferred: InferredMetadata,
        identity: Sequence[str],
    ) -> None:
        self._models = models
        self._linking = linking
        self._inferred = inferred
        self._service = service
        self._server = server
        #: Names of headers seen so far that neither are ours nor may name a session.
        self._ordinary_headers: set[bytes] = set()
        self._turns = PreparationTurns()
        self._identity = SessionIdentity(identity)
        self._recorded = RecordedExchanges(self._identity, service)
        self._semantic = SemanticCalls(
            service, models, self._identity, linking, keep_alive_s=server.keep_alive_s,
            answer_call=self._answer,
        )  # fmt: skip
        self._responses = ResponseRoutes(
            models, store, background, server, self._recorded, linking, inferred
        )
        #: `POST /v1/completions` and `POST /v1/chat/completions`.
        self.completions: Handler = partial(self._call, "completions")
        self.chat_completions: Handler = partial(self._call, "chat")

    async def unattended(self, exchange: Exchange) -> None:
        """Answer a request that no client waits for: chat, completion or response.

        Args:
            exchange: with the metadata of the call. Semantic fields are not looked for.
        """
        kind = _KINDS.get(exchange.path)
        if kind is None:
            await self.passthrough(exchange)
            return
        request = CallRequest(kind, await exchange.body(self._server.max_body_bytes))
        await self._answer(exchange, request, CallContext(exchange.metadata))

    async def tokenize(self, exchange: Exchange) -> None:
        """`POST /tokenize` and `POST /detokenize`: models of our own engines only."""
        from parrot_gateway.api.openai.tokenize import handle_detokenize, handle_tokenize

        body = await exchange.body(self._server.max_body_bytes)
        engine = await self._own_engine(CallRequest("completions", body).head.model)
        handle = handle_tokenize if exchange.path == "/tokenize" else handle_detokenize
        await handle(exchange, engine, body)

    async def passthrough(self, exchange: Exchange, body: bytes | None = None) -> None:
        """Any other route under `/v1/`: goes to the upstream of the model that it names, or to the
        first upstream when it names none. Texts that hold references get the values.

        Args:
            body: where it has been read.
        """
        upstreams = self._models.upstreams
        is_stateful = exchange.path.startswith(("/v1/responses", "/v1/conversations"))
        is_pooled = exchange.method == "POST" and exchange.path in POOLING_ROUTES
        if not (upstreams or is_stateful or is_pooled):
            raise _unknown_route(exchange)
        if body is None:
            body = await exchange.body(self._server.max_body_bytes)
        if exchange.method == "GET" and (found := _RESPONSE.fullmatch(exchange.path)):
            self._linking.observe_response(exchange, found[1])
        if is_stateful and await self._responses.answer(exchange, body):
            return
        body = await self._with_values(exchange, body)
        envelope = await in_thread_if_large(lambda: envelope_of(exchange, body), len(body))
        name = envelope.model
        if name is None and is_pooled:
            # As calls are read: whatever the content type says.
            name = await in_thread_if_large(
                lambda: _model_of(body, lenient=bool(upstreams)), len(body)
            )
        if name is None:
            if not upstreams:
                raise missing_parameter("model") if is_pooled else _unknown_route(exchange)
            first = self._upstream(next(iter(upstreams)), exchange, body)
            await forward_any(ForwardedCall(exchange, first, body, self._server.call_timeout_s))
            return
        kind = RECORDED_ROUTES.get(exchange.path) if exchange.method == "POST" else None
        if kind is None:
            await self._pass_any(exchange, name, name, body, frozenset())
            return
        recorded = self._recorded.begin(exchange, kind, name, envelope)
        with recorded or nullcontext():
            answer = partial(self._pass_any, exchange, name, name, body, frozenset(), recorded)
            await self._linked(exchange, body, answer, recorded)

    async def _with_values(self, exchange: Exchange, body: bytes) -> bytes:
        """The body with values in place of the references in its texts, once all are there.

        Raises:
            VariableNotFoundError, DependencyFailedError, DeadlineError: as `Readers.value`.
        """
        kind = _REFERENCING.get(exchange.path)
        if kind is None or not has_reference(body):
            return body
        template = await read_template(lambda: BodyTemplate.of(body, kind), len(body))
        if template.is_constant:
            return body
        exchange.cancel_on_disconnect()
        service = self._service
        return await service.resolve(exchange.tenant, template, service.call_timeout_s)

    async def _pass_any(
        self,
        exchange: Exchange,
        requested: str,
        model: str,
        body: bytes,
        tried: frozenset[str],
        recorded: RecordedExchange | None = None,
    ) -> None:
        """Pass a call of `model` on; `tried` as in `_answer`."""
        target = self._models.resolve(model)
        exchange.record.model, exchange.record.served_model = requested, target.model
        if isinstance(target, EngineTarget):
            if exchange.method == "POST" and exchange.path in POOLING_ROUTES:
                await self._pool(exchange, target.model, requested, body)
                return
            if await self._responses.generate(exchange, target.model, requested, body, recorded):
                return
            raise UnsupportedError(
                f"The model '{model}' is run by this gateway's own engine, which does not offer "
                f"{exchange.path}.",
                param="model",
                code="unsupported_route",
            )

        async def fall_back(other: str) -> None:
            tried_now = tried | {target.upstream}
            await self._pass_any(exchange, requested, other, body, tried_now, recorded)

        context = _context_of(recorded)
        await forward_any(
            ForwardedCall(
                exchange,
                self._upstream(target.upstream, exchange, body, context.metadata),
                body,
                self._server.call_timeout_s,
                None if target.upstream in tried else fall_back,
                context.observers,
            ),
            model=target.model,
            requested_model=requested,
            on_first=None if recorded is None else recorded.read_first,
        )

    async def pooling(self, exchange: Exchange) -> None:
        """Embeddings, rerank and score under paths that other servers have for them, outside
        `/v1/`: models of our own engines only."""
        body = await exchange.body(self._server.max_body_bytes)
        name = CallRequest("completions", body).head.model
        engine = await self._own_engine(name, "which is asked at paths under /v1/")
        model = engine.info.model
        await self._pool(exchange, model, name or model, body)

    async def _pool(self, exchange: Exchange, model: str, requested: str, body: bytes) -> None:
        exchange.record.model, exchange.record.served_model = requested, model
        exchange.cancel_on_disconnect()
        await self._models.loaded(model)
        metadata = exchange.metadata
        if self._models.explains:
            metadata = explained(exchange, metadata)
        placer = self._models.placer(model, metadata)
        deadline = exchange.started + self._server.call_timeout_s
        handle = POOLING_ROUTES[exchange.path]
        await handle(exchange, placer, requested, body, deadline)

    async def messages(self, exchange: Exchange) -> None:
        """`POST /v1/messages`: Anthropic's API, on any model."""
        request = CallRequest("chat", await exchange.body(self._server.max_body_bytes))
        if request.size > MAX_INLINE_BYTES:
            await asyncio.to_thread(lambda: request.semantic_head)
        exchange.record.model = model = request.model
        if may_be_semantic(exchange.scope["headers"], request.body):
            target = self._models.resolve(model)
            if not self._is_passed(target):
                chat, shape = await self._chat_of(exchange, request, target)
                if await self._semantic.answer(exchange, chat, shape):
                    return
            elif not read_fields(exchange.scope["headers"], request.known_fields).is_empty:
                raise UnsupportedError(
                    f"Semantic variables are not offered for the model '{model}', whose upstream "
                    "gets its requests unchanged (setting upstreams.api).",
                    param="parrot",
                )
        recorded = self._recorded.begin(exchange, "messages", model, request.semantic_head)
        context = _context_of(recorded)
        with recorded or nullcontext():
            answer = partial(self._message, exchange, request, context, model, frozenset())
            await self._linked(exchange, request.body, answer, recorded)

    def _is_passed(self, target: Target) -> bool:
        """Return whether a request of Anthropic's API goes there unchanged."""
        if isinstance(target, EngineTarget):
            return False
        return self._models.upstreams[target.upstream].settings.api == "anthropic"

    async def _message(
        self,
        exchange: Exchange,
        request: CallRequest,
        context: CallContext,
        model: str,
        tried: frozenset[str],
    ) -> None:
        """Answer a request as received with a message of `model`; `tried` as in `_answer`."""
        target = self._models.resolve(model)
        exchange.record.served_model = target.model
        if isinstance(target, EngineTarget) or not self._is_passed(target):
            chat, shape = await self._chat_of(exchange, request, target)
            await self._answer(exchange, chat, context._replace(shape=shape), model, tried)
            return

        async def fall_back(other: str) -> None:
            await self._message(exchange, request, context, other, tried | {target.upstream})

        await forward_any(
            ForwardedCall(
                exchange,
                self._upstream(target.upstream, exchange, request.body, context.metadata),
                request.body,
                self._server.call_timeout_s,
                None if target.upstream in tried else fall_back,
                context.observers,
            ),
            model=target.model,
            requested_model=request.model,
        )

    async def _chat_of(
        self, exchange: Exchange, request: CallRequest, target: Target
    ) -> tuple[CallRequest, CallShape]:
        """A request of Anthropic's API as the chat for whoever answers it, and how that is
        written."""
        served = None
        if isinstance(target, EngineTarget):
            served = await self._models.loaded_engine(target.model)
        call = await in_thread_if_large(lambda: messages_request(request, served), request.size)
        name_ignored(exchange, call.ignored)
        return call.chat, AnthropicShape(call.display)

    async def count_tokens(self, exchange: Exchange) -> None:
        """`POST /v1/messages/count_tokens`, on any model; upstreams are asked."""
        request = CallRequest("chat", await exchange.body(self._server.max_body_bytes))
        if request.size > MAX_INLINE_BYTES:
            await asyncio.to_thread(lambda: request.semantic_head)
        target = self._models.resolve(request.model)
        if self._is_passed(target):
            await self._message(exchange, request, _ORDINARY, request.model, frozenset())
            return
        for_upstream = not isinstance(target, EngineTarget)
        read = partial(count_tokens_request, request, for_upstream=for_upstream)
        chat = await in_thread_if_large(read, request.size)
        name_ignored(exchange, chat.ignored)
        if isinstance(target, EngineTarget):
            call = prepare(chat.chat, await self._models.loaded_engine(target.model))
            assert isinstance(call, ChatCall)
            count = await call.count_tokens()
        else:
            exchange.cancel_on_disconnect()
            count = await count_on_upstream(
                self._upstream(target.upstream, exchange, request.body),
                target.model,
                request,
                chat.chat,
                openai_headers(exchange.scope["headers"]),
                self._server.call_timeout_s,
            )
        await exchange.respond_json({"input_tokens": count})

    async def _call(self, kind: CallKind, exchange: Exchange) -> None:
        body = await exchange.body(self._server.max_body_bytes)
        request = CallRequest(kind, body)
        if (
            request.size <= MAX_INLINE_BYTES
            and exchange.headers.keys() <= self._ordinary_headers
            and MARKER.search(body) is None
            and not request.head.may_name_session
        ):
            linking = self._linking
            observed = linking.observe(exchange, body) if linking.is_running else None
            if observed is None:
                await self._answer(exchange, request, _ORDINARY)
                return
            with observed:
                if linking.names_sessions:
                    await linking.name_session(exchange, observed)
                await self._answer(exchange, request, _ORDINARY)
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
        if is_semantic and await self._semantic.answer(exchange, request):
            return
        recorded = self._recorded.begin(exchange, kind, request.model, request.head)
        with recorded or nullcontext():
            answer = partial(self._answer, exchange, request, _context_of(recorded))
            await self._linked(exchange, request.body, answer, recorded)

    async def _linked(
        self,
        exchange: Exchange,
        body: bytes,
        answer: Callable[[], Awaitable[None]],
        recorded: RecordedExchange | None = None,
    ) -> None:
        """Answer a call, and let the linker know what it and its answer say."""
        if not self._linking.is_running:
            await answer()
        elif recorded is None:
            await self._linking.follow(exchange, body, answer)
        else:
            node = recorded.call.node
            await self._linking.follow(exchange, body, answer, node.session_id, node.id)

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

    def _answer(
        self,
        exchange: Exchange,
        request: CallRequest,
        context: CallContext,
        model: str | None = None,
        tried: frozenset[str] = frozenset(),
    ) -> Awaitable[None]:
        """The answering of a call, to be awaited.

        Args:
            model: other than the one that the request names.
            tried: the upstreams that could not, so that fallbacks end.
        """
        record = exchange.record
        record.model = requested = request.model
        target = self._models.resolve(model or requested)
        record.served_model = target.model
        if isinstance(target, EngineTarget):
            return self._generate(exchange, request, target.model, context)
        return self._forward(exchange, request, target, context, tried)

    async def _forward(
        self,
        exchange: Exchange,
        request: CallRequest,
        target: UpstreamTarget,
        context: CallContext,
        tried: frozenset[str],
    ) -> None:
        """Let an upstream answer; arguments as of `_answer`."""

        async def fall_back(other: str) -> None:
            await self._answer(exchange, request, context, other, tried | {target.upstream})

        upstream = self._upstream(target.upstream, exchange, request.body, context.metadata)
        body = await in_thread_if_large(
            lambda: upstream_body(request, upstream, target.model, context.metadata), request.size
        )
        call = ForwardedCall(
            exchange,
            upstream,
            body,
            self._server.call_timeout_s,
            None if target.upstream in tried else fall_back,
            context.observers,
        )
        await context.shape.forward(request, call)

    def _upstream(
        self, name: str, exchange: Exchange, body: bytes, metadata: CallMetadata = ORDINARY_CALL
    ) -> UpstreamClient:
        """An upstream for one call, of which no more may be known than what its body tells."""

        def known() -> CallMetadata:
            if metadata is ORDINARY_CALL and self._linking.is_running:
                return explained(exchange, self._inferred.at_once(exchange, body))
            return explained(exchange, metadata)

        return self._models.upstream(name, known)

    async def _generate(
        self, exchange: Exchange, request: CallRequest, model: str, context: CallContext
    ) -> None:
        """Answer with an own engine.

        A client that goes away cancels the call: the current task is cancelled, and the engine's
        contexts are freed on the way out.

        Raises:
            GatewayError: nothing has been sent yet; a stream's later failures are reported in band.
        """
        exchange.cancel_on_disconnect()
        await self._models.loaded(model)
        metadata = context.metadata
        if metadata is ORDINARY_CALL and self._linking.is_running:
            metadata = await self._inferred.of(exchange, request.body)
        if self._models.explains:
            metadata = explained(exchange, metadata)
        placer = self._models.placer(model, metadata)
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
            deadline=exchange.started + self._server.call_timeout_s,
            keep_alive_s=self._server.keep_alive_s,
            observers=context.observers,
        )

    async def _own_engine(
        self, name: str | None, why: str = "whose tokenizer this gateway does not have"
    ) -> RemoteEngine:
        """The engine of a model; of the only one there is where none is named.

        Args:
            why: an upstream's model will not do, behind its name.
        """
        if name is None:
            models = self._models.engine_models()
            if len(models) != 1:
                raise missing_parameter("model")
            return await self._models.loaded_engine(models[0])
        target = self._models.resolve(name)
        if not isinstance(target, EngineTarget):
            raise UnsupportedError(
                f"The model '{name}' belongs to the upstream '{target.upstream}', {why}.",
                param="model",
            )
        return await self._models.loaded_engine(target.model)


def _context_of(recorded: RecordedExchange | None) -> CallContext:
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


def _model_of(body: bytes, *, lenient: bool) -> str | None:
    """The model that a body names; `lenient`: none where it cannot be read."""
    try:
        return CallRequest("completions", body).head.model
    except InvalidRequestError:
        if lenient:
            return None
        raise


def _unknown_route(exchange: Exchange) -> NotFoundError:
    return NotFoundError(
        f"Unknown route: {exchange.method} {exchange.path}. This gateway's own are listed at "
        "/docs; others go to upstreams, of which it has none.",
        code="unknown_route",
    )
