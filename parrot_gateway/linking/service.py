"""The gateway's side of the linking process.

Requests and answers are passed on as bytes, without decoding. Messages that the process cannot take
at once are skipped and counted; the gateway never waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from parrot_gateway.exceptions import GatewayError, InvalidRequestError, LinkingBehindError
from parrot_gateway.http.exchange import Exchange, Headers, call_id_of_request
from parrot_gateway.linking.process.wire import (
    PREFIX_BYTES,
    AnswerSeen,
    ForecastsWanted,
    FromWorker,
    LinksChanged,
    Query,
    RequestSeen,
    ToWorker,
    Watch,
    decode_from_worker,
    encode,
    length_of,
    session_id_of,
)
from parrot_gateway.linking.process.worker_process import Process, end, spawn
from parrot_gateway.linking.profiles.forecast import Forecasts, ForecastsChanged
from parrot_gateway.settings.model import LinkingSettings

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Header with which a client excludes a call.
LINK_HEADER = b"x-parrot-link"
_SWITCHES = {"on": True, "true": True, "1": True, "yes": True,
             "off": False, "false": False, "0": False, "no": False}  # fmt: skip
#: Bytes on their way to the process above which texts are left out; above twice as many, new calls
#: are.
_MAX_WAITING_BYTES = 8 * 1024 * 1024
#: Approximate size of a message besides its body.
_MESSAGE_BYTES = 256
#: Time for which messages are gathered before a write, and the maximum bytes gathered.
_GATHER_S = 0.02
_GATHER_BYTES = 128 * 1024
#: Interval of requests for forecasts while there are calls.
_FORECASTS_EVERY_S = 1.0
#: Time limits for the answer to a question, and to one for statistics.
_QUERY_TIMEOUT_S = 10.0
_STATISTICS_TIMEOUT_S = 1.0
#: First and longest pause before a process that ended by itself is restarted.
_FIRST_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 60.0
#: Bytes kept of an answer that is too long; they contain its id.
_HEAD_BYTES = 4096
#: The last event of a stream, by API; an upstream may end the stream later. Generated text cannot
#: match, because its quotes and line breaks are escaped.
_LAST_EVENTS = {
    "/v1/messages": re.compile(rb'"message_stop"'),
    "/v1/responses": re.compile(rb'"response\.(?:completed|incomplete|failed)"'),
}
_DONE = tuple(
    b"data:" + blank + b"[DONE]" + end for blank in (b"", b" ") for end in (b"\n\n", b"\r\n\r\n")
)


def wants_link(value: bytes) -> bool:
    """Read `X-Parrot-Link`: false excludes a call.

    Raises:
        InvalidRequestError: the value is neither yes nor no.
    """
    text = value.decode("latin-1").strip()
    if not text:
        return True
    if text.lower() not in _SWITCHES:
        raise InvalidRequestError(
            f"Invalid 'X-Parrot-Link': '{text[:80]}' is neither on nor off.",
            param="X-Parrot-Link",
            code="invalid_value",
        )
    return _SWITCHES[text.lower()]


def call_id_of(exchange: Exchange) -> str:
    """Return the id of a call without an id of its own."""
    return call_id_of_request(exchange.request_id)


class LinkingService:
    """Sends requests and answers to the linking process, and asks it questions.

    Attributes:
        is_running: true while there is a process; nothing is linked without one.
        forecasts: expected behaviour of arriving calls.
        process: the linking process.

    Args:
        settings: limits, and the switch for the process.
    """

    def __init__(self, settings: LinkingSettings) -> None:
        self.settings = settings
        self.process: Process | None = None
        self._runner: asyncio.Task[None] | None = None
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        #: Messages that leave together, because a write is the largest cost here.
        self._gathered: list[ToWorker] = []
        self._gathered_bytes = 0
        #: Bytes that may be gathered before unwritten bytes are counted.
        self._room = _MAX_WAITING_BYTES
        self._flusher: asyncio.TimerHandle | None = None
        self._sent = 0
        self._skipped = 0
        self._restarts = 0
        #: Questions for sessions that were not answered in time: those still open, and all of them.
        self._overdue = 0
        self._late = 0
        self._forecasts_timer: asyncio.TimerHandle | None = None
        self._watcher: Callable[[LinksChanged], None] | None = None
        self.is_running = False
        self.forecasts = Forecasts()

    async def start(self) -> None:
        """Start the process and restart it whenever it ends; returns once the first start was
        tried, so that the first call is linked too.
        """
        if self.settings.enabled and self._runner is None:
            tried = asyncio.Event()
            self._runner = asyncio.create_task(self._run(tried), name="linking")
            await tried.wait()

    async def close(self) -> None:
        """End the process."""
        if self._runner is not None:
            self._runner.cancel()
            with suppress(asyncio.CancelledError):
                await self._runner
            self._runner = None

    def observe(
        self, exchange: Exchange, body: bytes, session: str = "", call: str = ""
    ) -> ObservedCall | None:
        """Link a call whose request was read, and its answer, which is copied while it is sent.

        Args:
            exchange: the call's exchange, not answered yet.
            body: the request's JSON.
            session: id of the session that its client named, if any.
            call: its id, if it has one.

        Returns:
            A context in which the call must be answered; None if the call is not
            linked.

        Raises:
            InvalidRequestError: the client's `X-Parrot-Link` is neither on nor off.
        """
        if not self.is_running or not self.is_linked(exchange):
            return None
        if len(body) > self.settings.max_body_bytes:
            self._skipped += 1
            body = b""
        call = call or exchange.record.call_id
        client = exchange.scope.get("client")
        seen = RequestSeen(
            exchange.tenant,
            call,
            exchange.request_id,
            exchange.path,
            session,
            time.time(),
            body,
            f"{client[0]}:{client[1]}" if client else "",
        )
        return ObservedCall(self, exchange, call) if self._gather(seen) else None

    def is_linked(self, exchange: Exchange) -> bool:
        """Return true if the client and the tenant's settings permit linking a call.

        Raises:
            InvalidRequestError: the client's `X-Parrot-Link` is neither on nor off.
        """
        switch = exchange.headers.get(LINK_HEADER)
        if switch is not None and not wants_link(switch):
            return False
        return exchange.tenant not in self.settings.exclude_tenants

    def observe_response(self, exchange: Exchange, response_id: str) -> None:
        """Hand over an earlier response that finished meanwhile and is being fetched now."""
        if self.is_running and exchange.tenant not in self.settings.exclude_tenants:
            ObservedCall(self, exchange, response_id)

    async def follow(
        self,
        exchange: Exchange,
        body: bytes,
        answer: Callable[[], Awaitable[T]],
        session: str = "",
        call: str = "",
    ) -> T:
        """Answer an exchange with `answer`, and link the call; the other arguments are those of
        `observe`.
        """
        observed = self.observe(exchange, body, session, call)
        if observed is None:
            return await answer()
        with observed:
            if self.names_sessions:
                await self.name_session(exchange, observed, session)
            return await answer()

    @property
    def names_sessions(self) -> bool:
        """Return true if calls or their answers name inferred sessions."""
        return self.settings.headers or bool(self.settings.session_header)

    async def name_session(
        self, exchange: Exchange, observed: ObservedCall, session: str = ""
    ) -> None:
        """Name an observed call's session in its answer and request, as the settings ask."""
        if self.settings.headers and not session:
            await self.add_headers(exchange, observed.id)
        if self.settings.session_header:
            await self._name_session(exchange, session)

    async def ask(
        self, tenant: str, what: str, name: str = "", timeout_s: float | None = None
    ) -> Any:
        """Ask the process a question; see `wire.Query`. It knows all calls handed over before.

        Returns:
            Plain data; None if nothing is known or there is no process.

        Raises:
            LinkingBehindError: the process did not answer in time.
        """
        if not self.is_running:
            return None
        timeout_s = _QUERY_TIMEOUT_S if timeout_s is None else timeout_s
        number = next(self._numbers)
        reply = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            if not self._send(Query(number, tenant, what, name)):
                return None
            async with asyncio.timeout(timeout_s):
                return msgspec.json.decode(await reply)
        except TimeoutError:
            logger.warning("the linking process has not answered within %g s", timeout_s)
            raise LinkingBehindError from None
        finally:
            self._waiting.pop(number, None)

    def watch(self, watcher: Callable[[LinksChanged], None] | None) -> None:
        """Pass the process's findings to `watcher` as they come; None ends that.

        The first changes list all sessions, also after a restart of the process.
        """
        self._watcher = watcher
        self._send(Watch(watcher is not None))

    async def session_of(self, exchange: Exchange, wait_s: float) -> str:
        """Return the session of a call that was handed over; empty if unknown in time.

        Returns at once while an answer is overdue, because the process is behind.
        """
        if wait_s <= 0 or self._overdue or not self.is_running:
            return ""
        number = next(self._numbers)
        reply = asyncio.get_running_loop().create_future()
        question = Query(number, exchange.tenant, "session_of", call_id_of(exchange))
        if not self._send(question):
            return ""
        self._waiting[number] = reply
        try:
            async with asyncio.timeout(wait_s):
                # A late reply still ends the overdue state: see below.
                session: str | None = msgspec.json.decode(await asyncio.shield(reply))
        except TimeoutError:
            self._overdue += 1
            self._late += 1
            reply.add_done_callback(self._is_overdue_no_more)
            return ""
        return session or ""

    def _is_overdue_no_more(self, _: asyncio.Future[bytes]) -> None:
        self._overdue -= 1

    async def _name_session(self, exchange: Exchange, session: str) -> None:
        """Add the session's name to a request that is passed on, unless the client set it."""
        name = self.settings.session_header.lower().encode()
        if name not in exchange.headers:
            session = session or await self.session_of(exchange, self.settings.session_wait_s)
            session = session or session_id_of(call_id_of(exchange))
            exchange.scope["headers"].append((name, session.encode()))

    async def add_headers(self, exchange: Exchange, call: str) -> None:
        """Add the call and its session to the answer's headers."""
        known = None
        with suppress(LinkingBehindError):
            known = await self.ask(exchange.tenant, "call", call)

        def add(headers: Headers) -> None:
            headers.append((b"x-parrot-call", call.encode()))
            if known is not None:
                headers.append((b"x-parrot-session", known["session"].encode()))

        exchange.on_headers(add)

    async def describe(self) -> dict[str, Any]:
        """Return counters since the start, for `/health`; those of the process only if it answers
        soon.
        """
        counters = None
        with suppress(LinkingBehindError):
            counters = await self.ask("", "statistics", timeout_s=_STATISTICS_TIMEOUT_S)
        return _added(self._statistics(), counters or {})

    def _statistics(self) -> dict[str, Any]:
        return {
            "enabled": self.settings.enabled,
            "sent": self._sent + len(self._gathered),
            "skipped": self._skipped,
            "restarts": self._restarts,
            "late": self._late,
            "running": self.is_running,
            "pid": None if self.process is None else self.process.pid,
        }

    def _gather(self, message: RequestSeen | AnswerSeen) -> bool:
        """Queue a message for the next write; drop its text if too much is on its way."""
        size = _MESSAGE_BYTES + len(message.body)
        if self._gathered_bytes > self._room:
            waiting = self._waiting_bytes()
            if waiting > _MAX_WAITING_BYTES:
                self._skipped += 1
                is_answer = isinstance(message, AnswerSeen)
                if waiting > 2 * _MAX_WAITING_BYTES and not is_answer:
                    return False
                # The beginning and the end of a call are reported even so.
                message.body = message.body[:_HEAD_BYTES] if is_answer else b""
                size = _MESSAGE_BYTES
        self._gathered.append(message)
        self._gathered_bytes += size
        if self._gathered_bytes > _GATHER_BYTES:
            self._flush()
        elif self._flusher is None:
            self._flusher = asyncio.get_running_loop().call_later(_GATHER_S, self._flush)
        return True

    def _send(self, message: Query | ForecastsWanted | Watch) -> bool:
        """Write a message at once, behind the gathered ones."""
        if not self.is_running:
            return False
        self._gathered.append(message)
        self._flush()
        return True

    def _want_forecasts(self) -> None:
        self._forecasts_timer = None
        self._send(ForecastsWanted(time.time()))

    def _waiting_bytes(self) -> int:
        """Return the bytes on their way to the process."""
        process = self.process
        assert process is not None
        assert process.stdin is not None
        return process.stdin.transport.get_write_buffer_size() + self._gathered_bytes

    def _flush(self) -> None:
        """Write the gathered messages."""
        if self._flusher is not None:
            self._flusher.cancel()
            self._flusher = None
        messages, self._gathered, self._gathered_bytes = self._gathered, [], 0
        self._sent += len(messages)
        if self._forecasts_timer is None:
            loop = asyncio.get_running_loop()
            self._forecasts_timer = loop.call_later(_FORECASTS_EVERY_S, self._want_forecasts)
        process = self.process
        if process is not None and process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(encode(messages))
            self._room = _MAX_WAITING_BYTES - self._waiting_bytes()

    async def _run(self, tried: asyncio.Event) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            started = time.monotonic()
            try:
                await self._run_once(tried)
            except (OSError, subprocess.SubprocessError) as error:
                logger.warning("the linking process cannot be started: %s", error)
            finally:
                tried.set()
            if time.monotonic() - started > _MAX_BACKOFF_S:
                backoff_s = _FIRST_BACKOFF_S
            self._restarts += 1
            logger.warning(
                "the linking process has ended; what it knew is lost; again in %g s", backoff_s
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)

    async def _run_once(self, started: asyncio.Event) -> None:
        """Run the process and receive its messages until it ends; on cancellation, end it.

        Args:
            started: set once the process exists.
        """
        process = await spawn(self.settings)
        self.process = process
        self.is_running = True
        self.forecasts.clear()
        if self._watcher is not None:
            self._send(Watch(True))
        started.set()
        assert process.stdout is not None
        try:
            while True:
                prefix = await process.stdout.readexactly(PREFIX_BYTES)
                frame = await process.stdout.readexactly(length_of(prefix))
                for message in decode_from_worker(frame):
                    self._receive(message)
                if self._watcher is not None:
                    # Yield, because frames that have arrived would all be handled in one turn of
                    # the loop.
                    await asyncio.sleep(0)
        except asyncio.IncompleteReadError:
            pass
        finally:
            self.is_running = False
            self.process = None
            self._gathered, self._gathered_bytes, self._room = [], 0, _MAX_WAITING_BYTES
            if self._forecasts_timer is not None:
                self._forecasts_timer.cancel()
                self._forecasts_timer = None
            for future in self._waiting.values():
                if not future.done():
                    future.set_result(b"null")
            await end(process)

    def _receive(self, message: FromWorker) -> None:
        if isinstance(message, ForecastsChanged):
            self.forecasts.update(message.tenant, message.changed, message.removed)
            return
        if isinstance(message, LinksChanged):
            if self._watcher is not None:
                self._watcher(message)
            return
        waiting = self._waiting.pop(message.number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(message.body)


class ObservedCall:
    """A call whose answer is copied while it is sent; a context that ends with the call.

    Attributes:
        id: of the call.
    """

    __slots__ = (
        "_exchange", "_has_ended", "_last_event", "_left", "_pieces", "_process", "_service", "id"
    )  # fmt: skip

    def __init__(self, service: LinkingService, exchange: Exchange, id: str) -> None:
        self.id = id
        self._service = service
        self._exchange = exchange
        #: The process that was told of the beginning; a restarted one does not know the call.
        self._process = service.process
        self._pieces: list[bytes] = []
        #: Bytes of the answer that may still be copied.
        self._left = service.settings.max_body_bytes
        self._has_ended = False
        self._last_event = _LAST_EVENTS.get(exchange.path)
        exchange.copy_answer(self._take)

    def __enter__(self) -> None:
        """Enter the context in which the call is answered."""

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._has_ended:
            return
        if not isinstance(error, GatewayError):
            self._end(0)
        elif self._exchange.responded:
            # An error answer is still to be sent.
            self._end(error.status)

    def _take(self, data: bytes, is_last: bool) -> None:
        self._pieces.append(data)
        self._left -= len(data)
        if self._left < 0:
            self._pieces = [b"".join(self._pieces)[:_HEAD_BYTES]]
        # The last event completes the answer: the client may use it in its next call at once.
        event = self._last_event
        if is_last or (data.endswith(_DONE) if event is None else event.search(data)):
            self._end(self._exchange.record.status)

    def _end(self, status: int) -> None:
        """Report the end of the call; `status` counts only without a complete answer."""
        self._has_ended = True
        exchange, service, pieces = self._exchange, self._service, self._pieces
        # Otherwise the exchange's references would wait for the garbage collector.
        exchange.stop_copying(self._take)
        if self._process is service.process and service.is_running:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            service._gather(AnswerSeen(exchange.tenant, self.id, status, time.time(), body))


def _added(counters: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Merge the counters of both processes; skipped messages are added up."""
    return counters | others | {"skipped": counters["skipped"] + others.get("skipped", 0)}
