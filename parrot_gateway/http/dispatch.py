"""Dispatches every HTTP request to its handler.

Checks the key, counts the call, sends the hot paths to their handlers and everything else to
FastAPI, and turns whatever goes wrong into an answer in OpenAI's shape. Knows no bodies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from parrot_gateway.exceptions import (
    AuthenticationError,
    GatewayError,
    MethodNotAllowedError,
)
from parrot_gateway.http.admission import CallGate
from parrot_gateway.http.auth import KeyCheck
from parrot_gateway.http.exchange import ClientDisconnected, Exchange, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]

#: How long a client of a call that is cut off may take to read that.
_LAST_WORDS_S = 0.5

#: Reachable without a key: probes, and the description of the API.
OPEN_PATHS = frozenset(
    {"/health", "/health/liveness", "/health/readiness", "/version", "/docs", "/openapi.json"}
)


class Dispatcher:
    """The ASGI application.

    Args:
        hot: handlers by exact path, all of them POST.
        parrot: who answers a path of Parrot's own API, if it is one; checks keys itself.
        own: who answers a path of the gateway's own under `/v1/`, if it is one.
        passthrough: takes paths under `/v1/` that nothing else knows.
        management: the FastAPI application with all other routes.
        is_management: whether a path under `/v1/` is one of its routes.
        keys: checks the caller's key.
        gate: counts calls.
    """

    def __init__(
        self,
        *,
        hot: dict[str, Handler],
        parrot: Callable[[Exchange], Handler | None],
        own: Callable[[Exchange], Handler | None],
        passthrough: Handler,
        management: ASGIApp,
        is_management: Callable[[str], bool],
        keys: KeyCheck,
        gate: CallGate,
    ) -> None:
        self._hot = hot
        self._parrot = parrot
        self._own = own
        self._passthrough = passthrough
        self._management = management
        self._is_management = is_management
        self._keys = keys
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection's request (ASGI)."""
        if scope["type"] != "http":
            await self._management(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        path = exchange.path
        handler = self._hot.get(path)
        if handler is not None:
            await self._call(exchange, handler, post_only=True)
        elif (handler := self._parrot(exchange)) is not None:
            await self._call(exchange, handler, post_only=False, check_key=False)
        elif (handler := self._own(exchange)) is not None:
            await self._call(exchange, handler, post_only=False)
        elif (
            self._passthrough is not None
            and path.startswith("/v1/")
            and not self._is_management(path)
        ):
            await self._call(exchange, self._passthrough, post_only=False)
        else:
            await self._ask_quiet(exchange, scope, receive, send)

    async def _call(
        self, exchange: Exchange, handler: Handler, *, post_only: bool, check_key: bool = True
    ) -> None:
        try:
            if check_key:
                self._keys.check(exchange.header(b"authorization"))
            if post_only and exchange.method != "POST":
                raise MethodNotAllowedError(f"{exchange.path} takes POST, not {exchange.method}.")
            task = asyncio.current_task()
            self._gate.enter(task)
        except GatewayError as error:
            await exchange.respond_error(error)
            return
        try:
            await handler(exchange)
        except ClientDisconnected:
            logger.debug("%s: the client went away", exchange.request_id)
        except asyncio.CancelledError:
            # Cancellations by the disconnect watch and by the drain's end are dealt with here.
            if exchange.disconnected:
                logger.debug("%s: the client went away", exchange.request_id)
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
            self._gate.leave(task)

    async def _cut_off(self, exchange: Exchange, error: GatewayError) -> None:
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._answer_error(exchange, error)
        except TimeoutError:
            logger.debug("%s: the client reads nothing", exchange.request_id)

    async def _answer_error(self, exchange: Exchange, error: GatewayError) -> None:
        if exchange.completed:
            return
        if error.status >= 500:
            logger.warning("%s: %s: %s", exchange.request_id, error.code, error.message)
        if not exchange.responded:
            await exchange.respond_error(error)
        elif exchange.fail_in_band is not None:
            await exchange.fail_in_band(error)
        else:
            # The connection is cut: the client has no other way to notice.
            logger.error("%s: failed after its answer began", exchange.request_id)

    async def _ask_quiet(
        self, exchange: Exchange, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if exchange.path not in OPEN_PATHS:
            try:
                self._keys.check(exchange.header(b"authorization"))
            except AuthenticationError as error:
                await exchange.respond_error(error)
                return
        scope["state"] = {**scope.get("state", {}), "exchange": exchange}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *exchange.standard_headers()]
                exchange.responded = True
            await send(message)

        try:
            await self._management(scope, receive, send_with_headers)
        except Exception:
            logger.exception("%s: %s failed", exchange.request_id, exchange.path)
            if not exchange.responded:
                await exchange.respond_error(internal_error(exchange.request_id))


def internal_error(request_id: str) -> GatewayError:
    """The error that a client gets for a fault of ours: where the log has more, no details."""
    return GatewayError(
        f"The gateway failed to answer. The operator's log has the details under {request_id}."
    )
