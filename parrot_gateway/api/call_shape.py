"""What differs between the APIs whose calls are chats or completions: how answers are written."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from parrot_gateway.api.event_stream import Answer
from parrot_gateway.api.upstream.passthrough import ForwardedCall
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.generation.placement import ServedModel
from parrot_gateway.generation.request import GenerationRequest
from parrot_gateway.generation.requests.call import CallRequest


class CallShape(Protocol):
    """One API's way of writing answers."""

    def answer(
        self, request: CallRequest, served: ServedModel, generation_request: GenerationRequest
    ) -> Answer:
        """The encoder of one call's answer by an own engine."""
        ...

    def failure(self, error: GatewayError) -> bytes:
        """The events that report a failure in mid-stream, with what ends the stream."""
        ...

    def deferred(self, request: CallRequest, call_id: str, text: str) -> bytes:
        """The answer of a deferred call: JSON, or events where the request is for a stream."""
        ...

    def forward(self, request: CallRequest, call: ForwardedCall) -> Awaitable[None]:
        """Let an upstream that speaks OpenAI's API answer; see `passthrough.forward`."""
        ...
