"""Calls that an upstream answers: bytes in, bytes out.

What the caller sent goes on unchanged (but for the model's name, our own `parrot` field, and a
priority where the setting `hints` asks for it) and so does what comes back, status, errors and
event streams included. Only a failure in mid-stream adds something: an error event, because clients
take a stream that just ends for a success. No semantic features, no retries and no connections here
(`backends/upstreams/client.py`).

No keep-alive comments are put into a silent upstream's stream: its bytes pass as they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from parrot_gateway.api.upstream.event_guard import EventGuard, RestWriters
from parrot_gateway.api.upstream.event_tail import EventTail, dialect_of
from parrot_gateway.backends.upstreams.answer import (
    MAX_HELD_BYTES,
    UpstreamAnswerReader,
    incomplete,
    rewrite,
)
from parrot_gateway.backends.upstreams.client import UpstreamClient, UpstreamRequest
from parrot_gateway.backends.upstreams.continuation import Answering, Failover
from parrot_gateway.backends.upstreams.failure import FailedAttempt, Returned, ask
from parrot_gateway.backends.upstreams.reported_error import refusal_of, reported_error
from parrot_gateway.backends.upstreams.response import UpstreamResponse
from parrot_gateway.calls.observer import GenerationObserver, Observers
from parrot_gateway.calls.usage import Usage, usage_of_body
from parrot_gateway.exceptions import (
    AnswerError,
    DeadlineError,
    GatewayError,
    InvalidRequestError,
    UpstreamError,
)
from parrot_gateway.http.exchange import ClientDisconnected, Exchange, Headers
from parrot_gateway.telemetry.call_record import CallObserver

#: Routes whose answers are looked into for usage, and whose broken streams get an error event.
_ACCOUNTED = ("/completions", "/responses", "/embeddings", "/messages")
#: How long `[DONE]` is held back for the end of the upstream's stream, which servers write by
#: itself right behind it: so that both go on in one piece.
_END_TIMEOUT_S = 0.01


class ForwardedCall(NamedTuple):
    """A request that an upstream shall answer; its body has been read."""

    #: Not answered yet, or begun with comments as a stream. Its path decides how streams end.
    exchange: Exchange
    upstream: UpstreamClient
    #: As the upstream gets it (`upstream_body`).
    body: bytes
    #: The whole call ends so long after its request came, with a `DeadlineError`.
    timeout_s: float | None = None
    #: The failures to return, so that another backend can answer.
    returned: Returned = "nothing"
    #: Notified of the answer to a chat or a completion; of other routes, such as read no text.
    observers: Sequence[GenerationObserver] = ()
    #: Lets other servers go on with a stream of a chat or a completion that breaks off, and writes
    #: what they say; both or neither.
    failover: Failover | None = None
    rest: RestWriters | None = None


def forward(call: ForwardedCall) -> Awaitable[FailedAttempt | None]:
    """Let the upstream answer the exchange.

    Ends the watch for a disconnect itself. When the client goes away, in whatever phase, the
    upstream's request is aborted.

    Returns:
        a failure when nothing has been sent because another backend shall answer.

    Raises:
        GatewayError: nothing has been sent yet; the caller answers with it.
        UpstreamError: also when a body that is no event stream broke off half sent: the
            connection must be cut, as nothing else shows it to the client.
        ClientDisconnected: the client went away.
    """
    return _Relay(call).run()


async def forward_any(
    call: ForwardedCall,
    *,
    model: str | None = None,
    requested_model: str | None = None,
    on_first: Callable[[bytes], None] | None = None,
) -> FailedAttempt | None:
    """`forward` for any other route, method and content type under `/v1/`.

    Only a JSON body is rewritten; see `envelope_of` for what routes a body.

    Args:
        call: its body is as received.
        model: as the upstream knows it.
        requested_model: as the body names it.
        on_first: called with the first bytes of a successful answer.

    Returns:
        as `forward`.

    Raises:
        InvalidRequestError: the model's name would have to be changed in a body that is not JSON.
        GatewayError, UpstreamError, ClientDisconnected: as `forward`.
    """
    content_type = (call.exchange.headers.get(b"content-type") or b"").lower()
    if content_type.startswith(b"application/json"):
        body = rewrite(call.body, None if model == requested_model else model)
        call = call._replace(body=body)
    elif model != requested_model:
        raise InvalidRequestError(
            f"'{requested_model}' is another name of '{model}', which can only be replaced in a "
            f"JSON body: name '{model}' itself.",
            param="model",
        )
    return await _Relay(call, on_first).run()


class _Relay:
    """One call that passes through."""

    __slots__ = (
        "_accounted", "_call", "_events", "_exchange", "_is_late", "_observers", "_on_first",
        "_reader", "_refusal", "_status", "_upstream", "_was_left"
    )  # fmt: skip

    def __init__(
        self, call: ForwardedCall, on_first: Callable[[bytes], None] | None = None
    ) -> None:
        self._call = call
        self._exchange = call.exchange
        self._upstream = call.upstream
        record = CallObserver(call.exchange.record)
        self._observers = Observers([record, *call.observers]) if call.observers else record
        self._on_first = on_first
        self._accounted = call.exchange.path.endswith(_ACCOUNTED)
        self._events: EventTail | None = None
        #: Of the upstream's answer, once it is there.
        self._status = 0
        self._refusal: AnswerError | None = None
        #: The call's time is up.
        self._is_late = False
        #: The upstream's stream broke off, and its answer was left to other servers.
        self._was_left = False
        #: Reads the answer for observers, until it cannot be read.
        self._reader: UpstreamAnswerReader | None = None

    async def run(self) -> FailedAttempt | None:
        exchange, timeout_s = self._exchange, self._call.timeout_s
        task = asyncio.current_task()
        assert task is not None
        exchange.cancel_on_disconnect()
        # NOTE: a seventh of the time of `asyncio.timeout`, which every call would pay.
        timer = None
        if timeout_s is not None:
            left_s = timeout_s - (time.perf_counter() - exchange.started)
            timer = asyncio.get_running_loop().call_later(left_s, self._expire, task)
        try:
            return await self._answer()
        except asyncio.CancelledError as error:
            if exchange.disconnected:
                self._observers.failed(error)
                task.uncancel()
                raise ClientDisconnected from None
            if not self._is_late or task.uncancel():
                self._observers.failed(error)
                raise
            late = DeadlineError(f"The call took longer than {timeout_s:g} s.")
            self._observers.failed(late)
            await self._fail(late)
            return None
        except Exception as error:
            self._observers.failed(error)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            exchange.finish()

    def _expire(self, task: asyncio.Task[Any]) -> None:
        self._is_late = True
        task.cancel()

    async def _answer(self) -> FailedAttempt | None:
        """Answer the exchange, unless another backend shall."""
        exchange, upstream = self._exchange, self._upstream
        scope = exchange.scope
        self._observers.submitted()
        request = UpstreamRequest(
            scope["method"],
            scope.get("raw_path") or exchange.path,
            exchange.record.outgoing_headers(scope["headers"]),
            self._call.body,
            scope.get("query_string", b""),
            self._accounted,
            note_failed=exchange.record.note_failed,
        )
        response = await ask(
            upstream, request, self._call.returned, _client_read_timeout_s(exchange)
        )
        if isinstance(response, FailedAttempt):
            return response
        try:
            await self._pass_on(response)
        finally:
            response.close()
        return None

    async def _pass_on(self, response: UpstreamResponse) -> None:
        exchange = self._exchange
        self._status = response.status
        self._observers.started(response.server, response.queued_s, response.reason)
        if response.status < 400:
            self._observers.first_token()
            if self._on_first is not None:
                self._on_first(response.first)
        if self._observers.reads_text:
            self._reader = UpstreamAnswerReader(self._observers)
            self._reader.start(response.status, response.content_type.encode())
        headers = response.headers_for_client()
        succeeded = response.status < 400
        is_stream = response.content_type == "text/event-stream" and not response.encoded
        exchange.record.streamed = is_stream
        if exchange.responded and not (is_stream and succeeded):
            await self._end_in_band(response)
            return
        if is_stream:
            self._events = events = EventTail(dialect_of(exchange.path))
            usage = await self._pass_events(response, headers, events)
            if succeeded and self._accounted and not self._was_left:
                response.succeeded(usage)
            return
        self._follow(response.first)
        if response.at_eof and exchange.scope["method"] != "HEAD":
            usage = None
            if succeeded and self._accounted:
                usage = None if response.encoded else usage_of_body(response.first)
                response.succeeded(usage)
                if not response.encoded:
                    self._note_error(reported_error(response.first))
            if not succeeded:
                self._note_refusal(b"" if response.encoded else response.first)
            self._end_following(usage)
            await exchange.respond(response.status, response.first, headers)
            return
        if response.announced_length is not None:
            headers.append((b"content-length", str(response.announced_length).encode()))
        await exchange.start_stream(response.status, headers, response.first)
        while not response.at_eof:
            chunk = await response.read()
            if chunk:
                self._follow(chunk)
                await exchange.write(chunk)
        self._end_following(None)
        await exchange.end_stream()
        if succeeded and self._accounted:
            response.succeeded(None)

    async def _pass_events(
        self, response: UpstreamResponse, headers: Headers, events: EventTail
    ) -> Usage | None:
        """Pass a stream on; returns the usage that it reports last."""
        exchange = self._exchange
        exchange.on_failure(self._fail)
        if not any(name == b"x-accel-buffering" for name, _ in headers):
            headers.append((b"x-accel-buffering", b"no"))
        ready, last, usage = b"", b"", None
        try:
            if self._call.failover is None or response.status >= 400:
                self._follow(response.first)
                ready = events.feed(response.first)
            else:
                guarded = await self._pass_guarded(response, headers, events, self._call.failover)
                if guarded is None:
                    return events.usage()
                ready = guarded
            while not response.at_eof:
                if events.done and await response.ends_within(_END_TIMEOUT_S):
                    break
                if ready:
                    if exchange.responded:
                        await exchange.write(ready)
                    else:
                        await exchange.start_stream(response.status, headers, ready)
                chunk = await response.read()
                self._follow(chunk)
                ready = events.feed(chunk)
            broken = incomplete(response.server)
            last, usage = events.end(broken), events.usage()
            if events.is_complete:
                self._note_error(events.error())
                self._end_following(usage)
            else:
                exchange.record.fail(broken)
                self._observers.failed(broken, usage)
        except UpstreamError as error:
            if not exchange.responded:
                raise
            exchange.record.fail(error)
            usage = events.usage()
            self._observers.failed(error, usage)
            ready, last = ready if events.done else b"", events.fail(error)
        if not exchange.responded:
            await exchange.start_stream(response.status, headers, ready + last, is_whole=True)
            return usage
        # NOTE: the end of the stream in the same write as its last bytes, so that clients find
        # the connection ready for their next request.
        await exchange.end_stream(ready + last)
        return usage

    def _write(self, data: bytes, headers: Headers) -> Awaitable[None]:
        if self._exchange.responded:
            return self._exchange.write(data)
        return self._exchange.start_stream(self._status, headers, data)

    async def _pass_guarded(
        self, response: UpstreamResponse, headers: Headers, events: EventTail, failover: Failover
    ) -> bytes | None:
        """Pass a stream on while it is in order, and let another server go on if it breaks off.

        Returns:
            bytes to go on with as they came: the last, or those behind a fault for which nobody has
            gone on; None once the stream of the client has ended.

        Raises:
            UpstreamError: the stream broke off.
        """
        exchange, partial = self._exchange, failover.partial
        guard = EventGuard(events, partial, self._observers)
        self._reader = guard.reader
        ready, error = guard.feed(response.first), None
        while guard.fault is None and not response.at_eof:
            if ready:
                await self._write(ready, headers)
                ready = b""
            try:
                ready = guard.feed(await response.read())
            except UpstreamError as broken:
                error = broken
                break
        if guard.is_done and error is not None:
            self._end_following(events.usage())
            await exchange.end_stream()
            return None
        if guard.fault is None and error is None and guard.ends_well():
            return ready
        if ready:
            await self._write(ready, headers)
        cause = error or guard.fault or incomplete(response.server)
        self._was_left = True
        if error is not None:
            response.close()
        num_deltas = partial.num_deltas
        if not events.is_mid_event and await self._go_on(response, headers, guard, cause, failover):
            return None
        if error is not None:
            raise error
        if partial.num_deltas > num_deltas:
            # The client has got more than the first server has said.
            exchange.record.fail(cause)
            self._observers.failed(cause, partial.usage)
            await exchange.end_stream(events.error_events(cause))
            return None
        self._was_left = False
        if guard.fault is not None:
            self._observers.failed(guard.fault)
            self._reader = None
        return guard.held

    async def _go_on(
        self,
        response: UpstreamResponse,
        headers: Headers,
        guard: EventGuard,
        error: UpstreamError,
        failover: Failover,
    ) -> bool:
        exchange, make_rest = self._exchange, self._call.rest
        assert make_rest is not None
        rest = make_rest(guard.sample, exchange.record.call_id, [response.server])

        async def send() -> None:
            if written := rest.take():
                await self._write(written, headers)

        answering = Answering(
            Observers([rest, self._observers]),
            exchange.record.outgoing_headers(exchange.scope["headers"]),
            exchange.record.note_failed,
            send,
        )
        if not await failover.go_on(error, response.server, guard.reader.usage, answering):
            await send()
            return False
        await exchange.end_stream(rest.take())
        return True

    async def _end_in_band(self, response: UpstreamResponse) -> None:
        """End a stream that was begun with comments, by an answer that is none."""
        collected = bytearray(response.first)
        self._follow(response.first)
        while not response.at_eof and len(collected) < MAX_HELD_BYTES:
            chunk = await response.read()
            self._follow(chunk)
            collected += chunk
        self._end_following(None)
        try:
            fields = msgspec.json.decode(bytes(collected), type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            fields = {}
        if "error" in fields:
            self._note_refusal(bytes(collected))
            data = msgspec.json.encode({"error": fields["error"]})
        else:
            error = GatewayError("The model's server did not answer with a stream.")
            self._exchange.record.fail(error)
            data = error.body()
        await self._exchange.end_stream(b"data: " + data + b"\n\ndata: [DONE]\n\n")

    def _follow(self, data: bytes) -> None:
        """Notify observers of what bytes hold; the client gets them even if they cannot be read."""
        if self._reader is None:
            return
        try:
            self._reader.feed(data)
        except AnswerError as error:
            self._reader = None
            self._observers.failed(error)

    def _note_refusal(self, body: bytes) -> None:
        """The client gets the upstream's error."""
        self._note_error(refusal_of(body, self._status))

    def _note_error(self, error: AnswerError | None) -> None:
        if error is not None:
            self._refusal = error
            self._exchange.record.fail(error)

    def _end_following(self, usage: Usage | None) -> None:
        if self._reader is None:
            if self._observers.reads_text:
                return
            if self._status < 400 and self._refusal is None:
                self._observers.ended(usage)
            else:
                self._observers.failed(self._refusal or refusal_of(b"", self._status))
            return
        try:
            self._reader.end()
        except AnswerError as error:
            self._observers.failed(error)

    async def _fail(self, error: GatewayError) -> None:
        if self._exchange.completed:
            return
        if not self._exchange.responded:
            raise error
        if self._events is None:
            raise UpstreamError(error.message)
        self._exchange.record.fail(error)
        await self._exchange.end_stream(self._events.fail(error))


def _client_read_timeout_s(exchange: Exchange) -> float | None:
    """Seconds that the OpenAI client waits for bytes, if its headers say so."""
    text = exchange.headers.get(b"x-stainless-read-timeout")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0.0 < seconds < 1e6 else None
