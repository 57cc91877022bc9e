"""The engine's end of the link: one WebSocket, dialled out to a gateway.

Registers, sends heartbeats, takes primitives, returns one message of events per engine step. A
lost connection frees every context: the gateway has given them up by then. Loading a model, and
the process around it, are in `parrot_engine.server.command`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from parrot_engine.engine.driver import EngineDriver
from parrot_engine.exceptions import ParrotEngineError
from parrot_engine.link.adapter_commands import AdapterCommands
from parrot_engine.link.wire import (
    MAX_MESSAGE_BYTES,
    Blocks,
    Events,
    Goodbye,
    Heartbeat,
    LoadAdapter,
    Message,
    Refused,
    Register,
    Registered,
    Submit,
    UnloadAdapter,
    WireError,
    decode_from_gateway,
    encode,
)
from parrot_engine.protocol import BlockChanges, Event
from parrot_engine.text.tokenizer import TextAssets

_log = logging.getLogger(__name__)

#: Steps whose events may wait to be sent before the engine pauses.
_MAX_UNSENT_STEPS = 64

#: Close codes of a gateway that ends in good order: going away, service restart.
_ORDERLY_CODES = frozenset({1001, 1012})

_CONNECT_TIMEOUT_S = 10.0
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 10.0

#: Answers to the handshake that trying again does not change.
_FINAL_STATUSES = frozenset({400, 401, 403, 404, 405, 410, 426})


class LinkRefusedError(ParrotEngineError):
    """The gateway refuses this engine, and another try would be refused too."""


class EngineLink:
    """Keeps one engine joined to one gateway.

    Args:
        driver: started; reset at each lost connection, never closed here.
        text: sent at registration.
        url: `ws://` or `wss://` address of the gateway's `/v1/engines/join`.
        join_key: bearer key.
        name: shown to operators; `host:pid` by default.
        drain_timeout_s: how long contexts may finish after `stop`.
        adapter_folders: from which the gateway may have adapters loaded.
    """

    def __init__(
        self,
        driver: EngineDriver,
        text: TextAssets,
        *,
        url: str,
        join_key: str,
        name: str | None = None,
        drain_timeout_s: float = 30.0,
        adapter_folders: Sequence[str] = (),
    ) -> None:
        self._driver = driver
        self._commands = AdapterCommands(driver, adapter_folders)
        self._register = Register(
            name or f"{socket.gethostname()}:{os.getpid()}", driver.info, text
        )
        self._url = url
        self._headers = {"Authorization": f"Bearer {join_key}"}
        self._drain_timeout_s = drain_timeout_s
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    def stop(self) -> None:
        """Leave: finish the contexts there are, then end `run`. The second call ends it at once.

        Call it in the event loop's thread.
        """
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    async def run(self) -> None:
        """Stay joined until `stop`, reconnecting with growing pauses. Cancellation leaves at once.

        Raises:
            LinkRefusedError: wrong key, wrong address, or a gateway of another version.
        """
        backoff_s = _FIRST_BACKOFF_S
        # After an orderly end the gateway is expected to be away: logged as debug.
        level = logging.WARNING
        while not self._stop.is_set():
            websocket = None
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    websocket = await self._connect()
                try:
                    heartbeat_s = await self._join(websocket)
                    backoff_s, level = _FIRST_BACKOFF_S, logging.WARNING
                    await self._serve(websocket, heartbeat_s)
                finally:
                    await websocket.close()
            except InvalidStatus as error:
                status = error.response.status_code
                if status in _FINAL_STATUSES:
                    raise LinkRefusedError(
                        f"The gateway at {self._url} refused this engine (HTTP {status}): check "
                        "the address and the join key."
                    ) from None
                _log.log(level, "the gateway answered HTTP %d", status)
            except (OSError, WebSocketException, WireError) as error:
                if not (isinstance(error, ConnectionClosed) and _ended_in_order(websocket)):
                    # TimeoutError is an OSError.
                    reason = str(error) or type(error).__name__
                    _log.log(level, "no link to %s: %s; trying again", self._url, reason)
            if self._stop.is_set():
                return
            if _ended_in_order(websocket):
                _log.info("the gateway at %s has shut down; waiting for its return", self._url)
                level = logging.DEBUG
            await self._pause(backoff_s)
            backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)

    async def _connect(self) -> ClientConnection:
        host = urlsplit(self._url).hostname or ""
        websocket = await connect(
            self._url,
            additional_headers=self._headers,
            compression=None,
            max_size=MAX_MESSAGE_BYTES,
            # A proxy between a process and its own machine is never meant.
            proxy=None if host in ("127.0.0.1", "::1", "localhost") else True,
            open_timeout=None,
            close_timeout=1.0,
        )
        raw = websocket.transport.get_extra_info("socket")
        if raw is not None and raw.family != getattr(socket, "AF_UNIX", None):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return websocket

    async def _join(self, websocket: ClientConnection) -> float:
        await websocket.send(encode(replace(self._register, adapters=self._commands.adapters)))
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            answer = decode_from_gateway(_binary(await websocket.recv()))
        if isinstance(answer, Registered):
            _log.info("joined %s as %s", self._url, answer.engine_id)
            return answer.heartbeat_s
        if isinstance(answer, Refused):
            if answer.retry:
                raise WireError(f"refused for now: {answer.reason}")
            raise LinkRefusedError(f"The gateway refused this engine: {answer.reason}")
        raise WireError("the gateway sent primitives before it registered the engine")

    async def _serve(self, websocket: ClientConnection, heartbeat_s: float) -> None:
        """Pump until the connection ends or the engine has left."""
        outbox = Outbox(asyncio.get_running_loop())
        self._driver.attach(outbox.put, outbox.put_blocks)
        commands: asyncio.Queue[LoadAdapter | UnloadAdapter] = asyncio.Queue()
        pumps = [
            asyncio.create_task(self._receive(websocket, commands), name="link-receive"),
            asyncio.create_task(self._carry_out(websocket, commands), name="link-adapters"),
            asyncio.create_task(outbox.send_all(websocket), name="link-send"),
            asyncio.create_task(self._heartbeat(websocket, heartbeat_s), name="link-heartbeat"),
            asyncio.create_task(self._leave(websocket), name="link-leave"),
        ]
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in done:
                pump.result()
        finally:
            outbox.close()
            self._driver.attach(None)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            # NOTE: the next connection names contexts by the same numbers; nothing of this one
            # may be left when it begins.
            await asyncio.shield(asyncio.to_thread(self._driver.reset))

    async def _receive(
        self, websocket: ClientConnection, commands: asyncio.Queue[LoadAdapter | UnloadAdapter]
    ) -> None:
        async for data in websocket:
            message = decode_from_gateway(_binary(data))
            if isinstance(message, Submit):
                self._driver.submit(message.primitives)
            elif isinstance(message, LoadAdapter | UnloadAdapter):
                commands.put_nowait(message)
            else:
                raise WireError(f"a {type(message).__name__} in the middle of a link")

    async def _carry_out(
        self, websocket: ClientConnection, commands: asyncio.Queue[LoadAdapter | UnloadAdapter]
    ) -> None:
        """Load and unload adapters; reading one takes its time, and primitives go on meanwhile."""
        while True:
            answer = await self._commands.carry_out(await commands.get())
            await websocket.send(encode(answer))

    async def _heartbeat(self, websocket: ClientConnection, heartbeat_s: float) -> None:
        while True:
            await websocket.send(encode(Heartbeat(self._driver.stats())))
            await asyncio.sleep(heartbeat_s)

    async def _leave(self, websocket: ClientConnection) -> None:
        await self._stop.wait()
        await websocket.send(encode(Goodbye("the engine is shutting down")))
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                # The gateway frees every context it is done with.
                while self._driver.num_contexts and not self._stop_now.is_set():
                    await _wait(self._stop_now, 0.02)
        except TimeoutError:
            _log.warning("%d contexts were cut off", self._driver.num_contexts)

    async def _pause(self, backoff_s: float) -> None:
        jitter = random.uniform(0.5, 1.0)  # noqa: S311  spreads reconnects, guards nothing
        await _wait(self._stop, backoff_s * jitter)


class Outbox:
    """The queue between the driver's thread and the socket, a step at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_steps: int = _MAX_UNSENT_STEPS) -> None:
        self._loop = loop
        self._messages: deque[Message] = deque()
        self._filled = asyncio.Event()
        self._room = threading.Semaphore(max_steps)
        self._closed = False

    def put(self, events: list[Event]) -> None:
        """Called by the driver's thread; waits while too many steps are unsent."""
        self._put(Events(events))

    def put_blocks(self, changes: BlockChanges) -> None:
        self._put(Blocks(*changes))

    def _put(self, message: Message) -> None:
        self._room.acquire()
        if self._closed:
            self._room.release()
            return
        try:
            self._loop.call_soon_threadsafe(self._append, message)
        except RuntimeError:
            # The loop is gone, and with it the consumer of these events.
            _log.debug("events after the end of the event loop")

    def close(self) -> None:
        """Drop what is unsent, now and later, and never block the driver again."""
        self._closed = True
        self._messages.clear()
        self._room.release()

    async def send_all(self, websocket: ClientConnection) -> None:
        """Send one message per step until cancelled."""
        while True:
            while self._messages:
                message = self._messages.popleft()
                self._room.release()
                await websocket.send(encode(message))
            self._filled.clear()
            await self._filled.wait()

    def _append(self, message: Message) -> None:
        if not self._closed:
            self._messages.append(message)
            self._filled.set()


def _ended_in_order(websocket: ClientConnection | None) -> bool:
    return websocket is not None and websocket.close_code in _ORDERLY_CODES


def _binary(data: str | bytes) -> bytes:
    if isinstance(data, str):
        raise WireError("a text frame on the link")
    return data


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
