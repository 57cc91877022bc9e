"""Routes requests of the Responses API.

A request for a model of our own engines, or for an id that was minted here, is answered here; all
others go to the upstreams unchanged.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import msgspec

from parrot_gateway.api.responses.compact import handle_compact
from parrot_gateway.api.responses.create import handle_input_tokens, handle_responses
from parrot_gateway.api.responses.stored import StoredResponseRoutes, not_kept
from parrot_gateway.api.semantic.fields import may_be_semantic, read_fields
from parrot_gateway.api.semantic.recorded_exchange import RecordedExchange, RecordedExchanges
from parrot_gateway.api.upstream.envelope import model_of
from parrot_gateway.calls.metadata import ORDINARY_CALL
from parrot_gateway.calls.requests.call import CallRequest, IdentityFields, decode
from parrot_gateway.calls.responses.background import BackgroundTasks
from parrot_gateway.calls.responses.store import ResponseStore
from parrot_gateway.exceptions import NotFoundError, UnsupportedError, missing_parameter
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.linking.inferred_metadata import InferredMetadata, explained
from parrot_gateway.linking.service import LinkingService
from parrot_gateway.routing.model_directory import ModelDirectory
from parrot_gateway.settings.model import ServerSettings

RESPONSES = "/v1/responses"
INPUT_TOKENS = "/v1/responses/input_tokens"
COMPACT = "/v1/responses/compact"
CONVERSATIONS = "/v1/conversations"
#: Last parts of paths under `/v1/responses/` that are no ids.
_ACTIONS = ("input_tokens", "compact")


class _Head(IdentityFields):
    model: str | None = None


_head_decoder = msgspec.json.Decoder(_Head)


@dataclass(frozen=True)
class ResponseRoutes:
    """The routes under `/v1/responses` and `/v1/conversations`."""

    models: ModelDirectory
    store: ResponseStore
    background: BackgroundTasks
    server: ServerSettings
    recorded_exchanges: RecordedExchanges
    linking: LinkingService
    inferred: InferredMetadata

    async def answer(self, exchange: Exchange, body: bytes) -> bool:
        """Answer a request that is ours because of an id in it, or because there is no upstream.

        Args:
            exchange: a path under `/v1/responses` or `/v1/conversations`; its body has been read.
            body: that body.

        Returns:
            False when its model decides; nothing was done.

        Raises:
            GatewayError: it is ours and cannot be honoured.
        """
        path, method = exchange.path, exchange.method
        stored = StoredResponseRoutes(self.store, self.server.keep_alive_s)
        if path == CONVERSATIONS and method == "POST" and self._is_ours(exchange, body):
            await stored.create_conversation(exchange, body)
            return True
        if await stored.answer(exchange, body):
            return True
        if self.models.upstreams:
            return False
        return await self._answer_alone(exchange, body, not_kept(path))

    async def _answer_alone(
        self, exchange: Exchange, body: bytes, not_found: NotFoundError
    ) -> bool:
        """Without upstreams, every request is ours."""
        path, method = exchange.path, exchange.method
        parts = path.removeprefix("/v1/").split("/")
        if parts[0] not in ("responses", "conversations"):
            return False
        if len(parts) > 1 and parts[1] not in _ACTIONS:
            raise not_found
        if method != "POST" or path not in (RESPONSES, INPUT_TOKENS, COMPACT):
            return False
        head = decode(body, _head_decoder)
        model = head.model
        if not model:
            models = self.models.engine_models()
            if path != INPUT_TOKENS or len(models) != 1:
                raise missing_parameter("model")
            model = models[0]
        target = self.models.resolve(model)
        assert target.upstream is None
        recorded = None
        if path == RESPONSES:
            recorded = self.recorded_exchanges.begin(exchange, "responses", model, head)
        answer = partial(self.generate, exchange, target.model, model, body, recorded)
        node = None if recorded is None else recorded.call.node
        session, call = ("", "") if node is None else (node.session_id, node.id)
        with recorded or nullcontext():
            if path != RESPONSES:
                return await answer()
            return await self.linking.follow(exchange, body, answer, session, call)

    async def generate(
        self,
        exchange: Exchange,
        model: str,
        requested_model: str,
        body: bytes,
        recorded: RecordedExchange | None,
    ) -> bool:
        """Answer a request for a model of our own engines.

        Args:
            exchange: its body has been read.
            model: as the engines know it.
            requested_model: as the request names it.
            body: that body.
            recorded: of the call, in the session that it names.

        Returns:
            False when the route is none of those that such models offer.

        Raises:
            GatewayError: it cannot be honoured.
        """
        exchange.record.model, exchange.record.served_model = requested_model, model
        path = exchange.path
        if exchange.method != "POST" or path not in (RESPONSES, INPUT_TOKENS, COMPACT):
            return False
        self._refuse_semantics(exchange, body)
        metadata = exchange.metadata
        if recorded is not None and metadata is ORDINARY_CALL:
            metadata = recorded.call.metadata
        if metadata is ORDINARY_CALL and path == RESPONSES:
            metadata = await self.inferred.of(exchange, body)
        await self.models.loaded(model)
        placer = self.models.placer(model, explained(exchange, metadata))
        if path == INPUT_TOKENS:
            await handle_input_tokens(exchange, placer, body, self.store)
            return True
        if path == COMPACT:
            await handle_compact(exchange, placer, body, self.server, self.store)
            return True
        await handle_responses(
            exchange,
            placer,
            requested_model,
            body,
            self.server,
            store=self.store,
            background=self.background,
            recorded=recorded,
        )
        return True

    def _is_ours(self, exchange: Exchange, body: bytes) -> bool:
        """Return whether a new conversation is for models of our own, by the extension `model`;
        without that it goes to the first upstream, if there is one."""
        model = model_of(exchange, body)
        if model is not None:
            return self.models.resolve(model).upstream is None
        return not self.models.upstreams

    def _refuse_semantics(self, exchange: Exchange, body: bytes) -> None:
        """Semantic fields belong to chat and completions; nothing is dropped in silence."""
        headers = exchange.scope["headers"]
        if not may_be_semantic(headers, body):
            return
        if not read_fields(headers, CallRequest("chat", body).known_fields).is_empty:
            raise UnsupportedError(
                "Semantic variables are not offered on /v1/responses: use "
                "/v1/chat/completions, with X-Parrot-Context for a kept context.",
                param="parrot",
            )
