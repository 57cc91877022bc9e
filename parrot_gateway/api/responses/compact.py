"""`POST /v1/responses/compact`: a history in fewer tokens, for models of our own engines.

The model writes a summary of it. That and what the user wrote last come back as one item, which
goes before further input in place of the history.
"""

from __future__ import annotations

import time

import msgspec

from parrot_gateway.api.ignored_fields import name_ignored
from parrot_gateway.api.openai.answers import encode
from parrot_gateway.api.responses.answer import response_usage
from parrot_gateway.api.responses.bodies import InputFields, ResponseBody, check_input_fields
from parrot_gateway.api.responses.prompt import prompt_of, read_input
from parrot_gateway.backends.own.generate import Generation, collect
from parrot_gateway.backends.own.placement import Placer
from parrot_gateway.calls.generation_request import GenerationRequest
from parrot_gateway.calls.metadata import salt_of
from parrot_gateway.calls.requests.call import BodyDecoder
from parrot_gateway.calls.requests.prepared import check_context, sampling_of
from parrot_gateway.calls.responses.compaction import Compaction, newest_within, packed
from parrot_gateway.calls.responses.items import (
    CompactionItem,
    Item,
    MessageItem,
    Part,
    history_of,
    mint_item_id,
    mint_response_id,
)
from parrot_gateway.calls.responses.store import ResponseStore
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.settings.model import ServerSettings
from parrot_gateway.telemetry.call_record import CallObserver

#: Of a summary; never more than a quarter of the model's context.
MAX_SUMMARY_TOKENS = 1024
_ASK = (
    "Summarize the conversation so far for an assistant that is to continue it without having seen "
    "it: what is wanted, what was done and found out, what was decided, what is left to do. Write "
    "the summary and nothing else."
)

_BODY = BodyDecoder(InputFields)


async def handle_compact(
    exchange: Exchange, placer: Placer, body: bytes, server: ServerSettings, store: ResponseStore
) -> None:
    """Answer one call; what it is made from stays as it was.

    Raises:
        GatewayError: it is not valid, or could not be answered.
    """
    request, unknown = _BODY.decode(body)
    name_ignored(exchange, unknown)
    check_input_fields(request)
    history, added = read_input(request, store, exchange.tenant)
    items = history_of(history.turn) + added
    exchange.cancel_on_disconnect()
    info = placer.info
    max_tokens = min(MAX_SUMMARY_TOKENS, info.max_context_tokens // 4)
    asked = [*items, MessageItem(mint_item_id(), "user", (Part(_ASK),))]
    whole = msgspec.structs.replace(request, truncation="auto", reasoning={"effort": "none"})
    prompt = await prompt_of(whole, placer, asked, (), len(body), room=max_tokens)
    length = len(prompt.token_ids)
    check_context(info.max_context_tokens, length, max_tokens, param="input", noun="input")
    sampling = sampling_of(ResponseBody(temperature=0), info, max_tokens=max_tokens, logprobs=None)
    call = GenerationRequest([prompt], sampling, salt=salt_of(exchange.tenant))
    deadline, observer = exchange.started + server.call_timeout_s, CallObserver(exchange.record)
    generation = Generation(placer, call, deadline, [observer])
    with generation:
        (collected,) = await collect(generation, 1, 1)
    said = newest_within(_said(items), info.max_context_tokens // 4, placer.tokenizer)
    compaction = Compaction(said, collected.candidates[0].text.strip())
    item = CompactionItem(mint_item_id("cmp"), packed(compaction), compaction)
    answer = {
        "id": mint_response_id(),
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [item.to_dict()],
        "usage": response_usage(generation.state.usage),
    }
    await exchange.respond(200, encode(answer))


def _said(items: list[Item]) -> list[str]:
    """Collect the user's texts, those of earlier compactions included."""
    said: list[str] = []
    for item in items:
        if isinstance(item, CompactionItem):
            said += item.compaction.said
        elif isinstance(item, MessageItem) and item.role == "user":
            said.append(item.text)
    return said
