"""The answers of `/v1/completions` and `/v1/chat/completions`, whoever gives them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any

import msgspec

from parrot_gateway.api.call_shape import AnswerEncoder
from parrot_gateway.api.event_stream import DONE, data_event, failure_events
from parrot_gateway.api.openai.answers import ChatAnswer, CompletionAnswer
from parrot_gateway.api.openai.rest_of_stream import RestOfStream
from parrot_gateway.api.upstream.passthrough import ForwardedCall, forward
from parrot_gateway.backends.upstreams.failure import FailedAttempt
from parrot_gateway.calls.requests.call import CallKind, CallRequest
from parrot_gateway.exceptions import GatewayError


class OpenAIShape:
    """See `CallShape`."""

    answers: Mapping[CallKind, AnswerEncoder] = {
        "chat": ChatAnswer,
        "completions": CompletionAnswer,
    }

    def failure(self, error: GatewayError) -> bytes:
        return failure_events(error)

    def deferred(self, request: CallRequest, call_id: str, text: str) -> bytes:
        """The ordinary shape, with a reference as its text."""
        head = request.semantic_head
        if not head.stream:
            return msgspec.json.encode(_deferred_answer(request, call_id, text))
        options = head.stream_options
        usage = options is not None and bool(options.include_usage)
        return _deferred_stream(request, call_id, text, include_usage=usage)

    def forward(self, request: CallRequest, call: ForwardedCall) -> Awaitable[FailedAttempt | None]:
        if call.failover is not None:
            call = call._replace(rest=partial(RestOfStream, request))
        return forward(call)


OPENAI = OpenAIShape()


def _deferred_answer(request: CallRequest, call_id: str, text: str) -> dict[str, Any]:
    """The whole answer."""
    if request.kind == "chat":
        object_ = "chat.completion"
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
        }
    else:
        object_, choice = "text_completion", {"index": 0, "text": text}
    choice |= {"logprobs": None, "finish_reason": "stop"}
    return {**_envelope(request, object_, call_id), "choices": [choice], "usage": _no_usage()}


def _deferred_stream(
    request: CallRequest, call_id: str, text: str, *, include_usage: bool
) -> bytes:
    """The same as a short stream."""
    if request.kind == "chat":
        envelope = _envelope(request, "chat.completion.chunk", call_id)
        choices: list[dict[str, Any]] = [
            {"delta": {"role": "assistant", "content": "", "refusal": None}},
            {"delta": {"content": text}},
            {"delta": {}, "finish_reason": "stop"},
        ]
    else:
        envelope = _envelope(request, "text_completion", call_id)
        choices = [{"text": text, "finish_reason": "stop"}]
    usage = {"usage": None} if include_usage else {}
    chunks: list[dict[str, Any]] = [
        {
            **envelope,
            "choices": [{"index": 0, "logprobs": None, "finish_reason": None, **choice}],
            **usage,
        }
        for choice in choices
    ]
    if include_usage:
        chunks.append({**envelope, "choices": [], "usage": _no_usage()})
    return b"".join(map(data_event, chunks)) + DONE


def _envelope(request: CallRequest, object_: str, call_id: str) -> dict[str, Any]:
    prefix = "chatcmpl" if request.kind == "chat" else "cmpl"
    return {
        "id": f"{prefix}-{call_id.removeprefix('call_')}",
        "object": object_,
        "created": int(time.time()),
        "model": request.model,
    }


def _no_usage() -> dict[str, int]:
    return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
