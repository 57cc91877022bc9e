"""`/v1/messages` and its token counts: Anthropic's API, on any model.

Own engines and upstreams that speak OpenAI's API get a chat; to others the request goes unchanged.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from parrot_gateway.api.anthropic.chat_request import count_tokens_request, messages_request
from parrot_gateway.api.anthropic.shape import AnthropicShape, openai_headers
from parrot_gateway.api.anthropic.token_count import count_on_upstream
from parrot_gateway.api.calls import CallAttempts, CallRoutes, context_of
from parrot_gateway.api.ignored_fields import name_ignored
from parrot_gateway.api.semantic.calls import CallContext
from parrot_gateway.api.semantic.fields import may_be_semantic, read_fields
from parrot_gateway.api.upstream.passthrough import ForwardedCall, forward_any
from parrot_gateway.backends.upstreams.failure import FailedAttempt, Returned, reason_of_error
from parrot_gateway.calls.requests.call import (
    MAX_INLINE_BYTES,
    CallRequest,
    in_thread_if_large,
    prepare,
)
from parrot_gateway.calls.requests.chat import ChatCall
from parrot_gateway.exceptions import OverloadedError, UnsupportedError, UpstreamError
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.routing.fallback import answer_with_fallbacks
from parrot_gateway.routing.model_directory import Target


@dataclass(frozen=True)
class MessageRoutes:
    """The handlers of Anthropic's API."""

    calls: CallRoutes

    async def messages(self, exchange: Exchange) -> None:
        """`POST /v1/messages`."""
        calls, request = self.calls, await self._request(exchange)
        exchange.record.model = model = request.model
        if may_be_semantic(exchange.scope["headers"], request.body):
            calls.streams.adopt(exchange, request)
            target = calls.models.resolve(model)
            if not self.is_passed(target.upstream):
                chat, shape = await self.chat_of(exchange, request, target)
                if await calls.semantic.answer(exchange, chat, shape):
                    return
            elif not read_fields(exchange.scope["headers"], request.known_fields).is_empty:
                raise UnsupportedError(
                    f"Semantic variables are not offered for the model '{model}', whose upstream "
                    "gets its requests unchanged (setting upstreams.api).",
                    param="parrot",
                )
        recorded = calls.recorded.begin(exchange, "messages", model, request.semantic_head)
        with recorded or nullcontext():
            answer = partial(self._answer, exchange, request, context_of(recorded))
            await calls.linked(exchange, request.body, answer, recorded)

    async def count_tokens(self, exchange: Exchange) -> None:
        """`POST /v1/messages/count_tokens`; upstreams are asked."""
        models, request = self.calls.models, await self._request(exchange)
        target = models.resolve(request.model)
        await answer_with_fallbacks(models, target, _CountAttempts(self, exchange, request))

    async def _request(self, exchange: Exchange) -> CallRequest:
        request = CallRequest("chat", await exchange.body(self.calls.server.max_body_bytes))
        if request.size > MAX_INLINE_BYTES:
            await asyncio.to_thread(lambda: request.semantic_head)
        return request

    async def _answer(self, exchange: Exchange, request: CallRequest, context: CallContext) -> None:
        models = self.calls.models
        target = models.resolve(request.model)
        await answer_with_fallbacks(
            models, target, _MessageAttempts(self, exchange, request, context)
        )

    def is_passed(self, upstream: str | None) -> bool:
        """Return whether a request goes there unchanged."""
        if upstream is None:
            return False
        return self.calls.models.upstreams[upstream].settings.api == "anthropic"

    async def forward(
        self,
        exchange: Exchange,
        request: CallRequest,
        context: CallContext,
        upstream: str,
        model: str,
        returned: Returned,
    ) -> FailedAttempt | None:
        """Pass a request on unchanged; see `Attempts.on_upstream`."""
        calls = self.calls
        call = ForwardedCall(
            exchange,
            calls.upstream(upstream, exchange, request.body, context.metadata),
            request.body,
            calls.server.call_timeout_s,
            returned,
            context.observers,
        )
        return await forward_any(call, model=model, requested_model=request.model)

    async def chat_of(
        self, exchange: Exchange, request: CallRequest, target: Target
    ) -> tuple[CallRequest, AnthropicShape]:
        """A request as the chat for whoever answers it, and how that is written."""
        served = None
        if target.upstream is None:
            served = await self.calls.models.loaded_engine(target.model)
        call = await in_thread_if_large(lambda: messages_request(request, served), request.size)
        name_ignored(exchange, call.ignored)
        return call.chat, AnthropicShape(call.display)


@dataclass(frozen=True, slots=True)
class _MessageAttempts:
    """Answers one request as received with a message; see `Attempts`."""

    routes: MessageRoutes
    exchange: Exchange
    request: CallRequest
    context: CallContext

    async def on_engine(self, model: str) -> None:
        """See `Attempts`."""
        await (await self._as_chat(Target(model))).on_engine(model)

    async def on_upstream(
        self, upstream: str, model: str, *, returned: Returned
    ) -> FailedAttempt | None:
        """See `Attempts`."""
        if not self.routes.is_passed(upstream):
            chat = await self._as_chat(Target(model, upstream))
            return await chat.on_upstream(upstream, model, returned=returned)
        self.exchange.record.served_model = model
        return await self.routes.forward(
            self.exchange, self.request, self.context, upstream, model, returned
        )

    async def _as_chat(self, target: Target) -> CallAttempts:
        chat, shape = await self.routes.chat_of(self.exchange, self.request, target)
        context = self.context._replace(shape=shape)
        return CallAttempts(self.routes.calls, self.exchange, chat, context)


@dataclass(frozen=True, slots=True)
class _CountAttempts:
    """Counts the tokens of one message; see `Attempts`."""

    routes: MessageRoutes
    exchange: Exchange
    request: CallRequest

    async def on_engine(self, model: str) -> None:
        """See `Attempts`."""
        chat = await self._chat(for_upstream=False)
        call = prepare(chat, await self.routes.calls.models.loaded_engine(model))
        assert isinstance(call, ChatCall)
        await self.exchange.respond_json({"input_tokens": await call.count_tokens()})

    async def on_upstream(
        self, upstream: str, model: str, *, returned: Returned
    ) -> FailedAttempt | None:
        """See `Attempts`."""
        routes, exchange, request = self.routes, self.exchange, self.request
        if routes.is_passed(upstream):
            return await routes.forward(
                exchange, request, context_of(None), upstream, model, returned
            )
        chat = await self._chat(for_upstream=True)
        exchange.cancel_on_disconnect()
        try:
            count = await count_on_upstream(
                routes.calls.upstream(upstream, exchange, request.body),
                model,
                request,
                chat,
                openai_headers(exchange.scope["headers"]),
                routes.calls.server.call_timeout_s,
            )
        except (UpstreamError, OverloadedError) as error:
            if returned == "nothing":
                raise
            failed = FailedAttempt(error, reason_of_error(error))
            exchange.record.note_failed(upstream, failed.reason)
            return failed
        await exchange.respond_json({"input_tokens": count})
        return None

    async def _chat(self, *, for_upstream: bool) -> CallRequest:
        read = partial(count_tokens_request, self.request, for_upstream=for_upstream)
        chat = await in_thread_if_large(read, self.request.size)
        name_ignored(self.exchange, chat.ignored)
        return chat.chat
