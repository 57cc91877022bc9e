"""References in texts and responses, and their replacement by texts."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, cast

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    TextBlock,
)
from llama_index.core.base.response.schema import (
    AsyncStreamingResponse,
    Response,
    StreamingResponse,
)
from parrot_client.fields import REFERENCE

T = TypeVar("T")

#: Seconds that the client waits beyond the gateway, so that the gateway ends the wait.
GRACE_S = 5.0


def resolve_request(value: object, timeout: float | None) -> dict[str, Any] | None:
    """Return arguments for a client's `post` that resolve a value; None if it has no reference.

    Args:
        value: see `Parrot.resolve`.
        timeout: in seconds; None leaves it to the gateway.

    Raises:
        TypeError: the value is a streaming response, which must be read first.
    """
    if isinstance(value, StreamingResponse | AsyncStreamingResponse):
        raise TypeError("Read a streaming response first: resolve(response.get_response()).")
    inside = _inside(value)
    if not _has_reference(inside):
        return None
    body = {"value": inside}
    # No retries: a failure is final, and the gateway has waited already.
    options: dict[str, Any] = {"max_retries": 0}
    if timeout is not None:
        body["timeout"] = timeout
        options["timeout"] = timeout + GRACE_S
    return {"path": "/resolve", "cast_to": object, "body": body, "options": options}


def resolved(value: T, answer: Any) -> T:
    """Copy the value with the answer of `POST /v1/resolve` in it."""
    inside = answer["value"]
    if isinstance(value, Response):
        return cast(T, dataclasses.replace(value, response=inside))
    if isinstance(value, CompletionResponse):
        return cast(T, value.model_copy(update={"text": inside}))
    if isinstance(value, ChatResponse):
        return cast(T, value.model_copy(update={"message": resolved(value.message, answer)}))
    if isinstance(value, ChatMessage):
        texts = iter(inside)
        blocks = [
            TextBlock(text=next(texts)) if isinstance(block, TextBlock) else block
            for block in value.blocks
        ]
        return cast(T, value.model_copy(update={"blocks": blocks}))
    return cast(T, inside)


def _inside(value: object) -> Any:
    """Return the part of a value that can have references, as JSON."""
    if isinstance(value, Response):
        return value.response
    if isinstance(value, CompletionResponse):
        return value.text
    if isinstance(value, ChatResponse):
        return _inside(value.message)
    if isinstance(value, ChatMessage):
        return [block.text for block in value.blocks if isinstance(block, TextBlock)]
    return value


def _has_reference(value: object) -> bool:
    if isinstance(value, str):
        return REFERENCE.search(value) is not None
    if isinstance(value, dict):
        return any(map(_has_reference, value)) or any(map(_has_reference, value.values()))
    return isinstance(value, list) and any(map(_has_reference, value))
