"""What differs between the APIs whose calls are chats or completions: how answers are written."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from parrot_gateway.api.event_stream import Answer
from parrot_gateway.api.upstream.passthrough import Fallback
from parrot_gateway.engines.upstream import Upstream
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.generation.observer import GenerationObserver
from parrot_gateway.generation.placement import ServedModel
from parrot_gateway.generation.request import GenerationRequest
from parrot_gateway.generation.requests.call import CallRequest
from parrot_gateway.http.exchange import Exchange


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

    def forward(
        self,
        exchange: Exchange,
        upstream: Upstream,
        request: CallRequest,
        *,
        body: bytes,
        timeout_s: float,
        fallback: Fallback | None,
        observers: Sequence[GenerationObserver],
    ) -> Awaitable[Any]:
        """Let an upstream that speaks OpenAI's API answer; see `passthrough.forward`."""
        ...
