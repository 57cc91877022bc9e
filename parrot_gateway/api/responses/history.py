"""What a response goes on from: an earlier one, or a conversation."""

from __future__ import annotations

import time
from typing import NamedTuple

from parrot_gateway.api.responses.bodies import ConversationRef, InputFields, ResponseBody
from parrot_gateway.exceptions import NotFoundError
from parrot_gateway.generation.responses.items import Turn
from parrot_gateway.generation.responses.store import Conversation, ResponseStore, StoredResponse


class History(NamedTuple):
    """What a call builds on."""

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
        """Whether nothing was said before."""
        return self.turn is None


def find_history(request: ResponseBody | InputFields, store: ResponseStore, tenant: str) -> History:
    """Look up what a call builds on.

    Raises:
        NotFoundError: it is unknown, was forgotten, or is another tenant's.
    """
    now = time.time()
    if request.previous_response_id is not None:
        previous = store.response(tenant, request.previous_response_id, now)
        if previous is None:
            raise NotFoundError(
                f"Previous response with id '{request.previous_response_id[:80]}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return History(previous, None)
    if request.conversation is not None:
        named = request.conversation
        conversation_id = named.id if isinstance(named, ConversationRef) else named
        conversation = store.conversation(tenant, conversation_id, now)
        if conversation is None:
            raise NotFoundError(
                f"Conversation with id '{conversation_id[:80]}' not found.",
                param="conversation",
                code="conversation_not_found",
            )
        return History(None, conversation)
    return History(None, None)
