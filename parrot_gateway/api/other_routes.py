"""All other routes under `/v1/`, and those for vectors, scores and tokens outside of it.

A request goes to whoever serves the model that it names; bytes pass unchanged to upstreams.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from parrot_gateway.api.calls import CallRoutes, context_of
from parrot_gateway.api.openai.embeddings import handle_embeddings
from parrot_gateway.api.openai.rerank import handle_rerank, handle_score
from parrot_gateway.api.openai.tokenize import handle_detokenize, handle_tokenize
from parrot_gateway.api.responses.routes import ResponseRoutes
from parrot_gateway.api.semantic.calls import CallContext
from parrot_gateway.api.semantic.fields import may_be_semantic
from parrot_gateway.api.semantic.recorded_exchange import RECORDED_ROUTES, RecordedExchange
from parrot_gateway.api.upstream.envelope import envelope_of
from parrot_gateway.api.upstream.passthrough import ForwardedCall, forward_any
from parrot_gateway.backends.own.placement import Placer
from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.backends.upstreams.failure import FailedAttempt, Returned
from parrot_gateway.calls.requests.call import CallKind, CallRequest, in_thread_if_large
from parrot_gateway.exceptions import (
    InvalidRequestError,
    NotFoundError,
    UnsupportedError,
    missing_parameter,
)
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.linking.inferred_metadata import explained
from parrot_gateway.routing.fallback import answer_with_fallbacks
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.semantic.templates.body_template import BodyTemplate, read_template
from parrot_gateway.semantic.templates.reference import has_reference

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

#: Where a response that was made in the background is fetched.
_RESPONSE = re.compile(r"/v1/responses/([^/]+)")

_KINDS: dict[str, CallKind] = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}


@dataclass(frozen=True)
class OtherRoutes:
    """The handlers of the other routes."""

    calls: CallRoutes
    responses: ResponseRoutes
    #: The sessions.
    service: SemanticService

    async def unattended(self, exchange: Exchange) -> None:
        """Answer a request that no client waits for: chat, completion or response.

        Args:
            exchange: with the metadata of the call. Semantic fields are not looked for.
        """
        kind = _KINDS.get(exchange.path)
        if kind is None:
            await self.passthrough(exchange)
            return
        request = CallRequest(kind, await exchange.body(self.calls.server.max_body_bytes))
        await self.calls.answer(exchange, request, CallContext(exchange.metadata))

    async def tokenize(self, exchange: Exchange) -> None:
        """`POST /tokenize` and `POST /detokenize`: models of our own engines only."""
        body = await exchange.body(self.calls.server.max_body_bytes)
        engine = await self._own_engine(CallRequest("completions", body).head.model)
        handle = handle_tokenize if exchange.path == "/tokenize" else handle_detokenize
        await handle(exchange, engine, body)

    async def passthrough(self, exchange: Exchange, body: bytes | None = None) -> None:
        """Any other route under `/v1/`: goes to the upstream of the model that it names, or to the
        first upstream when it names none. Texts that hold references get the values.

        Args:
            body: where it has been read.
        """
        upstreams = self.calls.models.upstreams
        is_stateful = exchange.path.startswith(("/v1/responses", "/v1/conversations"))
        is_pooled = exchange.method == "POST" and exchange.path in POOLING_ROUTES
        if not (upstreams or is_stateful or is_pooled):
            raise _unknown_route(exchange)
        if body is None:
            body = await exchange.body(self.calls.server.max_body_bytes)
        if exchange.path == "/v1/responses" and may_be_semantic(exchange.scope["headers"], body):
            self.calls.streams.adopt(exchange, CallRequest("chat", body))
        if exchange.method == "GET" and (found := _RESPONSE.fullmatch(exchange.path)):
            self.calls.linking.observe_response(exchange, found[1])
        if is_stateful and await self.responses.answer(exchange, body):
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
            first = self.calls.upstream(next(iter(upstreams)), exchange, body)
            await forward_any(
                ForwardedCall(exchange, first, body, self.calls.server.call_timeout_s)
            )
            return
        kind = RECORDED_ROUTES.get(exchange.path) if exchange.method == "POST" else None
        if kind is None:
            await self._answer(exchange, name, body)
            return
        recorded = self.calls.recorded.begin(exchange, kind, name, envelope)
        with recorded or nullcontext():
            answer = partial(self._answer, exchange, name, body, recorded)
            await self.calls.linked(exchange, body, answer, recorded)

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
        service = self.service
        return await service.resolve(exchange.tenant, template, service.call_timeout_s)

    async def _answer(
        self, exchange: Exchange, model: str, body: bytes, recorded: RecordedExchange | None = None
    ) -> None:
        exchange.record.model = model
        models = self.calls.models
        await answer_with_fallbacks(
            models, models.resolve(model), _PassedAttempts(self, exchange, model, body, recorded)
        )

    async def pooling(self, exchange: Exchange) -> None:
        """Embeddings, rerank and score under paths that other servers have for them, outside
        `/v1/`: models of our own engines only."""
        body = await exchange.body(self.calls.server.max_body_bytes)
        name = CallRequest("completions", body).head.model
        engine = await self._own_engine(name, "which is asked at paths under /v1/")
        model = engine.info.model
        await self.pool(exchange, model, name or model, body)

    async def pool(self, exchange: Exchange, model: str, requested: str, body: bytes) -> None:
        """Answer a request for vectors or scores with own engines."""
        exchange.record.model, exchange.record.served_model = requested, model
        exchange.cancel_on_disconnect()
        await self.calls.models.loaded(model)
        metadata = exchange.metadata
        if self.calls.models.explains:
            metadata = explained(exchange, metadata)
        placer = self.calls.models.placer(model, metadata)
        deadline = exchange.started + self.calls.server.call_timeout_s
        handle = POOLING_ROUTES[exchange.path]
        await handle(exchange, placer, requested, body, deadline)

    async def _own_engine(
        self, name: str | None, why: str = "whose tokenizer this gateway does not have"
    ) -> RemoteEngine:
        """The engine of a model; of the only one there is where none is named.

        Args:
            why: an upstream's model will not do, behind its name.
        """
        if name is None:
            models = self.calls.models.engine_models()
            if len(models) != 1:
                raise missing_parameter("model")
            return await self.calls.models.loaded_engine(models[0])
        target = self.calls.models.resolve(name)
        if target.upstream is not None:
            raise UnsupportedError(
                f"The model '{name}' belongs to the upstream '{target.upstream}', {why}.",
                param="model",
            )
        return await self.calls.models.loaded_engine(target.model)


@dataclass(frozen=True, slots=True)
class _PassedAttempts:
    """Answers one request by the route that it names; see `Attempts`."""

    routes: OtherRoutes
    exchange: Exchange
    #: As the request names it.
    requested: str
    body: bytes
    recorded: RecordedExchange | None

    async def on_engine(self, model: str) -> None:
        """See `Attempts`."""
        exchange, routes = self.exchange, self.routes
        exchange.record.served_model = model
        if exchange.method == "POST" and exchange.path in POOLING_ROUTES:
            await routes.pool(exchange, model, self.requested, self.body)
            return
        if await routes.responses.generate(
            exchange, model, self.requested, self.body, self.recorded
        ):
            return
        raise UnsupportedError(
            f"The model '{model}' is run by this gateway's own engine, which does not offer "
            f"{exchange.path}.",
            param="model",
            code="unsupported_route",
        )

    async def on_upstream(
        self, upstream: str, model: str, *, returned: Returned
    ) -> FailedAttempt | None:
        """See `Attempts`."""
        exchange, calls, recorded = self.exchange, self.routes.calls, self.recorded
        exchange.record.served_model = model
        context = context_of(recorded)
        call = ForwardedCall(
            exchange,
            calls.upstream(upstream, exchange, self.body, context.metadata),
            self.body,
            calls.server.call_timeout_s,
            returned,
            context.observers,
        )
        return await forward_any(
            call,
            model=model,
            requested_model=self.requested,
            on_first=None if recorded is None else recorded.read_first,
        )


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
