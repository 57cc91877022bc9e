"""`POST /v1/responses/input_tokens` for models of our own engines."""

from __future__ import annotations

import msgspec

from parrot_gateway.api.openai.answers import encode
from parrot_gateway.api.responses.bodies import InputFields, check_input_fields, items_of
from parrot_gateway.api.responses.history import find_history
from parrot_gateway.api.responses.prompt import prompt_of
from parrot_gateway.generation.placement import Placer
from parrot_gateway.generation.requests.validation import decode, missing_parameter
from parrot_gateway.generation.responses.items import history_of
from parrot_gateway.generation.responses.store import ResponseStore
from parrot_gateway.http.exchange import Exchange

_INPUT = msgspec.json.Decoder(InputFields)


async def handle_input_tokens(
    exchange: Exchange,
    placer: Placer,
    body: bytes,
    *,
    store: ResponseStore,
    tenant: str,
) -> None:
    """Answer `{object, input_tokens}`: the length of the prompt that a response would have.

    Raises:
        GatewayError: as `handle_responses`.
    """
    request = decode(body, _INPUT)
    check_input_fields(request)
    items = items_of(request.input)
    history = find_history(request, store, tenant)
    if not items and history.is_empty:
        raise missing_parameter("input")
    whole = history_of(history.turn) + items
    prompt = await prompt_of(request, placer, whole, len(body), room=1)
    answer = {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}
    await exchange.respond(200, encode(answer))
