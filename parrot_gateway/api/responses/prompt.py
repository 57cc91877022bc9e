"""The prompt of a response: its history (an earlier response, or a conversation), instructions and
input, as one chat, tokenized whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from parrot_gateway.api.responses.bodies import ConversationRef, InputFields, ResponseBody
from parrot_gateway.api.responses.input_items import items_of
from parrot_gateway.backends.own.placement import Placer
from parrot_gateway.calls.generation_request import TokenizedPrompt
from parrot_gateway.calls.requests.chat import chat_prompt
from parrot_gateway.calls.requests.types import ChatBody, Message
from parrot_gateway.calls.responses.items import (
    Item,
    MessageItem,
    ReasoningItem,
    ToolOutputItem,
    Turn,
)
from parrot_gateway.calls.responses.messages import messages_of
from parrot_gateway.calls.responses.store import Conversation, ResponseStore, StoredResponse
from parrot_gateway.calls.tools.definitions import Tool
from parrot_gateway.exceptions import (
    ContextLengthError,
    InvalidRequestError,
    NotFoundError,
    missing_parameter,
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
        """Return whether it has no items."""
        return self.turn is None


def read_input(
    request: ResponseBody | InputFields, store: ResponseStore, tenant: str
) -> tuple[History, list[Item]]:
    """The history of a call, and the items that it brings.

    Raises:
        InvalidRequestError: an item is malformed, or there is nothing at all.
        NotFoundError: what it builds on is unknown, was forgotten, or is another tenant's.
    """
    items = items_of(request.input, find=partial(store.item, tenant))
    history = _find_history(request, store, tenant)
    if not items and history.is_empty:
        raise missing_parameter("input")
    return history, items


def _find_history(
    request: ResponseBody | InputFields, store: ResponseStore, tenant: str
) -> History:
    now = time.time()
    if request.previous_response_id is not None:
        previous = store.response(tenant, request.previous_response_id, now)
        if previous is None:
            raise _not_found("Previous response", request.previous_response_id)
        if previous.cancel is not None:
            raise InvalidRequestError(
                f"Response '{previous.id}' is still being made; wait until its status says that "
                "it has ended.",
                param="previous_response_id",
                code="response_in_progress",
            )
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
    tools: Sequence[Tool],
    num_bytes: int,
    *,
    room: int,
) -> TokenizedPrompt:
    """The instructions and items as one prompt, rendered and tokenized whole.

    With `truncation: auto`, the oldest turns are left out until it fits.

    Args:
        tools: shown to the model.
        room: tokens that are to be generated.

    Raises:
        ContextLengthError: it does not fit even so.
        InvalidRequestError: the model's template refuses it.
    """
    limit = placer.info.max_context_tokens
    if (request.reasoning or {}).get("context") == "current_turn":
        last = _last_user(items)
        items = [
            item
            for number, item in enumerate(items)
            if number > last or not isinstance(item, ReasoningItem)
        ]
    if request.truncation != "auto":
        return await _prompt(request, placer, items, tools, num_bytes)
    starts = _starts(items)
    low, high = 0, len(starts) - 1
    # The longest ending that fits: leaving out more never makes a prompt longer.
    while low < high:
        middle = (low + high) // 2
        try:
            prompt = await _prompt(request, placer, items[starts[middle] :], tools, num_bytes)
        except ContextLengthError:
            low = middle + 1
            continue
        if len(prompt.token_ids) + room > limit:
            low = middle + 1
        else:
            high = middle
    return await _prompt(request, placer, items[starts[low] :], tools, num_bytes)


def _starts(items: list[Item]) -> list[int]:
    """Where a shorter history may begin, in order: with what a user says and, within the last turn,
    with what the model does next; never with what a tool returned for a call left out."""
    starts = [0]
    last_user = _last_user(items)
    for number in range(1, len(items)):
        item, before = items[number], items[number - 1]
        begins_step = not isinstance(item, ToolOutputItem) and (
            isinstance(before, ToolOutputItem) or isinstance(item, MessageItem)
        )
        if _is_users(item) or (number > last_user and begins_step):
            starts.append(number)
    return starts


def _last_user(items: list[Item]) -> int:
    """The number of the last item that a user wrote; -1 without one."""
    return max((n for n, item in enumerate(items) if _is_users(item)), default=-1)


def _is_users(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role == "user"


async def _prompt(
    request: ResponseBody | InputFields,
    placer: Placer,
    items: list[Item],
    tools: Sequence[Tool],
    num_bytes: int,
) -> TokenizedPrompt:
    messages = messages_of(items)
    if request.instructions:
        messages.insert(0, Message("system", request.instructions))
    chat = ChatBody(
        messages=messages,
        reasoning_effort=(request.reasoning or {}).get("effort"),
        chat_template_kwargs=request.chat_template_kwargs,
    )
    size = num_bytes + sum(len(message.content or "") for message in messages)
    try:
        return await chat_prompt(
            chat, placer.tokenizer, placer.info, size, tools=tools, noun="input"
        )
    except InvalidRequestError as error:
        if error.param is None or error.param.startswith("messages"):
            raise type(error)(error.message, param="input", code=error.code) from None
        raise
