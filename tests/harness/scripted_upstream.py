"""An upstream that does exactly what a test scripts, and remembers what it was asked.

A raw HTTP/1.1 server on its own thread. A script belongs to a model name, so that tests running
against one gateway process never meet. It writes bytes, not frames: chunk borders, missing blank
lines and broken connections are all under the test's control.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

#: Longest wait for anything in here.
DEADLINE_S = 60.0
LISTED_MODEL = "scripted-listed"


@dataclass
class Received:
    """One request as it arrived, and what became of it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    #: Set when the other end closed the connection before the script was through.
    aborted: threading.Event = field(default_factory=threading.Event)
    #: Set when the script was through.
    completed: threading.Event = field(default_factory=threading.Event)

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


class Gate:
    """Holds a script until the test opens it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()

    def open(self) -> None:
        """Let the script go on."""
        self._loop.call_soon_threadsafe(self._event.set)

    async def passed(self) -> None:
        """Wait until it is open."""
        await asyncio.wait_for(self._event.wait(), DEADLINE_S)


#: What a script may do: write bytes, or wait at a gate.
Part = bytes | Gate


@dataclass(frozen=True)
class Answer:
    """One scripted answer: parts written in order, each with its own flush.

    With `chunked` the parts are framed and terminated; otherwise a content length is announced
    (of all bytes) and they are written as they are.
    """

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    parts: tuple[Part, ...] = ()
    content_type: str = "application/json"
    chunked: bool = False
    #: Break the connection after the last part instead of ending the body.
    cut: bool = False
    #: Wait here before the status line.
    before: Gate | None = None


def document(
    value: Any,
    status: int = 200,
    headers: dict[str, str] | None = None,
    *,
    before: Gate | None = None,
) -> Answer:
    """A JSON answer; bytes are sent as they are."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Answer(status, tuple((headers or {}).items()), (body,), before=before)


def event_stream(*parts: Part, cut: bool = False, before: Gate | None = None) -> Answer:
    """A stream of server-sent events, part by part."""
    return Answer(
        parts=parts, content_type="text/event-stream", chunked=True, cut=cut, before=before
    )


def error(status: int, **headers: str) -> Answer:
    """An error in OpenAI's shape with these headers (underscores become hyphens)."""
    body = {
        "error": {
            "message": f"scripted {status}",
            "type": "scripted_error",
            "param": None,
            "code": f"scripted_{status}",
        }
    }
    return document(body, status, {name.replace("_", "-"): text for name, text in headers.items()})


