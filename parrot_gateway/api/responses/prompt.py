"""The prompt of a response: its history (an earlier response, or a conversation), instructions and
input, as one chat, tokenized whole.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from parrot_gateway.api.responses.bodies import ConversationRef, InputFields, ResponseBody
from parrot_gateway.exceptions import ContextLengthError, InvalidRequestError, NotFoundError
from parrot_gateway.generation.placement import Placer
from parrot_gateway.generation.request import TokenizedPrompt
from parrot_gateway.generation.requests.chat import chat_prompt
from parrot_gateway.generation.requests.types import ChatBody, Message
from parrot_gateway.generation.responses.items import Item, Turn
from parrot_gateway.generation.responses.store import (
    Conversation,
    ResponseStore,
    StoredResponse,
)


class History(NamedTuple):
    """The earlier items that a call builds on."""

    previous: StoredResponse | None
    conversation: Conversation | None

    @property
    def turn(self) -> Turn | None:
        """The last turn of it, as it is now."""
        if self.conversation is not None:
            return self.conversation.turn
        return None if self.previous is None else self.previous.turn

    @property
    def is_empty(self) -> bool:
        """Whether it has no items."""
        return self.turn is None


def find_history(request: ResponseBody | InputFields, store: ResponseStore, tenant: str) -> History:
    """Look up the history of a call.

    Raises:
        NotFoundError: it is unknown, was forgotten, or is another tenant's.
    """
    now = time.time()
    if request.previous_response_id is not None:
        previous = store.response(tenant, request.previous_response_id, now)
        if previous is None:
            raise _not_found("Previous response", request.previous_response_id)
        return History(previous, None)
    if request.conversation is not None:
        named = request.conversation
        conversation_id = named.id if isinstance(named, ConversationRef) else named
        conversation = store.conversation(tenant, conversation_id, now)
        if conversation is None:
            raise _not_found("Conversation", conversation_id)
        return History(None, conversation)
    return History(None, None)


def _not_found(noun: str, id: str) -> NotFoundError:
    name = noun.lower().replace(" ", "_")
    return NotFoundError(
        f"{noun} with id '{id[:80]}' not found.",
        param="conversation" if name == "conversation" else f"{name}_id",
        code=f"{name}_not_found",
    )


async def prompt_of(
    request: ResponseBody | InputFields,
    placer: Placer,
    items: list[Item],
    num_bytes: int,
    *,
    room: int,
) -> TokenizedPrompt:
    """The instructions and items as one prompt, rendered and tokenized whole.

    With `truncation: auto`, items are left out from the beginning until it fits: up to a message of
    the user's where there is one, and never the last one.

    Args:
        room: tokens that are to be generated.

    Raises:
        ContextLengthError: it does not fit even so.
        InvalidRequestError: the model's template refuses it.
    """
    limit = placer.info.max_context_tokens
    if request.truncation != "auto":
        return await _prompt(request, placer, items, num_bytes)
    starts = [0] + [n for n, item in enumerate(items) if n and item.role == "user"]
    if starts[-1] != len(items) - 1 and len(items) > 1:
        starts.append(len(items) - 1)
    low, high = 0, len(starts) - 1
    # The longest ending that fits: leaving out more never makes a prompt longer.
    while low < high:
        middle = (low + high) // 2
        try:
            prompt = await _prompt(request, placer, items[starts[middle] :], num_bytes)
        except ContextLengthError:
            low = middle + 1
            continue
        if len(prompt.token_ids) + room > limit:
            low = middle + 1
        else:
            high = middle
    return await _prompt(request, placer, items[starts[low] :], num_bytes)


async def _prompt(
    request: ResponseBody | InputFields,
    placer: Placer,
    items: list[Item],
    num_bytes: int,
) -> TokenizedPrompt:
    messages = [Message(item.role, item.text) for item in items]
    if request.instructions:
        messages.insert(0, Message("system", request.instructions))
    chat = ChatBody(
        messages=messages,
        reasoning_effort=(request.reasoning or {}).get("effort"),
        chat_template_kwargs=request.chat_template_kwargs,
    )
    size = num_bytes + sum(len(message.content or "") for message in messages)
    try:
        return await chat_prompt(chat, placer.tokenizer, placer.info, size, noun="input")
    except InvalidRequestError as error:
        if error.param is None or error.param.startswith("messages"):
            raise type(error)(error.message, param="input", code=error.code) from None
        raise
