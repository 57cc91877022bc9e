"""The scripted upstream: an OpenAI-compatible server that does exactly what a test scripts.

A raw HTTP/1.1 server on its own thread, which remembers what it was asked. It writes bytes, not
frames: chunk borders, missing blank lines and broken connections are all under the test's control.
A call is answered by

- the line of text in its header `x-fake`, or behind `:` in its model's name (`answer_scripts.py`):
  `chunks=100, delay_ms=20, fault=drop, after=3`;
- else the answers that a test made for its model by `script`, so that tests running against one
  gateway process never meet;
- else some fixed text. It checks no parameters and no keys, and echoes other paths.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from harness.answer_scripts import (
    ANSWER_HEADERS,
    ERROR_BODY,
    Script,
    error_body,
    error_headers,
    parse_script,
    stream_events,
    whole_body,
)

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
    #: Its model, if the body names one.
    model: str = ""
    #: From its line of text, if it has one.
    script: Script | None = None
    #: Set when the other end closed the connection before the script was through.
    aborted: threading.Event = field(default_factory=threading.Event)
    #: Set when the script was through.
    completed: threading.Event = field(default_factory=threading.Event)
    started_at: float = field(default_factory=time.monotonic)

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)

    @property
    def ended(self) -> Literal["running", "complete", "aborted"]:
        if self.aborted.is_set():
            return "aborted"
        return "complete" if self.completed.is_set() else "running"

    def is_of(self, name: str) -> bool:
        """Return True if it is a call of this model, or has this key in its line of text."""
        return name in (self.model, self.script.key if self.script else "")


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


#: What a script may do: write bytes, wait at a gate, or be silent for some seconds.
Part = bytes | Gate | float


@dataclass(frozen=True)
class Answer:
    """One scripted answer: parts written in order, each with its own flush.

    With `chunked` the parts are framed and terminated; otherwise a content length is announced
    (of all bytes, unless `length` says another) and they are written as they are.
    """

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    parts: tuple[Part, ...] = ()
    content_type: str = "application/json"
    chunked: bool = False
    length: int | None = None
    #: Reset the connection after the last part instead of ending the body.
    cut: bool = False
    #: Close the connection after the last part, likewise.
    close: bool = False
    #: Say nothing after the last part, likewise.
    stall: bool = False
    #: The parts are all that is written: no status, no headers.
    bare: bool = False
    #: Write in TCP segments of this many bytes.
    split: int = 0
    #: Wait here before the status line.
    before: Part | None = None

    @property
    def breaks_off(self) -> bool:
        return self.cut or self.close or self.stall


def document(
    value: Any,
    status: int = 200,
    headers: dict[str, str] | None = None,
    *,
    before: Part | None = None,
) -> Answer:
    """A JSON answer; bytes are sent as they are."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Answer(status, tuple((headers or {}).items()), (body,), before=before)


def event_stream(*parts: Part, cut: bool = False, before: Part | None = None) -> Answer:
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


