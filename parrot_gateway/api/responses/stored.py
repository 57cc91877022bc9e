"""The routes of responses and conversations that this gateway keeps.

An id that is not found here may be an upstream's. Nothing is generated here; that is done in
`create`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec

from parrot_gateway.api.pages import list_of, page_of
from parrot_gateway.api.responses.bodies import ConversationBody
from parrot_gateway.api.responses.events import replay
from parrot_gateway.api.responses.input_items import items_of
from parrot_gateway.api.streams.follow import answer_with_events
from parrot_gateway.calls.requests.call import decode
from parrot_gateway.calls.responses.items import Item, Turn, mint_conversation_id
from parrot_gateway.calls.responses.store import Conversation, ResponseStore, StoredResponse
from parrot_gateway.exceptions import (
    GatewayError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    missing_parameter,
    wrong_type,
)
from parrot_gateway.http.exchange import EVENT_STREAM, Exchange

_BODY = msgspec.json.Decoder(ConversationBody)

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


@dataclass(frozen=True)
class StoredResponseRoutes:
    """Answers requests for what is kept."""

    store: ResponseStore
    #: Silence in a stream after which a comment is sent.
    keep_alive_s: float

    async def answer(self, exchange: Exchange, body: bytes) -> bool:
        """Answer a request for a response or a conversation of ours.

        Args:
            exchange: its body has been read.
            body: that body.

        Returns:
            False when it is for nothing that is kept here; nothing was done.

        Raises:
            GatewayError: it cannot be honoured.
        """
        tenant = exchange.tenant
        raw = exchange.path.removeprefix("/v1/").split("/")
        kind, *rest = [unquote(part) for part in raw]
        if not rest:
            return False
        if kind == "responses":
            response = self.store.response(tenant, rest[0], time.time())
            if response is None:
                return False
            await self._answer_response(exchange, response, rest[1:])
            return True
        conversation = self.store.conversation(tenant, rest[0], time.time())
        if conversation is None:
            return False
        await self._answer_conversation(exchange, conversation, rest[1:], body)
        return True

    async def create_conversation(self, exchange: Exchange, body: bytes) -> None:
        """`POST /v1/conversations`.

        Raises:
            GatewayError: the body is not valid.
        """
        tenant = exchange.tenant
        given = decode(body, _BODY) if body.strip() else ConversationBody()
        items = items_of(given.items, "items", partial(self.store.item, tenant))
        conversation = Conversation(
            mint_conversation_id(), float(int(time.time())), dict(given.metadata or {})
        )
        if items:
            conversation.turn = Turn(None, items)
            self.store.check_fits(conversation, 0)
        self.store.keep(tenant, conversation, time.time())
        await exchange.respond_json(_conversation(conversation))

    # -- responses --------------------------------------------------------------------------

    async def _answer_response(
        self, exchange: Exchange, response: StoredResponse, rest: Sequence[str]
    ) -> None:
        match exchange.method, *rest:
            case ["GET"]:
                await self._retrieve(exchange, response)
            case ["DELETE"]:
                self.store.delete(exchange.tenant, response.id)
                deleted = {"id": response.id, "object": "response", "deleted": True}
                await exchange.respond_json(deleted)
            case ["GET", "input_items"]:
                await exchange.respond_json(_page(exchange, response.input_items))
            case ["POST", "cancel"]:
                if response.log is None:
                    raise InvalidRequestError(
                        "Only responses with 'background' can be cancelled. To cancel another call "
                        "that runs, close its connection.",
                        code="invalid_value",
                    )
                if response.cancel is not None:
                    response.cancel()
                await response.log.wait_closed()
                await exchange.respond(200, response.answer)
            case _:
                raise _unknown(exchange, rest, {(), ("input_items",), ("cancel",)})

    async def _retrieve(self, exchange: Exchange, response: StoredResponse) -> None:
        query = _query(exchange)
        if query.get("stream", "false").lower() not in ("true", "1"):
            await exchange.respond(200, response.answer)
            return
        after = max(_integer(query, "starting_after", -1), -1)
        if response.log is not None:
            await answer_with_events(exchange, response.log, after + 1, self.keep_alive_s)
            return
        events = replay(response.answer, response.cuts, after)
        await exchange.respond(200, events, EVENT_STREAM)

    # -- conversations ----------------------------------------------------------------------

    async def _answer_conversation(
        self, exchange: Exchange, conversation: Conversation, rest: Sequence[str], body: bytes
    ) -> None:
        tenant = exchange.tenant
        match exchange.method, *rest:
            case ["GET"]:
                await exchange.respond_json(_conversation(conversation))
            case ["POST"]:
                given = decode(body, _BODY)
                conversation.metadata = dict(given.metadata or {})
                await exchange.respond_json(_conversation(conversation))
            case ["DELETE"]:
                self.store.delete(tenant, conversation.id)
                deleted = {"id": conversation.id, "object": "conversation.deleted", "deleted": True}
                await exchange.respond_json(deleted)
            case ["GET", "items"]:
                await exchange.respond_json(_page(exchange, conversation.items))
            case ["POST", "items"]:
                given = decode(body, _BODY)
                if given.items is None:
                    raise missing_parameter("items")
                added = items_of(given.items, "items", partial(self.store.item, tenant))
                self.store.extend(tenant, conversation, added)
                shown = list_of([item.to_dict() for item in added], no_id="")
                await exchange.respond_json(shown)
            case ["GET", "items", item_id]:
                await exchange.respond_json(_find(conversation, item_id).to_dict())
            case ["DELETE", "items", item_id]:
                found = _find(conversation, item_id)
                kept = [item for item in conversation.items if item is not found]
                self.store.replace(tenant, conversation, Turn(None, kept) if kept else None)
                await exchange.respond_json(_conversation(conversation))
            case _:
                raise _unknown(exchange, rest[:1] if len(rest) == 2 else rest, {(), ("items",)})


def not_kept(path: str) -> NotFoundError:
    """The error for what is neither ours nor can be an upstream's."""
    kind, _, rest = path.removeprefix("/v1/").partition("/")
    noun, found = kind.removesuffix("s"), unquote(rest.partition("/")[0])
    return NotFoundError(
        f"{noun.title()} with id '{found[:80]}' not found.",
        param=f"{noun}_id",
        code=f"{noun}_not_found",
    )


