"""From a call's `model` to whoever answers it: engines of our own, or an upstream.

Reads `model` and `stream` only; the handlers it hands over to decode the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

import msgspec

from parrot_gateway.api.placement import placer_for
from parrot_gateway.api.responses.routes import ResponseRoutes
from parrot_gateway.api.semantic.internal import Answerer, InternalRunner
from parrot_gateway.api.semantic.routing import SemanticCalls
from parrot_gateway.api.upstream.passthrough import forward, forward_any, model_of
from parrot_gateway.engines.catalog import EngineTarget
from parrot_gateway.engines.remote import RemoteEngine
from parrot_gateway.exceptions import NotFoundError, UnsupportedError
from parrot_gateway.generation.placement import Placer, salt_of
from parrot_gateway.generation.requests.validation import decode, missing_parameter
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.http.tenants import tenant_of
from parrot_gateway.semantic.templates.body_template import BodyTemplate, read_aside
from parrot_gateway.semantic.templates.prompt_locations import PROMPT_LOCATIONS
from parrot_gateway.semantic.templates.reference import has_reference
from parrot_gateway.server.gateway import Gateway


class _Head(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None


_head_decoder = msgspec.json.Decoder(_Head)

#: Answers a call on an engine: exchange, the model's engines, requested model, body.
EngineHandler: TypeAlias = Callable[[Exchange, Placer, str, bytes], Awaitable[None]]


class CallRoutes:
    """The handlers of the hot paths."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._server = gateway.settings.server
        self._semantic = SemanticCalls(gateway)
        self._responses = ResponseRoutes(gateway)
        answerers: dict[str, Answerer] = {
            "/v1/completions": self._answer_completions,
            "/v1/chat/completions": self._answer_chat,
        }
        gateway.semantic.connect(InternalRunner(gateway, answerers))

    async def completions(self, exchange: Exchange) -> None:
        """`POST /v1/completions`."""
        await self._call(exchange, self._answer_completions)

    async def chat_completions(self, exchange: Exchange) -> None:
        """`POST /v1/chat/completions`."""
        await self._call(exchange, self._answer_chat)

    async def tokenize(self, exchange: Exchange) -> None:
        """`POST /tokenize`: models of our own engines only."""
        from parrot_gateway.api.openai.tokenize import handle_tokenize

        body = await exchange.body(self._server.max_body_bytes)
        await handle_tokenize(exchange, self._own_engine(body), body)

    async def detokenize(self, exchange: Exchange) -> None:
        """`POST /detokenize`: models of our own engines only."""
        from parrot_gateway.api.openai.tokenize import handle_detokenize

        body = await exchange.body(self._server.max_body_bytes)
        await handle_detokenize(exchange, self._own_engine(body), body)

    async def passthrough(self, exchange: Exchange) -> None:
        """Any other route under `/v1/`: goes to the upstream of the model that it names, or to the
        first upstream when it names none. Texts that hold references get the values."""
        upstreams = self._gateway.upstreams
        is_stateful = exchange.path.startswith(("/v1/responses", "/v1/conversations"))
        if not upstreams and not is_stateful:
            raise _unknown_route(exchange)
        body = await exchange.body(self._server.max_body_bytes)
        if is_stateful and await self._responses.answer(exchange, body):
            return
        body = await self._with_values(exchange, body)
        name = model_of(exchange, body)
        if name is None:
            if not upstreams:
                raise _unknown_route(exchange)
            first = next(iter(upstreams.values()))
            timeout_s = self._server.call_timeout_s
            await forward_any(exchange, first, body=body, timeout_s=timeout_s)
            return
        await self._pass_any(exchange, name, name, body, frozenset())

    async def _with_values(self, exchange: Exchange, body: bytes) -> bytes:
        """The body with values in place of the references in its texts, once all are there.

        Raises:
            VariableNotFoundError, DependencyFailedError, DeadlineError: as `SemanticService.value`.
        """
        if exchange.path not in PROMPT_LOCATIONS or not has_reference(body):
            return body
        template = await read_aside(lambda: BodyTemplate.of(body, exchange.path), len(body))
        if template.is_constant:
            return body
        exchange.cancel_on_disconnect(cast(asyncio.Task[Any], asyncio.current_task()))
        service = self._gateway.semantic
        return await service.resolve(tenant_of(exchange), template, service.call_timeout_s)

    async def _pass_any(
        self, exchange: Exchange, requested: str, model: str, body: bytes, tried: frozenset[str]
    ) -> None:
        """Pass a call of `model` on; `tried` as in `_answer`."""
        target = self._gateway.resolve(model)
        if isinstance(target, EngineTarget):
            if await self._responses.generate(exchange, target.model, requested, body):
                return
            raise UnsupportedError(
                f"The model '{model}' is run by this gateway's own engine, which does not offer "
                f"{exchange.path}.",
                param="model",
                code="unsupported_route",
            )

        async def fall_back(other: str) -> None:
            await self._pass_any(exchange, requested, other, body, tried | {target.upstream})

        await forward_any(
            exchange,
            self._gateway.upstreams[target.upstream],
            body=body,
            model=target.model,
            requested_model=requested,
            timeout_s=self._server.call_timeout_s,
            fallback=None if target.upstream in tried else fall_back,
        )

    async def _call(self, exchange: Exchange, ordinary: Answerer) -> None:
        body = await exchange.body(self._server.max_body_bytes)
        if not await self._semantic.answer(exchange, body, ordinary):
            await ordinary(exchange, body)

    async def _answer_completions(self, exchange: Exchange, body: bytes) -> None:
        await self._answer_body(exchange, self._complete, body)

    async def _answer_chat(self, exchange: Exchange, body: bytes) -> None:
        await self._answer_body(exchange, self._chat, body)

    async def _answer_body(self, exchange: Exchange, handler: EngineHandler, body: bytes) -> None:
        head = decode(body, _head_decoder)
        if not head.model:
            raise missing_parameter("model")
        await self._answer(exchange, handler, head, head.model, body, frozenset())

    async def _answer(
        self,
        exchange: Exchange,
        handler: EngineHandler,
        head: _Head,
        model: str,
        body: bytes,
        tried: frozenset[str],
    ) -> None:
        """Answer with `model`; `tried` are the upstreams that could not, so fallbacks end."""
        requested = head.model or model
        target = self._gateway.resolve(model)
        if isinstance(target, EngineTarget):
            await handler(
                exchange, placer_for(exchange, self._gateway, target.model), requested, body
            )
            return

        async def fall_back(other: str) -> None:
            await self._answer(exchange, handler, head, other, body, tried | {target.upstream})

        await forward(
            exchange,
            self._gateway.upstreams[target.upstream],
            model=target.model,
            requested_model=requested,
            path=exchange.path,
            body=body,
            stream=bool(head.stream),
            timeout_s=self._server.call_timeout_s,
            fallback=None if target.upstream in tried else fall_back,
        )

    async def _complete(self, exchange: Exchange, placer: Placer, model: str, body: bytes) -> None:
        # Imported here because it loads the tokenizer's library, which a gateway that only
        # passes calls on does not need.
        from parrot_gateway.api.openai.completions import handle_completions

        salt = salt_of(exchange.metadata.tenant)
        await handle_completions(exchange, placer, model, body, self._server, salt=salt)

    async def _chat(self, exchange: Exchange, placer: Placer, model: str, body: bytes) -> None:
        from parrot_gateway.api.openai.chat import handle_chat

        salt = salt_of(exchange.metadata.tenant)
        await handle_chat(exchange, placer, model, body, self._server, salt=salt)

    def _own_engine(self, body: bytes) -> RemoteEngine:
        """The engine of the model that `body` names, or of the only model there is."""
        name = decode(body, _head_decoder).model
        if name is None:
            models = self._gateway.engine_models()
            if len(models) != 1:
                raise missing_parameter("model")
            return self._gateway.engine_of(models[0])
        target = self._gateway.resolve(name)
        if not isinstance(target, EngineTarget):
            raise UnsupportedError(
                f"The model '{name}' belongs to the upstream '{target.upstream}', whose tokenizer "
                "this gateway does not have.",
                param="model",
            )
        return self._gateway.engine_of(target.model)


def _unknown_route(exchange: Exchange) -> NotFoundError:
    return NotFoundError(
        f"Unknown route: {exchange.method} {exchange.path}. This gateway's own are listed at "
        "/docs; others go to upstreams, of which it has none.",
        code="unknown_route",
    )
