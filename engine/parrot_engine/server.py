"""An engine on its own: the primitives over HTTP, without a gateway.

    POST /fill          {"context_id", "parent_context_id"?, "token_ids" | "text", …}
    POST /generate      {"context_id", "parent_context_id"?, "max_tokens"?, …, "stream"?}
    POST /free_context  {"context_id"}
    GET  /health

For one trusted client: one key or none, no tenants, no queueing beyond the engine's own. Errors
have OpenAI's shape. Text is filled as it is, special tokens included: `add_special_tokens` asks
for the tokenizer's own beginning.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from typing import Annotated, Any, TypeAlias

import msgspec
import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from parrot_engine.driver import DriverStoppedError, EngineDriver
from parrot_engine.protocol import (
    Engine,
    Event,
    Failed,
    FailureCode,
    Fill,
    Filled,
    FreeContext,
    Generate,
    Generated,
    Primitive,
    SamplingParams,
)
from parrot_engine.text import IncrementalDetokenizer, StopStrings, TextAssets, Tokenizer

_log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 64 * 1024 * 1024

#: A primitive that takes longer is given up, and its context freed.
_TIMEOUT_S = 600.0

_STATUSES: dict[FailureCode, int] = {
    "context_too_long": 400,
    "unknown_context": 404,
    "invalid_request": 400,
    "numerical_error": 500,
    "overloaded": 503,
    "engine_error": 500,
}

_Pieces: TypeAlias = AsyncGenerator[dict[str, Any], None]

_ContextId = Annotated[int, msgspec.Meta(ge=0)]


class _FillBody(msgspec.Struct, forbid_unknown_fields=True):
    context_id: _ContextId
    parent_context_id: _ContextId | None = None
    token_ids: list[int] | None = None
    text: str | None = None
    add_special_tokens: bool = False
    prompt_logprobs: int | None = None
    salt: str = ""
    priority: int = 0
    pin: bool = False


class _GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
    context_id: _ContextId
    parent_context_id: _ContextId | None = None
    priority: int = 0
    stream: bool = False
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    stop: str | list[str] = []

    def sampling(self) -> SamplingParams:
        values = {
            name: getattr(self, name)
            for name in self.__struct_fields__
            if name not in ("context_id", "parent_context_id", "priority", "stream")
        }
        values["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        values["stop_token_ids"] = tuple(self.stop_token_ids)
        return SamplingParams(**values)


class _FreeBody(msgspec.Struct, forbid_unknown_fields=True):
    context_id: _ContextId


class _ApiError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error = {
            "message": message,
            "type": "invalid_request_error" if status < 500 else "server_error",
            "param": param,
            "code": code,
        }


class EngineService:
    """One engine for several HTTP requests: whose events are whose.

    One request at a time may work on a context; a second one is refused.
    """

    def __init__(self, engine: Engine, text: TextAssets) -> None:
        self.driver = EngineDriver(engine, on_crash=self._on_crash)
        self.tokenizer = Tokenizer(text)
        #: The last tokens of each context, from which a detokenizer can go on.
        self.tails: dict[int, list[int]] = {}
        self._waiting: dict[int, _Inbox] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the engine's thread; call it in the event loop."""
        self._loop = asyncio.get_running_loop()
        self.driver.attach(self._on_step)
        self.driver.start()

    async def close(self) -> None:
        """Stop the engine."""
        await asyncio.to_thread(self.driver.close)

    @asynccontextmanager
    async def running(self, primitive: Fill | Generate) -> AsyncIterator[AsyncIterator[Event]]:
        """Submit a primitive and receive its events.

        Leaving before the last one frees the context: whoever asked has gone.
        """
        context_id = primitive.context_id
        if context_id in self._waiting:
            raise _ApiError(
                409, f"Context {context_id} is at work for another request.", "context_busy",
                "context_id",
            )  # fmt: skip
        inbox = self._waiting[context_id] = _Inbox()
        try:
            self.submit(primitive)
            yield self._events(inbox)
        finally:
            del self._waiting[context_id]
            if not inbox.complete and not self.driver.crashed:
                self.free(context_id)

    def submit(self, *primitives: Primitive) -> None:
        """Hand primitives to the engine."""
        try:
            self.driver.submit(primitives)
        except DriverStoppedError:
            raise _ApiError(503, "The engine has stopped.", "engine_stopped") from None

    def free(self, context_id: int) -> None:
        """Free a context."""
        self.tails.pop(context_id, None)
        self.submit(FreeContext(context_id))

    async def _events(self, inbox: _Inbox) -> AsyncIterator[Event]:
        deadline = asyncio.get_running_loop().time() + _TIMEOUT_S
        while not inbox.complete:
            while not inbox.events:
                inbox.filled.clear()
                # NOTE: only round the wait: a stream is continued by another task than began it.
                async with asyncio.timeout_at(deadline):
                    await inbox.filled.wait()
            event = inbox.events.popleft()
            if isinstance(event, Failed):
                raise _ApiError(_STATUSES[event.code], event.message, event.code)
            inbox.complete = isinstance(event, Filled) or event.finish_reason is not None
            yield event

    def _on_step(self, events: list[Event]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver, events)
        except RuntimeError:
            # The server has ended while the engine's last step was running.
            _log.debug("events after the end of the event loop")

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            inbox = self._waiting.get(event.context_id)
            if inbox is not None:
                inbox.events.append(event)
                inbox.filled.set()

    def _on_crash(self, error: Exception) -> None:
        _log.error("the engine broke down: %s", error)


class _Inbox:
    """Events of one request that were not taken yet."""

    __slots__ = ("complete", "events", "filled")

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.filled = asyncio.Event()
        self.complete = False


def create_app(engine: Engine, text: TextAssets, key: str | None = None) -> FastAPI:
    """The application for one engine, which it closes at its end.

    Args:
        engine: not driven by anybody else.
        text: the model's tokenizer.
        key: callers must send it as `Authorization: Bearer …`; None lets everybody in.
    """
    service = EngineService(engine, text)
    wanted = None if key is None else _digest(f"Bearer {key}")

    async def check_key(request: Request) -> None:
        sent = _digest(request.headers.get("authorization", ""))
        if wanted is not None and not hmac.compare_digest(sent, wanted):
            raise _ApiError(401, "Incorrect API key provided.", "invalid_api_key")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="Parrot engine", lifespan=lifespan, dependencies=[Depends(check_key)], redoc_url=None
    )

    @app.exception_handler(_ApiError)
    async def on_api_error(_: Request, error: _ApiError) -> Response:
        return _json({"error": error.error}, error.status)

    @app.exception_handler(TimeoutError)
    async def on_timeout(_: Request, error: TimeoutError) -> Response:
        message = f"The engine did not finish within {_TIMEOUT_S:g} s."
        return _json({"error": _ApiError(504, message, "timeout").error}, 504)

    @app.get("/health")
    async def health() -> Response:
        crashed = service.driver.crashed
        state = {
            "status": "failed" if crashed else "ok",
            "engine": asdict(service.driver.info),
            "stats": service.driver.stats().to_dict(),
        }
        return _json(state, 503 if crashed else 200)

    @app.post("/fill")
    async def fill(request: Request) -> Response:
        body = await _body(request, _FILL_DECODER)
        return _json(await _fill(service, body))

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        body = await _body(request, _GENERATE_DECODER)
        if body.stream:
            return await _stream(_generate(service, body))
        return _json(await _collect(_generate(service, body)))

    @app.post("/free_context")
    async def free_context(request: Request) -> Response:
        body = await _body(request, _FREE_DECODER)
        service.free(body.context_id)
        return _json({"context_id": body.context_id})

    return app


def run_server(
    engine: Engine, text: TextAssets, *, host: str, port: int, key: str | None = None
) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status."""
    config = uvicorn.Config(
        create_app(engine, text, key), host=host, port=port, access_log=False,
        log_level="warning", timeout_graceful_shutdown=10,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.run()
    return 0 if server.started else 1


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


_FILL_DECODER = msgspec.json.Decoder(_FillBody)
_GENERATE_DECODER = msgspec.json.Decoder(_GenerateBody)
_FREE_DECODER = msgspec.json.Decoder(_FreeBody)

#: How many tokens of a context a detokenizer needs to go on from.
_TAIL = 8


async def _body(request: Request, decoder: msgspec.json.Decoder[Any]) -> Any:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MAX_BODY_BYTES:
            raise _ApiError(413, "The request body is too large.", "request_too_large")
    try:
        return decoder.decode(bytes(data))
    except msgspec.DecodeError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise _ApiError(400, f"{message}.", "invalid_body", path.rstrip("`") or None) from None


async def _fill(service: EngineService, body: _FillBody) -> dict[str, Any]:
    if (body.token_ids is None) == (body.text is None):
        raise _ApiError(400, "Give either 'token_ids' or 'text'.", "invalid_body", "token_ids")
    token_ids = body.token_ids
    if token_ids is None:
        assert body.text is not None
        token_ids = await asyncio.to_thread(
            service.tokenizer.encode, body.text, add_special_tokens=body.add_special_tokens
        )
    primitive = Fill(
        body.context_id,
        token_ids,
        body.parent_context_id,
        body.salt,
        body.prompt_logprobs,
        body.priority,
        body.pin,
    )
    answer: dict[str, Any] = {"context_id": body.context_id}
    async with service.running(primitive) as events:
        async for event in events:
            assert isinstance(event, Filled)
            answer["num_tokens"] = event.num_tokens
            answer["cached_tokens"] = event.cached_tokens
            if event.prompt_logprobs is not None:
                answer["prompt_logprobs"] = event.prompt_logprobs
    _remember(service, body.context_id, body.parent_context_id, token_ids)
    return answer


async def _generate(service: EngineService, body: _GenerateBody) -> _Pieces:
    """Pieces of the answer: text that is certain, with the tokens that came meanwhile."""
    sampling = body.sampling()
    source = body.context_id if body.parent_context_id is None else body.parent_context_id
    detokenizer = IncrementalDetokenizer(service.tokenizer, service.tails.get(source, ()))
    stops = StopStrings(sampling.stop)
    primitive = Generate(body.context_id, sampling, body.parent_context_id, body.priority)
    generated: list[int] = []
    async with service.running(primitive) as events:
        async for event in events:
            assert isinstance(event, Generated)
            generated += event.token_ids
            # The id that ends a text is not part of it.
            ended = event.finish_reason == "stop"
            shown = stops.push(detokenizer.push(event.token_ids[: -1 if ended else None]))
            piece: dict[str, Any] = {"text": shown.text, "token_ids": event.token_ids}
            matched = shown.matched
            if event.finish_reason is not None and matched is None:
                last = stops.push(detokenizer.flush())
                rest = stops.flush()
                piece["text"] += last.text + rest.text
                matched = last.matched or rest.matched
            if event.logprobs is not None:
                piece["logprobs"] = event.logprobs
            piece["finish_reason"] = "stop" if matched is not None else event.finish_reason
            yield piece
            if matched is not None:
                break
    if matched is None:
        _remember(service, body.context_id, body.parent_context_id, generated)


def _remember(
    service: EngineService, context_id: int, parent_id: int | None, token_ids: list[int]
) -> None:
    source = context_id if parent_id is None else parent_id
    service.tails[context_id] = [*service.tails.get(source, ()), *token_ids[-_TAIL:]][-_TAIL:]


async def _collect(pieces: _Pieces) -> dict[str, Any]:
    answer: dict[str, Any] = {"text": "", "token_ids": []}
    async for piece in pieces:
        answer["text"] += piece["text"]
        answer["token_ids"] += piece["token_ids"]
        if "logprobs" in piece:
            answer.setdefault("logprobs", []).extend(piece["logprobs"])
        answer["finish_reason"] = piece["finish_reason"]
    return answer


async def _stream(pieces: _Pieces) -> Response:
    """Server-sent events; what fails before the first piece is a plain error."""
    first = await anext(pieces)

    async def body() -> AsyncIterator[bytes]:
        try:
            # A client that leaves closes this generator, and with it the context is freed.
            async with aclosing(pieces):
                yield _event(first)
                async for piece in pieces:
                    yield _event(piece)
        except _ApiError as error:
            yield _event({"error": error.error})
        except TimeoutError:
            yield _event({"error": _ApiError(504, "The engine is too slow.", "timeout").error})
        yield b"data: [DONE]\n\n"

    return StreamingResponse(body(), media_type="text/event-stream")


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