def played(script: Script, call: Received) -> Answer:
    """The answer to a call by its line of text."""
    path = call.target.partition("?")[0]
    fields = _fields_of(call)
    model = str(fields.get("model", "fake"))
    answer = Answer(headers=ANSWER_HEADERS, before=script.first_ms / 1000)
    body = whole_body(path, model, script.size, script.unicode)
    match script.fault:
        case "reset":
            return replace(answer, bare=True, cut=True)
        case "garbage":
            return replace(answer, bare=True, close=True, parts=(b"this is not HTTP\r\n\r\n",))
        case _ if script.status >= 400:
            headers = (*ANSWER_HEADERS, *error_headers(script))
            parts = (error_body("scripted failure"),)
            return replace(answer, status=script.status, headers=headers, parts=parts)
        case "error200":
            return replace(answer, parts=(ERROR_BODY,))
        case _ if fields.get("stream"):
            usage = bool((fields.get("stream_options") or {}).get("include_usage"))
            return _played_stream(answer, script, stream_events(path, model, script, usage))
        case "stall":
            return replace(answer, bare=True, stall=True)
        case "drop" | "half" | "truncate":
            parts = (body[: len(body) // 2],)
            return replace(answer, parts=parts, length=len(body), close=True)
    if path.endswith(("/completions", "/embeddings", "/responses")):
        return replace(answer, parts=(body,))
    content_type = call.headers.get("content-type", answer.content_type)
    return replace(answer, parts=(call.body or b"{}",), content_type=content_type)


def _played_stream(answer: Answer, script: Script, events: Sequence[bytes]) -> Answer:
    is_faulty = bool(script.fault)
    parts: list[Part] = []
    for event in events[: script.after if is_faulty else None]:
        parts += [script.delay_ms / 1000, event] if parts and script.delay_ms else [event]
    if script.end_ms and not is_faulty:
        parts.append(script.end_ms / 1000)
    if script.fault == "half":
        parts.append(b'data: {"id": "chatcmpl-fake", "object": "chat.comp')
    return replace(
        answer,
        headers=(*answer.headers, ("cache-control", "no-cache")),
        parts=tuple(parts),
        content_type="text/event-stream; charset=utf-8",
        chunked=True,
        split=script.split,
        cut=script.fault == "drop",
        close=script.fault in ("half", "truncate"),
        stall=script.fault == "stall",
    )


class ScriptedUpstream:
    """The server; a context manager.

    Attributes:
        base_url: ends in `/v1`.
        received: every request in order of arrival; not those for the list of models it has.
    """

    #: Models that `GET /v1/models` lists.
    models: tuple[str, ...] = (LISTED_MODEL,)

    def __init__(self, *models: str) -> None:
        self.received: list[Received] = []
        self.models = models or self.models
        self._scripts: dict[str, list[Answer]] = {}
        self._for_all: list[Answer] = []
        self._numbers = itertools.count(1)
        self._faults: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted-upstream")
        self._connections: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        #: Holds the port while nobody listens.
        self._held = _socket_at(0)
        self.port: int = self._held.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> ScriptedUpstream:
        self._thread.start()
        self.go_up()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_down()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()
        self._held.close()

    def go_up(self) -> None:
        """Listen."""
        listener = _socket_at(self.port)
        self._server: asyncio.Server = self._run(
            lambda: asyncio.start_server(self._connected, sock=listener, limit=2**20, backlog=2048)
        )

    def go_down(self) -> None:
        """Refuse connections and cut those there are. The port remains its own."""
        self._run(self._close)

    async def _close(self) -> None:
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _run(self, make: Callable[[], Awaitable[Any]]) -> Any:
        async def call() -> Any:
            return await make()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(2 * DEADLINE_S)

    # -- for tests --------------------------------------------------------------------------

    def script(self, *answers: Answer) -> str:
        """A new model name whose calls get these answers in turn; the last one repeats."""
        model = f"scripted-{next(self._numbers)}"
        self._scripts[model] = list(answers)
        return model

    def answer_all(self, *answers: Answer) -> None:
        """Give every request these answers in turn, those for models as well; the last repeats."""
        self._for_all = list(answers)

    def script_listed(self, *answers: Answer) -> str:
        """The same for the one model that `GET /v1/models` lists."""
        self._scripts[LISTED_MODEL] = list(answers)
        return LISTED_MODEL

    def gate(self) -> Gate:
        """A gate for a script of this server."""
        return Gate(self._loop)

    def unscripted(self, call: Received) -> Answer:
        """Answer a call that has no script."""
        return played(Script(), call)

    def calls(self, name: str) -> list[Received]:
        """The calls of a model, or with a key, so far."""
        return [call for call in self.received if call.is_of(name)]

    def wait_for_calls(self, name: str, count: int = 1) -> list[Received]:
        """Wait until there are `count` of them, and return them."""
        what = f"{name} was called {len(self.calls(name))} times, not {count}"
        self._run(lambda: self._until(lambda: len(self.calls(name)) >= count, what, DEADLINE_S))
        return self.calls(name)

    async def wait_for(self, name: str, ended: str, timeout_s: float = DEADLINE_S) -> Received:
        """The newest call of a model, or with a key, once it has ended so; for an event loop."""

        def found() -> Received | None:
            return next((each for each in reversed(self.calls(name)) if each.ended == ended), None)

        wait = self._until(found, f"no call {name} is {ended}", timeout_s)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(wait, self._loop))

    async def _until(self, condition: Callable[[], Any], what: str, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                while not (found := condition()):
                    self._changed.clear()
                    await self._changed.wait()
                return found
        except TimeoutError:
            raise TimeoutError(what) from None

    # -- the server -------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            early: bytes | None = b""
            while early is not None:
                early = await self._one_exchange(early, reader, writer)
            writer.close()
            await writer.wait_closed()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

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
        if (method, target) == ("GET", "/v1/models") and not self._for_all:
            listed = {"object": "list", "data": [_listed(name) for name in self.models]}
            await _send(writer, document(listed))
            return b""
        answer = self._answer_to(call)
        self.received.append(call)
        self._changed.set()
        try:
            return await self._play(answer, call, reader, writer)
        finally:
            self._changed.set()

    def _answer_to(self, call: Received) -> Answer:
        call.model = str(_fields_of(call).get("model", ""))
        if text := call.headers.get("x-fake") or call.model.partition(":")[2]:
            try:
                script = call.script = parse_script(text)
            except ValueError as problem:
                return Answer(400, parts=(error_body(str(problem)),))
            if script.times:
                self._faults[script.key] += 1
                if self._faults[script.key] > script.times:
                    script = replace(script, status=200, fault="")
            return played(script, call)
        answers = self._for_all or self._scripts.get(call.model) or [self.unscripted(call)]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def _play(
        self,
        answer: Answer,
        call: Received,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bytes | None:
        playing = asyncio.ensure_future(_send(writer, answer, call.method))
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
            _reset(writer)
        return None if hung_up or answer.breaks_off else early


def _socket_at(port: int) -> socket.socket:
    """A socket that shares its port with others of ours, of which one at most listens."""
    # NOTE: asyncio turns off Nagle's algorithm only where the protocol is named.
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        made.setsockopt(socket.SOL_SOCKET, option, 1)
    made.bind(("127.0.0.1", port))
    return made


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset."""
    no_linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
    writer.transport.abort()


async def _wait(part: Gate | float) -> None:
    if isinstance(part, Gate):
        await part.passed()
    elif part:
        await asyncio.sleep(part)


async def _send(writer: asyncio.StreamWriter, answer: Answer, method: str = "GET") -> None:
    if isinstance(answer.before, (Gate, float)):
        await _wait(answer.before)
    parts = answer.parts
    if not answer.bare:
        writer.write(_head_of(answer))
        await writer.drain()
        parts = parts if method != "HEAD" else ()
    is_framed = answer.chunked and not answer.bare
    ending = b"0\r\n\r\n" if is_framed and not answer.breaks_off else b""
    for number, part in enumerate(parts, 1):
        if not isinstance(part, bytes):
            await _wait(part)
            continue
        framed = b"%x\r\n%s\r\n" % (len(part), part) if is_framed else part
        if number == len(parts):
            # The end of the stream in one write with its last bytes.
            framed, ending = framed + ending, b""
        size = answer.split or len(framed)
        for start in range(0, len(framed), size):
            writer.write(framed[start : start + size])
            await writer.drain()
            # Each part shall be a read of its own at the other end, as far as a socket promises.
            await asyncio.sleep(0)
    writer.write(ending)
    await writer.drain()
    if answer.stall:
        await asyncio.Event().wait()


def _head_of(answer: Answer) -> bytes:
    length = sum(len(part) for part in answer.parts if isinstance(part, bytes))
    length = length if answer.length is None else answer.length
    framing = "transfer-encoding: chunked" if answer.chunked else f"content-length: {length}"
    lines = [
        f"HTTP/1.1 {answer.status} Scripted",
        f"content-type: {answer.content_type}",
        framing,
        *(f"{name}: {text}" for name, text in answer.headers),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _fields_of(call: Received) -> dict[str, Any]:
    """The fields of a JSON body; none of any other."""
    with suppress(ValueError):
        fields = json.loads(call.body)
        return fields if isinstance(fields, dict) else {}
    return {}


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