def _conversation(conversation: Conversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": int(conversation.created),
        "metadata": conversation.metadata,
    }


def _find(conversation: Conversation, item_id: str) -> Item:
    for item in conversation.items:
        if item.id == item_id:
            return item
    raise NotFoundError(
        f"Item with id '{item_id[:80]}' not found in conversation '{conversation.id}'.",
        param="item_id",
        code="item_not_found",
    )


def _page(exchange: Exchange, items: Sequence[Item]) -> dict[str, Any]:
    # NOTE: strings also where there is none: the client's types allow no null.
    return page_of(
        items[::-1],
        _query(exchange).get,
        lambda item: item.to_dict(),
        default_limit=DEFAULT_LIMIT,
        max_limit=MAX_LIMIT,
        no_id="",
    )


def _query(exchange: Exchange) -> dict[str, str]:
    text = bytes(exchange.scope.get("query_string", b"")).decode("latin-1")
    try:
        return {name: values[-1] for name, values in parse_qs(text, max_num_fields=64).items()}
    except ValueError:
        raise InvalidRequestError("The query of the URL has too many fields.") from None


def _integer(query: dict[str, str], name: str, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not text.lstrip("-").isdigit() or not text.isascii() or len(text) > 12:
        raise wrong_type(name, "an integer")
    return int(text)


def _unknown(exchange: Exchange, rest: Sequence[str], known: set[tuple[str, ...]]) -> GatewayError:
    if tuple(rest) in known:
        return MethodNotAllowedError(f"{exchange.path} does not take {exchange.method}.")
    return NotFoundError(f"Unknown route: {exchange.method} {exchange.path}.", code="unknown_route")
