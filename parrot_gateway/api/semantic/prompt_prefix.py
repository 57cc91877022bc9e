"""The prefix of a waiting call's prompt that its missing inputs cannot change."""

from __future__ import annotations

import secrets

import msgspec

from parrot_gateway.engines.catalog import EngineTarget
from parrot_gateway.engines.remote import RemoteEngine
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.generation.generate import GenerationEngine
from parrot_gateway.generation.requests.types import ChatBody, CompletionBody
from parrot_gateway.generation.requests.validation import decode
from parrot_gateway.semantic.execution.fill_ahead import FillAhead
from parrot_gateway.semantic.execution.job import Job
from parrot_gateway.server.gateway import Gateway

#: Of ordinary text, at least; prefixes that are shorter by this are not tokenized to find out.
CHARACTERS_PER_TOKEN = 3

_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)


def fill_ahead_of(gateway: Gateway) -> FillAhead:
    """What fills the prompt prefixes of the gateway's waiting calls."""

    def choose(model: str) -> RemoteEngine | None:
        try:
            target = gateway.resolve(model)
        except GatewayError:
            return None
        if not isinstance(target, EngineTarget):
            return None
        engines = gateway.registry.engines_for(target.model)
        return min(engines, key=lambda each: (each.queued_tokens, each.running), default=None)

    return FillAhead(gateway.settings.sessions.fill_ahead_tokens, choose, read_prompt_prefix)


async def read_prompt_prefix(job: Job, engine: GenerationEngine) -> list[int]:
    """The prefix of a call's prompt as tokens; the last ones may change with what follows.

    A marker takes the place of each missing input, and what comes before the first marker in the
    whole rendered prompt is the prefix: whatever a chat template writes around messages is
    part of it.

    Raises:
        GatewayError: the prompt cannot be rendered so far.
    """
    # Letters and digits only: they stay what they are in the strings of JSON documents.
    marker = secrets.token_hex(16)
    body = job.render_known(marker)
    least = CHARACTERS_PER_TOKEN * job.session.limits.fill_ahead_tokens
    # Imported here because they load the tokenizer's library, which a gateway that only passes
    # calls on does not need.
    from parrot_gateway.generation.prompts import prompts_of_texts
    from parrot_gateway.generation.requests.messages import render_chat_aside

    if job.spec.path == "/v1/chat/completions":
        chat = decode(body, _chat_decoder)
        if msgspec.json.encode(chat.messages).find(marker.encode()) < least:
            return []
        text = await render_chat_aside(engine.tokenizer, chat, len(body))
        special = bool(chat.add_special_tokens)
    else:
        completion = decode(body, _completion_decoder)
        if not isinstance(completion.prompt, str) or completion.prompt.find(marker) < least:
            return []
        text, special = completion.prompt, completion.add_special_tokens is not False
    before, found, _ = text.partition(marker)
    if not found:
        # The template leaves it out.
        return []
    (prompt,) = await prompts_of_texts(
        engine.tokenizer, engine.info, [before], add_special_tokens=special
    )
    return prompt.token_ids
