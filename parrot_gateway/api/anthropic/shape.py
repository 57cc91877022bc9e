"""The answers of `/v1/messages`, whoever gives them: the encoders of `CallShape`.

An upstream that speaks OpenAI's API gets a chat, and what it answers is written anew as a message:
the deltas that observers get become events, sent before the next bytes are read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from parrot_gateway.api.anthropic.errors import error_of, failure_event
from parrot_gateway.api.anthropic.message import MessageWriter, ThinkingDisplay
from parrot_gateway.api.call_shape import AnswerEncoder
from parrot_gateway.api.event_stream import EventStream
from parrot_gateway.api.upstream.passthrough import ForwardedCall
from parrot_gateway.backends.own.generate import Candidate, CollectedPrompt
from parrot_gateway.backends.upstreams.answer import run_on_upstream
from parrot_gateway.backends.upstreams.failure import FailedAttempt
from parrot_gateway.calls.generation_request import (
    ChoiceDelta,
    GenerationRequest,
    PromptFilled,
    Update,
)
from parrot_gateway.calls.metadata import ServedModel
from parrot_gateway.calls.observer import GenerationObserver, Observers
from parrot_gateway.calls.requests.call import CallKind, CallRequest
from parrot_gateway.calls.requests.types import ChatBody
from parrot_gateway.calls.usage import Usage
from parrot_gateway.exceptions import AnswerError, DeadlineError, GatewayError
from parrot_gateway.http.exchange import Exchange, Headers
from parrot_gateway.telemetry.call_record import CallObserver

#: Beginnings of headers that only Anthropic's servers read.
_OWN_HEADERS = (b"anthropic-", b"x-api-key")


class MessageAnswer:
    """The answer of one call by an own engine; see `Answer`. Other arguments as of `AnswerEncoder`.

    Args:
        thinking: how reasoning is shown.
    """

    def __init__(
        self,
        request: ChatBody,
        served: ServedModel,
        model: str,
        generation: GenerationRequest,
        *,
        thinking: ThinkingDisplay,
    ) -> None:
        self._writer = MessageWriter(model, thinking=thinking)
        self._prompt_tokens = len(generation.prompts[0].token_ids)

    def opening(self) -> bytes:
        """Nothing: the first event has the number of cached tokens, which is not known yet."""
        return b""

    def events(self, update: Update) -> bytes:
        if isinstance(update, PromptFilled):
            # NOTE: sent with the first text: until then a failure gets a status of its own.
            self._writer.prompt_filled(Usage(self._prompt_tokens, 0, update.cached_tokens))
            return b""
        return self._writer.delta(update)

    def closing(self, usage: Usage) -> bytes:
        return self._writer.end(usage)

    def failure(self, error: GatewayError) -> bytes:
        return failure_event(error)

    def whole(self, collected: Sequence[CollectedPrompt], usage: Usage) -> bytes:
        return self._writer.whole(collected[0].candidates[0], usage)


class AnthropicShape:
    """See `CallShape`.

    Args:
        thinking: how reasoning is shown.
    """

    def __init__(self, thinking: ThinkingDisplay = "hidden") -> None:
        self._thinking = thinking
        self.answers: Mapping[CallKind, AnswerEncoder] = {
            "chat": partial(MessageAnswer, thinking=thinking)
        }

    def failure(self, error: GatewayError) -> bytes:
        return failure_event(error)

    def deferred(self, request: CallRequest, call_id: str, text: str) -> bytes:
        writer = MessageWriter(request.model, f"msg_{call_id.removeprefix('call_')}")
        delta, usage = ChoiceDelta(0, 0, text, [], [], "stop"), Usage(0, 0, 0)
        if request.semantic_head.stream:
            return writer.delta(delta) + writer.end(usage)
        candidate = Candidate()
        candidate.add(delta)
        return writer.whole(candidate, usage)

    async def forward(self, request: CallRequest, call: ForwardedCall) -> FailedAttempt | None:
        exchange, upstream = call.exchange, call.upstream
        message = _UpstreamMessage(exchange, request, self._thinking)
        everyone = Observers([message, *call.observers])
        exchange.cancel_on_disconnect()
        try:
            left_s = None
            if call.timeout_s is not None:
                left_s = call.timeout_s - (time.perf_counter() - exchange.started)
            async with asyncio.timeout(left_s):
                failure = await run_on_upstream(
                    upstream,
                    request.kind,
                    exchange.record.outgoing_headers(openai_headers(exchange.scope["headers"])),
                    call.body,
                    everyone,
                    CallObserver(exchange.record),
                    returned=call.returned,
                    note_failed=exchange.record.note_failed,
                    between_reads=message.send,
                    failover=call.failover,
                )
        except TimeoutError:
            late = DeadlineError(f"The call took longer than {call.timeout_s:g} s.")
            everyone.failed(late)
            await message.fail(late)
            return None
        except GatewayError as error:
            everyone.failed(error)
            await message.fail(error)
            return None
        except BaseException as error:
            everyone.failed(error)
            raise
        if failure is None:
            await message.finish()
        return failure


class _UpstreamMessage(GenerationObserver):
    """Writes what an upstream answers as a message to the client.

    Args:
        exchange: not answered yet, or begun with comments as a stream.
        request: the chat.
        thinking: how reasoning is shown.
    """

    def __init__(self, exchange: Exchange, request: CallRequest, thinking: ThinkingDisplay) -> None:
        self._exchange = exchange
        self._writer = MessageWriter(request.model, thinking=thinking)
        self._is_stream = exchange.record.streamed = bool(request.head.stream)
        self._stream = EventStream(exchange, float("inf"), failure=failure_event)
        self._candidate = Candidate()
        #: Events that were not sent yet.
        self._events = b""
        self._usage = Usage(0, 0, 0)

    def started(self, engine: str, queued_s: float, reason: str) -> None:
        def add_engine(headers: Headers) -> None:
            if not any(name == b"x-parrot-engine" for name, _ in headers):
                headers.append((b"x-parrot-engine", engine.encode()))

        self._exchange.on_headers(add_engine)

    def delta(self, delta: ChoiceDelta) -> None:
        if delta.choice != 0:
            return
        if self._is_stream:
            self._events += self._writer.delta(delta)
        else:
            self._candidate.add(delta)

    def ended(self, usage: Usage | None, finish_reason: str | None = None) -> None:
        self._usage = usage or self._usage

    async def send(self) -> None:
        """Send the events so far; waits while the client is slow to read."""
        if self._events:
            events, self._events = self._events, b""
            await self._stream.send(events)

    async def finish(self) -> None:
        """Send the rest of an answer that is complete."""
        if self._is_stream:
            await self._stream.finish(self._events + self._writer.end(self._usage))
        else:
            await self._exchange.respond(200, self._writer.whole(self._candidate, self._usage))

    async def fail(self, error: GatewayError) -> None:
        """Answer with an error; one that the upstream gave keeps its status.

        Raises:
            GatewayError: that error, where nothing has been sent.
        """
        exchange = self._exchange
        if exchange.responded:
            await self._stream.fail(error)
            return
        status = error.upstream_status if isinstance(error, AnswerError) else None
        if status is None:
            raise error
        exchange.record.fail(error)
        body = error_of(status, error.message, exchange.request_id)
        await exchange.respond(status, msgspec.json.encode(body), error.headers())


def openai_headers(headers: Headers) -> Headers:
    """The client's headers as an OpenAI-compatible server reads them."""
    given = dict(headers)
    passed = [each for each in headers if not each[0].startswith(_OWN_HEADERS)]
    if b"x-api-key" in given and b"authorization" not in given:
        passed.append((b"authorization", b"Bearer " + given[b"x-api-key"]))
    return passed
