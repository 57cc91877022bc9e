"""A port that answers `/metrics` and nothing else, beside that of the API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from parrot_gateway.exceptions import GatewayError, NotFoundError
from parrot_gateway.http.dispatch import ASGIApp
from parrot_gateway.http.exchange import Exchange, Receive, Scope, Send
from parrot_gateway.telemetry.metrics.exposition import negotiate


class MetricsPort:
    """The ASGI application of both ports.

    Args:
        app: answers at every other port.
        port: where only metrics are answered, to anybody who can reach it.
        page: makes the page of a content type.
    """

    def __init__(self, app: ASGIApp, port: int, page: Callable[[str], Awaitable[bytes]]) -> None:
        self._app = app
        self._port = port
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection's request (ASGI)."""
        server = scope.get("server")
        if scope["type"] == "lifespan" or server is None or server[1] != self._port:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            exchange = Exchange(scope, receive, send)
            if exchange.path == "/metrics" and exchange.method == "GET":
                kind = negotiate(exchange.headers.get(b"accept", b"").decode("latin-1"))
                page = await self._page(kind)
                await exchange.respond(200, page, [(b"content-type", kind.encode())])
            else:
                error: GatewayError = NotFoundError(
                    "This port answers GET /metrics only.", code="unknown_route"
                )
                await exchange.respond_error(error)