class ScriptedUpstream:
    """The server; a context manager.

    Attributes:
        base_url: ends in `/v1`.
        received: every POST in order of arrival.
    """

    #: Models that `GET /v1/models` lists.
    models: tuple[str, ...] = (LISTED_MODEL,)

    def __init__(self) -> None:
        self.received: list[Received] = []
        self._scripts: dict[str, list[Answer]] = {}
        self._numbers = itertools.count(1)
        self._arrival = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted-upstream")
        self._connections: set[asyncio.Task[None]] = set()
        self.base_url = ""
        self.port = 0

    def __enter__(self) -> ScriptedUpstream:
        self._thread.start()
        self._server = self._run(
            lambda: asyncio.start_server(self._connected, "127.0.0.1", 0, limit=2**20)
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _run(self, make: Callable[[], Awaitable[Any]]) -> Any:
        async def call() -> Any:
            return await make()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(DEADLINE_S)

    # -- for tests --------------------------------------------------------------------------

    def script(self, *answers: Answer) -> str:
        """A new model name whose calls get these answers in turn; the last one repeats."""
        model = f"scripted-{next(self._numbers)}"
        self._scripts[model] = list(answers)
        return model

    def script_listed(self, *answers: Answer) -> str:
        """The same for the one model that `GET /v1/models` lists."""
        self._scripts[LISTED_MODEL] = list(answers)
        return LISTED_MODEL

    def gate(self) -> Gate:
        """A gate for a script of this server."""
        return Gate(self._loop)

    def unscripted(self, call: Received) -> Answer:
        """Answer a call of a model that has no script."""
        return error(404)

    def calls(self, model: str) -> list[Received]:
        """The calls of a model so far."""
        with self._arrival:
            return [call for call in self.received if _model_of(call) == model]

    def wait_for_calls(self, model: str, count: int = 1) -> list[Received]:
        """Wait until a model was called this often; its calls."""
        with self._arrival:
            arrived = self._arrival.wait_for(
                lambda: sum(_model_of(call) == model for call in self.received) >= count, DEADLINE_S
            )
        assert arrived, f"{model} was called {len(self.calls(model))} times, not {count}"
        return self.calls(model)

    # -- the server -------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            early: bytes | None = b""
            while early is not None:
                early = await self._one_exchange(early, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _one_exchange(
        self, early: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes | None:
        """Answer one request; what came of the next one, or None at the end of the connection."""
        head = early + await reader.readuntil(b"\r\n\r\n")
        request_line, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = request_line.split(" ")
        headers = {
            name.strip().lower(): text.strip()
            for name, _, text in (line.partition(":") for line in lines if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        call = Received(method, target, headers, body)
        if method == "GET":
            listed = {"object": "list", "data": [_listed(name) for name in self.models]}
            await _send(writer, document(listed))
            return b""
        with self._arrival:
            self.received.append(call)
            self._arrival.notify_all()
        answers = self._scripts.get(_model_of(call)) or [self.unscripted(call)]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return await self._play(answer, call, reader, writer)

    async def _play(
        self,
        answer: Answer,
        call: Received,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bytes | None:
        playing = asyncio.ensure_future(_send(writer, answer))
        # The other end sends nothing before it has its answer: an end of file is a hang-up.
        watching = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({playing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and not watching.cancelled() and watching.exception() is None:
                early = watching.result()
            else:
                early = b""
            hung_up = watching.done() and not early
            if hung_up and not playing.done():
                call.aborted.set()
                return None
            try:
                await playing
            except ConnectionError:
                call.aborted.set()
                return None
            call.completed.set()
        finally:
            for task in (playing, watching):
                task.cancel()
            await asyncio.gather(playing, watching, return_exceptions=True)
        if answer.cut:
            writer.transport.abort()
            return None
        return None if hung_up else early


async def _send(writer: asyncio.StreamWriter, answer: Answer) -> None:
    if answer.before is not None:
        await answer.before.passed()
    length = sum(len(part) for part in answer.parts if isinstance(part, bytes))
    framing = "transfer-encoding: chunked" if answer.chunked else f"content-length: {length}"
    lines = [
        f"HTTP/1.1 {answer.status} Scripted",
        f"content-type: {answer.content_type}",
        framing,
        *(f"{name}: {text}" for name, text in answer.headers),
    ]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    await writer.drain()
    ending = b"0\r\n\r\n" if answer.chunked and not answer.cut else b""
    for number, part in enumerate(answer.parts, 1):
        if isinstance(part, Gate):
            await part.passed()
            continue
        framed = b"%x\r\n%s\r\n" % (len(part), part) if answer.chunked else part
        if number == len(answer.parts):
            # The end of the stream in one write with its last bytes.
            framed, ending = framed + ending, b""
        writer.write(framed)
        await writer.drain()
        # Each part shall be a read of its own at the other end, as far as a socket promises that.
        await asyncio.sleep(0)
    writer.write(ending)
    await writer.drain()


def _model_of(call: Received) -> str:
    with suppress(ValueError, AttributeError):
        return str(json.loads(call.body).get("model"))
    return ""


def _listed(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 1, "owned_by": "scripted"}


def chunk(model: str, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    """A chunk of a chat stream."""
    return {
        "id": "chatcmpl-scripted",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": model,
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}],
    }


def data(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chat_events(words: Sequence[str], model: str = "scripted") -> list[bytes]:
    """A whole chat stream: role, words, finish, `[DONE]`."""
    return [
        data(chunk(model, {"role": "assistant", "content": ""})),
        *(data(chunk(model, {"content": word})) for word in words),
        data(chunk(model, {}, "stop")),
        b"data: [DONE]\n\n",
    ]


def chat_document(text: str = "Hello.", model: str = "scripted") -> dict[str, Any]:
    """A whole chat completion."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return _document("chatcmpl-scripted", "chat.completion", model, {"message": message})


def completion_document(text: str = "Hello.", model: str = "scripted") -> dict[str, Any]:
    """A whole completion."""
    return _document("cmpl-scripted", "text_completion", model, {"text": text})


def _document(id: str, object_: str, model: str, content: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": "stop"}
    return {
        "id": id,
        "object": object_,
        "created": 1,
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }
