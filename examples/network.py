"""A simulated network between a program and a gateway: it delays, and counts round trips."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit


class _Client:
    """One client on the simulated network: an address of its own.

    A round trip begins when the client sends a request and has got something since it last sent
    one: calls that are under way side by side are one, whatever the number of connections. A
    request that comes in pieces begins with the first: what its connection gets ends it.
    """

    def __init__(self, latency_s: float) -> None:
        self.round_trips = 0
        self._delay_s = latency_s / 2
        self._is_sending = False

    async def serve(self, target: str) -> asyncio.Server:
        url = urlsplit(target)
        is_tls = url.scheme == "https"
        port = url.port or (443 if is_tls else 80)

        async def connected(
            client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter
        ) -> None:
            try:
                server_in, server_out = await asyncio.open_connection(
                    url.hostname, port, ssl=True if is_tls else None
                )
            except OSError:
                client_out.close()
                return
            has_begun = False

            def sends() -> None:
                nonlocal has_begun
                if not has_begun:
                    has_begun = True
                    self._sends()

            def gets() -> None:
                nonlocal has_begun
                has_begun = False
                self._gets()

            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pass_on(client_in, server_out, sends, None))
                    group.create_task(self._pass_on(server_in, client_out, None, gets))
            except* OSError:
                pass  # One side is gone: so is the connection.
            finally:
                client_out.close()
                server_out.close()

        return await asyncio.start_server(connected, "127.0.0.1", 0)

    def _sends(self) -> None:
        if not self._is_sending:
            self._is_sending = True
            self.round_trips += 1

    def _gets(self) -> None:
        self._is_sending = False

    async def _pass_on(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        on_read: Callable[[], None] | None,
        on_write: Callable[[], None] | None,
    ) -> None:
        """Everything, each piece after the delay; pieces travel behind one another."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1024)

        async def deliver() -> None:
            while True:
                due, data = await under_way.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    target.write_eof()
                    return
                if on_write is not None:
                    on_write()
                target.write(data)
                await target.drain()

        async with asyncio.TaskGroup() as group:
            group.create_task(deliver())
            while data := await source.read(65536):
                if on_read is not None:
                    on_read()
                await under_way.put((time.monotonic() + self._delay_s, data))
            await under_way.put((time.monotonic() + self._delay_s, b""))


class Network:
    """The simulated network between clients and a gateway, run by a thread; a context manager.

    Args:
        base_url: of the gateway.
        latency_s: of a round trip. Opening a connection takes no time.
    """

    def __init__(self, base_url: str, latency_s: float) -> None:
        self._base_url = base_url
        self._latency_s = latency_s
        self._clients: list[_Client] = []
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        # Connections that are cut off with the network are nobody's concern.
        self._loop.set_exception_handler(lambda *_: None)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cut(self) -> None:
        for server in self._servers:
            server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def client(self) -> str:
        """The address of the gateway for a client that was not there before."""
        client = _Client(self._latency_s)
        serving = asyncio.run_coroutine_threadsafe(client.serve(self._base_url), self._loop)
        server = serving.result()
        port = server.sockets[0].getsockname()[1]
        self._clients.append(client)
        self._servers.append(server)
        return f"http://127.0.0.1:{port}{urlsplit(self._base_url).path}"

    @property
    def round_trips(self) -> int:
        """Round trips of all clients so far."""
        return sum(client.round_trips for client in self._clients)
