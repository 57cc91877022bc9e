"""Dispatches every HTTP request to its handler.

Checks the key, counts the call, sends the hot paths to their handlers and everything else to
FastAPI, and turns whatever goes wrong into an answer in OpenAI's shape. Knows no bodies.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from parrot_gateway.calls.metadata import DEFAULT_TENANT
from parrot_gateway.exceptions import (
    AuthenticationError,
    DrainedError,
    DrainingError,
    GatewayError,
    MethodNotAllowedError,
    OverloadedError,
)
from parrot_gateway.http.exchange import ClientDisconnected, Exchange, Message, Receive, Scope, Send
from parrot_gateway.http.web_pages import WebPageGuard, preflight_advice
from parrot_gateway.telemetry.call_record import CLIENT_LEFT, CallRecords

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("parrot_gateway.access")

ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]

#: How long a client of a call that is cut off may take to read that.
_LAST_WORDS_S = 0.5

#: Routes whose requests are calls, if they are POST; of other paths under `/v1/`, those that go to
#: upstreams.
CALL_ROUTES = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/messages"),
        *("/v1/responses", "/v1/responses/compact"),
        *("/v1/embeddings", "/v1/rerank", "/v1/score"),
        *("/v2/rerank", "/rerank", "/score"),
        *("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"),
        *("/v1/images/edits", "/v1/images/generations", "/v1/images/variations"),
        "/v1/moderations",
    }
)
#: Path of the records of other calls that go to upstreams.
OTHER_ROUTE = "/v1/*"
#: Paths under these read and change what is kept, and are no calls.
_KEPT = ("/v1/responses/", "/v1/conversations")

#: Reachable without a key: probes, and the description of the API.
OPEN_PATHS = frozenset(
    {
        *("/", "/docs", "/openapi.json", "/version"),
        *("/health", "/health/liveness", "/health/readiness"),
        # Checks keys itself, as the settings have it.
        "/metrics",
    }
)


class KeyCheck:
    """Checks `Authorization: Bearer …` or `x-api-key` against one key, or lets everybody in.

    Args:
        key: the secret; None when the gateway serves its own host only.
    """

    __slots__ = ("_digest", "required")

    def __init__(self, key: str | None) -> None:
        self._digest = None if key is None else _digest(key.encode())
        #: Whether callers need a key.
        self.required = key is not None

    def use(self, key: str) -> None:
        """Check against another key from now on."""
        self._digest = _digest(key.encode())

    def check(self, authorization: bytes | None, api_key: bytes | None = None) -> str:
        """The tenant of a caller; either header is enough.

        Args:
            authorization, api_key: the headers `Authorization` and `x-api-key`, as Anthropic's
                clients send it.

        Raises:
            AuthenticationError: no key, or the wrong one.
        """
        if self._digest is None:
            return DEFAULT_TENANT
        if api_key is not None and self.is_key(api_key):
            return DEFAULT_TENANT
        if authorization is None and api_key is None:
            raise AuthenticationError(
                "You didn't provide an API key. Send it as 'Authorization: Bearer KEY'."
            )
        scheme, _, credentials = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not self.is_key(credentials):
            raise AuthenticationError("Incorrect API key provided.")
        return DEFAULT_TENANT

    def is_key(self, credentials: bytes) -> bool:
        """Compare with the key, blanks around the credentials aside."""
        assert self._digest is not None
        return hmac.compare_digest(_digest(credentials.strip()), self._digest)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class CallGate:
    """Counts calls in and out; refuses when full or closing.

    Args:
        limit: calls in work at once.
        retry_after_s: seconds after which clients that are refused during a shutdown retry.
    """

    def __init__(self, limit: int, retry_after_s: float = 5.0) -> None:
        self._limit = limit
        self._retry_after_s = retry_after_s
        self._empty = asyncio.Event()
        self._empty.set()
        self._tasks: set[asyncio.Task[object]] = set()
        self._cut: set[asyncio.Task[object]] = set()
        self.running = 0
        self.accepted = 0
        self.refused = 0
        self.draining = False
        #: The operator wants no more calls here: see `set_drained`.
        self.drained = False
        self._refuses_drained = False
        self._refusal: asyncio.TimerHandle | None = None

    @property
    def is_draining(self) -> bool:
        """No new calls are wanted: the gateway shuts down, or its operator has drained it."""
        return self.draining or self.drained

    def set_drained(self, drained: bool, refuse_after_s: float | None = None) -> None:
        """Announce that no calls are wanted, or that they are again.

        Whoever asks for readiness learns it at once; calls are answered for `refuse_after_s` more
        (None: for as long as they come), so that load balancers have time to send them elsewhere.
        """
        self.drained, self._refuses_drained = drained, False
        if self._refusal is not None:
            self._refusal.cancel()
            self._refusal = None
        if drained and refuse_after_s == 0:
            self._refuses_drained = True
        elif drained and refuse_after_s is not None:
            loop = asyncio.get_running_loop()
            self._refusal = loop.call_later(refuse_after_s, self._refuse_drained)

    def _refuse_drained(self) -> None:
        self._refusal, self._refuses_drained = None, True

    def describe_drain(self) -> dict[str, Any]:
        """Describe if the operator has drained the gateway, and what still runs; plain types.

        `refuses_in_s` is 0 only once calls are refused.
        """
        refuses_in_s = 0.0 if self._refuses_drained else None
        if self._refusal is not None:
            left_s = self._refusal.when() - asyncio.get_running_loop().time()
            refuses_in_s = max(0.1, round(left_s, 1))
        return {"drained": self.drained, "refuses_in_s": refuses_in_s, "running": self.running}

    def enter(self, task: asyncio.Task[object] | None = None) -> None:
        """Count a call in; pair it with `leave`.

        Args:
            task: does the call's work, and is what `cut_off` cancels.

        Raises:
            DrainingError: the gateway is shutting down.
            DrainedError: the operator has drained it, some time ago.
            OverloadedError: `limit` calls are in work.
        """
        if self.draining:
            self.refused += 1
            raise self._draining_error("takes no new calls")
        if self._refuses_drained:
            self.refused += 1
            raise DrainedError("All calls to this gateway are refused: it is drained")
        if self.running >= self._limit:
            self.refused += 1
            raise OverloadedError(
                f"{self.running} calls are in work, which is this gateway's limit "
                "(setting server.max_running_calls)."
            )
        self.running += 1
        self.accepted += 1
        if self.running == 1:
            self._empty.clear()
        if task is not None:
            self._tasks.add(task)

    def leave(self, task: asyncio.Task[object] | None = None) -> None:
        """Count a call out."""
        self.running -= 1
        if task is not None:
            self._tasks.discard(task)
            self._cut.discard(task)
        if self.running == 0:
            self._empty.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new calls and wait for those in work; False when time ran out first."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def cut_off(self) -> int:
        """Cancel the calls in work; returns how many. See `cut_error`."""
        for task in self._tasks - self._cut:
            self._cut.add(task)
            task.cancel()
        return len(self._cut)

    def cut_error(self, task: asyncio.Task[object] | None) -> DrainingError | None:
        """The error of a call that `cut_off` cancelled, or None.

        The task's cancellation counts as dealt with.
        """
        if task is None or task not in self._cut:
            return None
        task.uncancel()
        return self._draining_error("could not wait for the end of this call; please send it again")

    def _draining_error(self, story: str) -> DrainingError:
        return DrainingError(
            f"This gateway is shutting down and {story}.", retry_after_s=self._retry_after_s
        )


class Access(NamedTuple):
    """The checks that the dispatcher makes before a handler is called."""

    #: Whether callers need the key of calls. Without it the handler checks what it needs.
    check_key: bool = True
    #: Whether only JSON is taken from callers without a key.
    json_only: bool = True
    #: Whether it counts as a call, and is refused when there are too many or the gateway drains.
    is_counted: bool = True


JSON_CALLS = Access()
ANY_CALLS = Access(json_only=False)
#: Routes that check keys by themselves; those of operators are answered at any time. They take any
#: body: a caller without a key can do nothing with one.
SELF_CHECKED_CALLS = Access(check_key=False)
OPERATOR_ROUTES = Access(check_key=False, json_only=False, is_counted=False)
#: Readers of calls that are counted already; they may come while the gateway drains.
READERS = Access(is_counted=False)


class Dispatcher:
    """The ASGI application.

    Args:
        hot: handlers by exact path, all of them POST.
        tables: find the handlers of the gateway's other routes, in this order.
        passthrough: takes paths under `/v1/` that nothing else knows.
        management: the FastAPI application with all other routes.
        is_management: whether a path under `/v1/` is one of its routes.
        keys: checks the caller's key.
        guard: checks callers that need none.
        gate: counts calls.
        shapes: by a hot path, gives an exchange the errors and headers of an API other than
            OpenAI's, before anything is checked.
        calls: get the records of calls.
        log_access: log a line for each request that is no call.
    """

    def __init__(
        self,
        *,
        hot: dict[str, Handler],
        tables: Sequence[tuple[Callable[[Exchange], Handler | None], Access]],
        passthrough: Handler,
        management: ASGIApp,
        is_management: Callable[[str], bool],
        keys: KeyCheck,
        guard: WebPageGuard,
        gate: CallGate,
        calls: CallRecords,
        shapes: Mapping[str, Callable[[Exchange], None]] | None = None,
        log_access: bool = False,
    ) -> None:
        self._hot = hot
        self._shapes = shapes or {}
        self._tables = tables
        self._passthrough = passthrough
        self._management = management
        self._is_management = is_management
        self._keys = keys
        self._guard = guard
        self._gate = gate
        self._calls = calls
        self._log_access = log_access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection's request (ASGI)."""
        if scope["type"] != "http":
            await self._management(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        record = exchange.record
        try:
            await self._dispatch(exchange, scope, receive, send)
        finally:
            exchange.release()
            if record.path:
                if not record.deferred:
                    record.end()
            elif self._log_access:
                _log_request(exchange)

    def _dispatch(
        self, exchange: Exchange, scope: Scope, receive: Receive, send: Send
    ) -> Awaitable[None]:
        """The answering of a request by its handler, to be awaited."""
        path = exchange.path
        handler = self._hot.get(path)
        if handler is not None:
            if exchange.method == "POST" and path in CALL_ROUTES:
                exchange.begin_call(self._calls, path)
            shape = self._shapes.get(path)
            if shape is not None:
                shape(exchange)
            return self._call(exchange, handler, JSON_CALLS, post_only=True)
        for find, access in self._tables:
            if (handler := find(exchange)) is not None:
                return self._call(exchange, handler, access)
        if path.startswith("/v1/") and not self._is_management(path):
            if exchange.method == "POST":
                if path in CALL_ROUTES:
                    exchange.begin_call(self._calls, path)
                elif not path.startswith(_KEPT):
                    exchange.begin_call(self._calls, OTHER_ROUTE)
            return self._call(exchange, self._passthrough, ANY_CALLS)
        return self._ask_quiet(exchange, scope, receive, send)

    async def _call(
        self, exchange: Exchange, handler: Handler, access: Access, *, post_only: bool = False
    ) -> None:
        check_key, json_only, is_counted = access
        try:
            headers = exchange.headers
            if not self._keys.required:
                sender = headers.get(b"host"), headers.get(b"origin"), headers.get(b"content-type")
                if sender not in self._guard.accepted:
                    self._guard.check(sender, json_only=json_only)
            elif check_key:
                exchange.tenant = self._tenant_of(exchange)
            elif b"authorization" not in headers:
                # May be served without a key, under whatever name this host has.
                sender = headers.get(b"host"), headers.get(b"origin"), headers.get(b"content-type")
                self._guard.check_page(sender, json_only=json_only)
            if post_only and exchange.method != "POST":
                advice = preflight_advice(headers) if exchange.method == "OPTIONS" else ""
                raise MethodNotAllowedError(
                    f"{exchange.path} takes POST, not {exchange.method}.{advice}"
                )
            task = asyncio.current_task()
            if is_counted:
                self._gate.enter(task)
        except GatewayError as error:
            await exchange.respond_error(error)
            return
        try:
            await handler(exchange)
        except ClientDisconnected:
            exchange.record.leave()
        except asyncio.CancelledError:
            # Cancellations by the disconnect watch and by the drain's end are dealt with here.
            if exchange.disconnected:
                exchange.record.leave()
            elif (cut := self._gate.cut_error(task)) is not None:
                await self._cut_off(exchange, cut)
            else:
                raise
        except GatewayError as error:
            await self._answer_error(exchange, error)
        except Exception:
            logger.exception("%s: %s failed", exchange.request_id, exchange.path)
            await self._answer_error(exchange, internal_error(exchange.request_id))
        finally:
            exchange.finish()
            if is_counted:
                self._gate.leave(task)

    def _tenant_of(self, exchange: Exchange) -> str:
        headers = exchange.headers
        return self._keys.check(headers.get(b"authorization"), headers.get(b"x-api-key"))

    async def _cut_off(self, exchange: Exchange, error: GatewayError) -> None:
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._answer_error(exchange, error)
        except TimeoutError:
            logger.debug("%s: the client reads nothing", exchange.request_id)

    async def _answer_error(self, exchange: Exchange, error: GatewayError) -> None:
        if exchange.completed:
            return
        if error.status >= 500 and not exchange.record.path:
            logger.warning("%s: %s: %s", exchange.request_id, error.code, error.message)
        if not exchange.responded:
            await exchange.respond_error(error)
        elif not await exchange.fail_in_band(error):
            # The connection is cut: the client has no other way to notice.
            exchange.record.fail(error)
            logger.error("%s: failed after its answer began", exchange.request_id)

    async def _ask_quiet(
        self, exchange: Exchange, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            if not self._keys.required:
                self._guard.check_host(exchange.headers.get(b"host"))
            elif exchange.path not in OPEN_PATHS:
                self._tenant_of(exchange)
        except GatewayError as error:
            await exchange.respond_error(error)
            return
        state = {**scope.get("state", {}), "exchange": exchange}
        # NOTE: a copy, as the server decides by its own whether the answer has a body.
        scope = {**scope, "method": exchange.method, "state": state}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *exchange.standard_headers()]
                exchange.responded = True
                exchange.record.status = message["status"]
            await send(message)

        try:
            await self._management(scope, receive, send_with_headers)
        except Exception:
            logger.exception("%s: %s failed", exchange.request_id, exchange.path)
            if not exchange.responded:
                await exchange.respond_error(internal_error(exchange.request_id))


def _log_request(exchange: Exchange) -> None:
    """One line: method, path, status, milliseconds until the end, request id."""
    path = exchange.scope.get("raw_path") or exchange.path.encode()
    access_logger.info(
        "%s %s %d %.1f ms %s",
        exchange.scope["method"],
        path.decode("latin-1"),
        exchange.record.status or CLIENT_LEFT,
        (time.perf_counter() - exchange.started) * 1000,
        exchange.request_id,
    )


def internal_error(request_id: str) -> GatewayError:
    """The error that a client gets for a fault of ours: where the log has more, no details."""
    return GatewayError(
        f"The gateway failed to answer. The operator's log has the details under {request_id}."
    )
