"""The least that a Python proxy can do: uvicorn, httptools and uvloop in front, aiohttp behind.

    python -m parrot_bench.bare_proxy http://127.0.0.1:8000/v1

The bound that `bench overhead --peer bare` measures the gateway against. Passes bytes on and
nothing else: no keys, no models, no retries, no limits.
"""

from __future__ import annotations

import sys
from typing import Any

import aiohttp
import uvicorn

#: Headers that belong to one connection, not to the message.
_OF_THE_CONNECTION = frozenset({b"connection", b"content-length", b"host", b"transfer-encoding"})


class BareProxy:
    """An ASGI application that passes every request on.

    Args:
        upstream: base URL, ending in `/v1`.
    """

    def __init__(self, upstream: str) -> None:
        self._root = upstream.removesuffix("/v1")
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), auto_decompress=False
            )
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _OF_THE_CONNECTION
        ]
        request = self._session.request(
            scope["method"], self._root + scope["path"], data=body or None, headers=headers
        )
        async with request as answer:
            kept = [
                (name.lower(), value)
                for name, value in answer.raw_headers
                if name.lower() not in _OF_THE_CONNECTION - {b"content-length"}
            ]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            async for chunk in answer.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Server(uvicorn.Server):
    """Prints its base URL once it listens."""

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        port = self.servers[0].sockets[0].getsockname()[1]
        print(f"ready at http://127.0.0.1:{port}/v1", flush=True)


def main() -> None:
    """Serve until killed, on a free port; prints the base URL."""
    config = uvicorn.Config(
        BareProxy(sys.argv[1]),
        port=0,
        http="httptools",
        loop="uvloop",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
    )
    _Server(config).run()


if __name__ == "__main__":
    main()
