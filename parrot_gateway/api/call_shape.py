"""The interface by which each API whose calls are chats or completions writes its answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeAlias

from parrot_gateway.api.event_stream import Answer
from parrot_gateway.api.upstream.passthrough import ForwardedCall
from parrot_gateway.backends.upstreams.failure import FailedAttempt
from parrot_gateway.calls.generation_request import GenerationRequest
from parrot_gateway.calls.metadata import ServedModel
from parrot_gateway.calls.requests.call import CallKind, CallRequest
from parrot_gateway.exceptions import GatewayError

#: Makes the encoder of one call's answer: of its typed body, the model, the name that the caller
#: has for it, and the request for the engine.
AnswerEncoder: TypeAlias = Callable[[Any, ServedModel, str, GenerationRequest], Answer]


class CallShape(Protocol):
    """One API's way of writing answers."""

    @property
    def answers(self) -> Mapping[CallKind, AnswerEncoder]:
        """The encoders of answers by own engines, for each kind of call that the API has."""
        ...

    def failure(self, error: GatewayError) -> bytes:
        """The events that report a failure in mid-stream, with what ends the stream."""
        ...

    def deferred(self, request: CallRequest, call_id: str, text: str) -> bytes:
        """The answer of a deferred call: JSON, or events where the request is for a stream."""
        ...

    def forward(self, request: CallRequest, call: ForwardedCall) -> Awaitable[FailedAttempt | None]:
        """Let an upstream that speaks OpenAI's API answer; see `passthrough.forward`."""
        ...
