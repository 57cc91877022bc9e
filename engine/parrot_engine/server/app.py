"""An engine on its own: the primitives over HTTP, without a gateway.

    POST /fill          {"context_id", "parent_context_id"?, "token_ids" | "text", …}
    POST /generate      {"context_id", "parent_context_id"?, "max_tokens"?, …, "stream"?}
    POST /free_context  {"context_id"}
    GET  /health

For one trusted client: one key or none, no tenants, no queueing beyond the engine's own. Errors
have OpenAI's shape. Text is filled as it is, special tokens included; `add_special_tokens` adds
those that the tokenizer puts at the beginning.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, fields
from types import FrameType
from typing import Annotated, Any, TypeAlias, TypeVar, get_type_hints

import msgspec
import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from parrot_engine.protocol import Engine, Fill, Filled, Generate, Generated, SamplingParams
from parrot_engine.server.service import TIMEOUT_S, ApiError, EngineService
from parrot_engine.text import OutputText, TextAssets

_MAX_BODY_BYTES = 64 * 1024 * 1024

_Pieces: TypeAlias = AsyncGenerator[dict[str, Any], None]

_Result = TypeVar("_Result")

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


#: The fields of `SamplingParams` with its defaults, besides those of a primitive.
_GenerateBody = msgspec.defstruct(
    "_GenerateBody",
    [
        ("context_id", _ContextId),
        ("parent_context_id", _ContextId | None, None),
        ("priority", int, 0),
        ("generated", int, 0),
        ("stream", bool, False),
        ("stop", str | list[str], ()),
        *(
            (item.name, get_type_hints(SamplingParams)[item.name], item.default)
            for item in fields(SamplingParams)
            if item.name not in ("stop", "grammar")
        ),
    ],
    forbid_unknown_fields=True,
)


class _FreeBody(msgspec.Struct, forbid_unknown_fields=True):
    context_id: _ContextId


class _ClientGone(Exception):
    """The client left before its answer."""


def create_app(engine: Engine, text: TextAssets, key: str | None = None) -> FastAPI:
    """The application for one engine, which it closes at its end.

    Args:
        engine: driven by this application alone.
        text: the model's tokenizer.
        key: callers must send it as `Authorization: Bearer …`; None: no key is checked.
    """
    service = EngineService(engine, text)
    expected = None if key is None else _digest(f"Bearer {key}")

    async def check_key(request: Request) -> None:
        sent = _digest(request.headers.get("authorization", ""))
        if expected is not None and not hmac.compare_digest(sent, expected):
            raise ApiError(401, "Incorrect API key provided.", "invalid_api_key")

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

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return _json({"error": error.error}, error.status)

    @app.exception_handler(TimeoutError)
    async def on_timeout(request: Request, error: TimeoutError) -> Response:
        message = f"The engine did not finish within {TIMEOUT_S:g} s."
        return await on_api_error(request, ApiError(504, message, "timeout"))

    @app.exception_handler(_ClientGone)
    async def on_client_gone(_: Request, error: _ClientGone) -> Response:
        # No client is left to read it.
        return Response(status_code=499)

    @app.exception_handler(HTTPException)
    async def on_routing_error(request: Request, error: HTTPException) -> Response:
        path, method = request.url.path, request.method
        if error.status_code == 405:
            refusal = ApiError(405, f"{path} does not take {method}.", "method_not_allowed")
        else:
            message = f"No such route: {method} {path}."
            refusal = ApiError(error.status_code, message, "unknown_route")
        answer = await on_api_error(request, refusal)
        answer.headers.update(error.headers or {})
        return answer

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
        return _json(await _while_connected(request, _fill(service, body)))

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        body = await _body(request, _GENERATE_DECODER)
        if body.stream:
            return await _stream(request, _generate(service, body))
        return _json(await _while_connected(request, _collect(_generate(service, body))))

    @app.post("/free_context")
    async def free_context(request: Request) -> Response:
        body = await _body(request, _FREE_DECODER)
        service.free(body.context_id)
        return _json({"context_id": body.context_id})

    return app


class _Server(uvicorn.Server):
    """Uvicorn, but a signal that was followed is not raised again: it was no failure."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler: finish what runs; at the second signal, do not."""
        self.force_exit = self.should_exit
        self.should_exit = True


