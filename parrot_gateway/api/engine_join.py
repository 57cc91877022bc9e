"""Where engines join: a WebSocket on which they register, and the pump behind it.

The engine's end is `parrot_engine.link.client`. Here are authentication, the handshake, and the
end of a link that has fallen silent; what the messages mean is in
`parrot_gateway.backends.own.remote`.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import hmac
import logging
from collections.abc import Callable, Sequence

from fastapi import WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse
from parrot_engine.link.wire import (
    Adapters,
    Blocks,
    Events,
    FromEngine,
    Goodbye,
    Heartbeat,
    Refused,
    Register,
    Registered,
    WireError,
    decode_from_engine,
    encode,
)
from parrot_engine.protocol import PROTOCOL_VERSION, BlockChanges
from parrot_engine.text import TextAssets, TextAssetsError, Tokenizer

from parrot_gateway.backends.own.registry import EngineRegistry, RegistrationRefused
from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.exceptions import AuthenticationError, LossKind
from parrot_gateway.http.exchange import new_request_id
from parrot_gateway.settings.model import EngineLinkSettings

logger = logging.getLogger(__name__)

JOIN_PATH = "/v1/engines/join"

#: How long an engine may take to send its registration, tokenizer included.
_REGISTER_TIMEOUT_S = 60.0

#: A link is lost after this many heartbeats that did not come.
_MISSING_HEARTBEATS = 3

#: WebSocket close codes.
_PROTOCOL_ERROR = 1002
#: Not 1001 or 1012, by which an engine learns that the gateway itself ends.
_TRY_AGAIN_LATER = 1013


class _Lost(Exception):
    """The link is over; the message holds the reason."""

    def __init__(self, reason: str, kind: LossKind) -> None:
        super().__init__(reason)
        self.kind: LossKind = kind


class EngineLinkEndpoint:
    """The handler of `JOIN_PATH`.

    Mount it with `@app.websocket(JOIN_PATH)`, or a Starlette `WebSocketRoute`, and limit messages
    to `parrot_engine.link.wire.MAX_MESSAGE_BYTES` in the server.

    Args:
        registry: where engines are added and removed.
        join_keys: keys of which an engine must send one; only their hashes are kept.
        heartbeat_s: how often engines shall show that they are alive.
        stall_s: an engine with work that computes nothing for so long is lost.
        own_key: the one of those keys that only the gateway's own processes have.
        is_own_name: whether a name is that of such a process; others may not take it.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        join_keys: Sequence[str],
        heartbeat_s: float = EngineLinkSettings().heartbeat_s,
        stall_s: float = EngineLinkSettings().stall_s,
        *,
        own_key: str | None = None,
        is_own_name: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._registry = registry
        self._own_digest = None if own_key is None else _digest(own_key.encode())
        self._is_own_name = is_own_name
        self._digests = [_digest(key.encode()) for key in join_keys]
        self._heartbeat_s = heartbeat_s
        self._stall_s = stall_s

    async def __call__(self, websocket: WebSocket) -> None:
        """Serve one engine until its link ends."""
        digest = self._key_of(websocket.headers.get("authorization"))
        if digest is None:
            error = AuthenticationError("Engines join with the gateway's join key.")
            address = websocket.client.host if websocket.client else "an unknown address"
            logger.warning("an engine at %s was refused: no join key, or a wrong one", address)
            await websocket.send_denial_response(
                JSONResponse(
                    {"error": error.to_dict()},
                    status_code=error.status,
                    headers={"x-request-id": new_request_id()},
                )
            )
            return
        await websocket.accept()
        engine: RemoteEngine | None = None
        reason, code = "its link was closed", _TRY_AGAIN_LATER
        kind: LossKind = "link"
        try:
            engine = await self._register(websocket, is_own=digest == self._own_digest)
            if engine is not None:
                await self._pump(websocket, engine)
        except _Lost as lost:
            reason, kind = str(lost), lost.kind
        except WebSocketDisconnect:
            reason = "the connection broke"
        except WireError as error:
            reason, code, kind = f"protocol error: {error}", _PROTOCOL_ERROR, "protocol"
        finally:
            if engine is not None:
                if engine.draining and kind == "link":
                    kind = "left"
                self._registry.remove(engine.id, reason, kind)
            elif code == _PROTOCOL_ERROR:
                logger.warning("an engine did not register: %s", reason)
        await _close(websocket, code)

    def _key_of(self, authorization: str | None) -> bytes | None:
        """The digest of the join key that an engine sent; None without one."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip().encode())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest if scheme.lower() == "bearer" and any(matches) else None

    async def _register(self, websocket: WebSocket, *, is_own: bool) -> RemoteEngine | None:
        """The handshake; None when the engine was refused."""
        try:
            async with asyncio.timeout(_REGISTER_TIMEOUT_S):
                message = await _receive(websocket)
        except TimeoutError:
            raise WireError("no registration came") from None
        if not isinstance(message, Register):
            raise WireError("the first message was not a registration")
        try:
            if message.protocol_version != PROTOCOL_VERSION:
                raise RegistrationRefused(
                    f"it speaks protocol version {message.protocol_version}, this gateway "
                    f"{PROTOCOL_VERSION}: install the same version of parrot-gateway",
                    retry=False,
                )
            if not is_own and self._is_own_name(message.name):
                raise RegistrationRefused(
                    f"an engine process of the gateway's own is called '{message.name}': give "
                    "this one another name (--engine-name)",
                    retry=False,
                )
            self._registry.check(message)
            tokenizer = self._registry.shared_tokenizer(message)
            if tokenizer is None:
                # Building it takes up to a second, which must not stop everything else.
                tokenizer = await asyncio.to_thread(_build_tokenizer, message.text)
            engine = self._registry.add(message, tokenizer)
        except RegistrationRefused as refused:
            await websocket.send_bytes(encode(Refused(refused.reason, refused.retry)))
            logger.warning("engine %s was refused: %s", message.name, refused.reason)
            return None
        except TextAssetsError as error:
            raise WireError(str(error)) from None
        logger.info("engine %s joined with %s", engine.name, engine.info.model)
        return engine

    async def _pump(self, websocket: WebSocket, engine: RemoteEngine) -> None:
        """Move messages both ways until the link ends, which is always an exception."""
        received = asyncio.Event()
        tasks = [
            asyncio.create_task(self._send(websocket, engine), name="engine-send"),
            asyncio.create_task(
                self._receive_all(websocket, engine, received), name="engine-receive"
            ),
            asyncio.create_task(self._watch(engine, received), name="engine-watch"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _send(self, websocket: WebSocket, engine: RemoteEngine) -> None:
        await websocket.send_bytes(encode(Registered(engine.id, self._heartbeat_s)))
        while True:
            data = engine.take_outgoing()
            if data is None:
                await engine.has_outgoing.wait()
            else:
                await websocket.send_bytes(data)

    async def _receive_all(
        self, websocket: WebSocket, engine: RemoteEngine, received: asyncio.Event
    ) -> None:
        while True:
            message = await _receive(websocket)
            received.set()
            if isinstance(message, Events):
                engine.deliver(message.events)
                if engine.has_crashed:
                    # At once: its calls are placed anew before this task's end is noticed.
                    self._registry.remove(engine.id, "it broke down", "crashed")
                    raise _Lost("it broke down", "crashed")
            elif isinstance(message, Blocks):
                engine.note_blocks(BlockChanges(message.stored, message.evicted))
            elif isinstance(message, Heartbeat):
                engine.note_stats(message.stats)
            elif isinstance(message, Adapters):
                self._registry.note_adapters(engine, message)
            elif isinstance(message, Goodbye):
                logger.info("engine %s is leaving: %s", engine.name, message.reason)
                self._registry.drain(engine.id)
            else:
                raise WireError("a second registration on the same link")

    async def _watch(self, engine: RemoteEngine, received: asyncio.Event) -> None:
        """Raise once the engine has been silent, or has worked on nothing, for too long.

        NOTE: time is counted in turns of this loop, not read off the clock at the end: a
        gateway that was itself stopped for a while must read what has arrived before it judges.
        """
        silent = stalled = steps = 0
        while silent < _MISSING_HEARTBEATS:
            await asyncio.sleep(self._heartbeat_s)
            silent = 0 if received.is_set() else silent + 1
            received.clear()
            is_stalled = engine.running and engine.stats.steps == steps
            stalled, steps = stalled + 1 if is_stalled else 0, engine.stats.steps
            if stalled * self._heartbeat_s >= self._stall_s:
                raise _Lost(f"it had work and ran no step for {self._stall_s:g} s", "stalled")
        raise _Lost(f"no heartbeat for {silent * self._heartbeat_s:g} s", "silent")


def _build_tokenizer(text: TextAssets) -> Tokenizer:
    """The tokenizer of an engine; the memory that reading it took is given back.

    Without that glibc keeps 60 MB for a vocabulary of 128,000; giving them back takes 4 ms.
    """
    tokenizer = Tokenizer(text)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return tokenizer


async def _receive(websocket: WebSocket) -> FromEngine:
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code") or 1006)
    data = message.get("bytes")
    if data is None:
        raise WireError("a text frame on the link")
    return decode_from_engine(data)


async def _close(websocket: WebSocket, code: int) -> None:
    try:
        await websocket.close(code)
    except (RuntimeError, OSError, WebSocketDisconnect):
        # The other side was faster.
        logger.debug("the link was closed already")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