def run_server(
    engine: Engine, text: TextAssets, *, listener: socket.socket, key: str | None = None
) -> int:
    """Serve on a bound socket until SIGINT or SIGTERM; returns the exit status."""
    config = uvicorn.Config(
        create_app(engine, text, key), access_log=False, log_level="warning",
        timeout_graceful_shutdown=10,
    )  # fmt: skip
    server = _Server(config)
    server.run(sockets=[listener])
    return 0 if server.started else 1


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


_FILL_DECODER = msgspec.json.Decoder(_FillBody)
_GENERATE_DECODER = msgspec.json.Decoder(_GenerateBody)
_FREE_DECODER = msgspec.json.Decoder(_FreeBody)


async def _body(request: Request, decoder: msgspec.json.Decoder[Any]) -> Any:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MAX_BODY_BYTES:
            raise ApiError(413, "The request body is too large.", "request_too_large")
    try:
        return decoder.decode(bytes(data))
    except msgspec.DecodeError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise ApiError(400, f"{message}.", "invalid_body", path.rstrip("`") or None) from None


async def _while_connected(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`, which is cancelled the moment the client goes away.

    Args:
        request: its body has been read.
        work: frees what it holds when it is cancelled.

    Raises:
        _ClientGone: the client went first.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _fill(service: EngineService, body: _FillBody) -> dict[str, Any]:
    if (body.token_ids is None) == (body.text is None):
        raise ApiError(400, "Give either 'token_ids' or 'text'.", "invalid_body", "token_ids")
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
    service.tails.append(body.context_id, body.parent_context_id, token_ids)
    return answer


async def _generate(service: EngineService, body: Any) -> _Pieces:
    """Pieces of the answer: text that is certain, with the tokens that came meanwhile."""
    given: dict[str, Any] = {
        item.name: getattr(body, item.name, None) for item in fields(SamplingParams)
    }
    given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    sampling = SamplingParams(**given)
    source = body.context_id if body.parent_context_id is None else body.parent_context_id
    output = OutputText(service.tokenizer, service.tails.get(source), sampling.stop)
    primitive = Generate(
        body.context_id, sampling, body.parent_context_id, body.priority, body.generated
    )
    generated: list[int] = []
    async with service.running(primitive) as events:
        async for event in events:
            assert isinstance(event, Generated)
            generated += event.token_ids
            delta = output.push(event.token_ids, event.finish_reason)
            piece: dict[str, Any] = {"text": delta.text, "token_ids": event.token_ids}
            if event.logprobs is not None:
                piece["logprobs"] = event.logprobs
            piece["finish_reason"] = delta.finish_reason
            yield piece
            if delta.stop_string is not None:
                break
        # Forgotten again where the context is freed, as with a stop string.
        service.tails.append(body.context_id, body.parent_context_id, generated)


async def _collect(pieces: _Pieces) -> dict[str, Any]:
    answer: dict[str, Any] = {"text": "", "token_ids": []}
    async for piece in pieces:
        answer["text"] += piece["text"]
        answer["token_ids"] += piece["token_ids"]
        if "logprobs" in piece:
            answer.setdefault("logprobs", []).extend(piece["logprobs"])
        answer["finish_reason"] = piece["finish_reason"]
    return answer


async def _stream(request: Request, pieces: _Pieces) -> Response:
    """Server-sent events; what fails before the first piece is a plain error."""

    async def begin() -> dict[str, Any]:
        return await anext(pieces)

    first = await _while_connected(request, begin())

    async def body() -> AsyncIterator[bytes]:
        try:
            # A client that leaves closes this generator, and with it the context is freed.
            async with aclosing(pieces):
                yield _event(first)
                async for piece in pieces:
                    yield _event(piece)
        except ApiError as error:
            yield _event({"error": error.error})
        except TimeoutError:
            yield _event({"error": ApiError(504, "The engine is too slow.", "timeout").error})
        yield b"data: [DONE]\n\n"

    return StreamingResponse(body(), media_type="text/event-stream")


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
