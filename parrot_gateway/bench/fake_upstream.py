"""A scripted upstream: an OpenAI-compatible server that does exactly what it is told.

    python -m parrot_gateway.bench.fake_upstream --port 0

The double of an upstream in tests and the far end in benchmarks. Serves `/v1/models`, chat and
text completions, `/v1/responses`, `/v1/embeddings`, and echoes any other path under `/v1/`. What
it does is scripted per request, by a header or by the model's name:

    x-fake: chunks=100, delay_ms=20, fault=drop, after=3
    {"model": "fake:status=503,times=2,key=a", …}

`GET /__log` gives the last requests with how they ended, `DELETE /__log` forgets them. Generates
fixed text; checks no parameters and no keys.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import re
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, cast

import httptools
import msgspec

Fault = Literal["", "reset", "drop", "half", "truncate", "eof", "stall", "error200", "garbage"]


class Script(msgspec.Struct, frozen=True):
    """What happens to one request."""

    #: Status of the answer; from 400 on an error body in OpenAI's shape.
    status: int = 200
    #: Requests with one key share a counter, for `times`.
    key: str = ""
    #: Status and fault concern the first `times` requests of the key only; 0 all of them.
    times: int = 0
    #: Headers of an error answer.
    retry_after: str = ""
    retry_after_ms: str = ""
    should_retry: str = ""
    #: Silence before the first byte, and between chunks.
    first_ms: float = 0.0
    delay_ms: float = 0.0
    #: Chunks of a stream; bytes of text in a chunk, or in a whole answer.
    chunks: int = 16
    size: int = 8
    #: reset: no answer. Streams: drop (TCP reset), half (close inside an event), truncate (close
    #: without the last HTTP chunk), eof (proper end without a finish reason), stall. error200: an
    #: error body with status 200. garbage: no HTTP.
    fault: Fault = ""
    #: Chunks sent before a fault in a stream.
    after: int = 2
    #: Line ends of the stream.
    framing: Literal["lf", "crlf", "cr"] = "lf"
    #: Send the stream in TCP segments of this many bytes.
    split: int = 0
    #: End with `data: [DONE]`.
    done: int = 1
    #: Send a usage chunk although nobody asked.
    usage: int = 0
    #: Text beyond ASCII.
    unicode: int = 0
    #: Send a comment as keep-alive before each chunk.
    comments: int = 0


@lru_cache(maxsize=1024)
def parse_script(text: str) -> Script:
    """`"chunks=3, fault=drop"` as a script.

    Raises:
        ValueError: an unknown key or value.
    """
    pairs = (item.partition("=") for item in text.split(",") if item.strip())
    values = {key.strip(): value.strip() for key, _, value in pairs}
    unknown = values.keys() - set(Script.__struct_fields__)
    if unknown:
        raise ValueError(f"unknown in script: {', '.join(sorted(unknown))}")
    try:
        return msgspec.convert(values, Script, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"bad value in script: {error}") from None


class Record:
    """One request and how it ended."""

    __slots__ = ("body", "ended", "ended_at", "headers", "method", "path", "script", "started_at")

    def __init__(self, method: str, path: str, headers: list[tuple[bytes, bytes]]) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.body = b""
        self.script = Script()
        self.started_at = time.time()
        self.ended_at = 0.0
        #: `running`, `complete`, `aborted` (the client went away) or `fault` (as scripted).
        self.ended: Literal["running", "complete", "aborted", "fault"] = "running"

    def header(self, name: str) -> str | None:
        """The first header of this name."""
        wanted = name.lower().encode()
        return next((v.decode() for k, v in self.headers if k.lower() == wanted), None)

    def to_dict(self) -> dict[str, Any]:
        """As plain types; the body as a hash and, when short, as text."""
        return {
            "method": self.method,
            "path": self.path,
            "headers": {k.decode().lower(): v.decode("latin-1") for k, v in self.headers},
            "body_sha256": hashlib.sha256(self.body).hexdigest(),
            "body": self.body[:4096].decode("utf-8", "replace"),
            "key": self.script.key,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "ended": self.ended,
        }


class FakeUpstream:
    """The server. `start` binds it; `log` and `wait_for` are for tests in the same process."""

    def __init__(self, *, models: tuple[str, ...] = ("fake", "fake-2"), log_size: int = 1000):
        self.models = models
        self.log: deque[Record] = deque(maxlen=log_size)
        self.port = 0
        self._counts: Counter[str] = Counter()
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._changed = asyncio.Event()

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        """Listen; port 0 takes a free one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), host, port, backlog=2048)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and cut all connections."""
        if self._server is not None:
            self._server.close()
            for connection in list(self._connections):
                connection.cut()
            await self._server.wait_closed()

    async def wait_for(self, *, key: str, ended: str, timeout_s: float = 5.0) -> Record:
        """The newest request with this key once it has come to this state."""
        async with asyncio.timeout(timeout_s):
            while True:
                for record in reversed(self.log):
                    if record.script.key == key and record.ended == ended:
                        return record
                self._changed.clear()
                await self._changed.wait()

    def requests(self, key: str) -> list[Record]:
        """The requests with this key, oldest first."""
        return [record for record in self.log if record.script.key == key]

    def changed(self) -> None:
        """Wake those who wait for a record."""
        self._changed.set()

    def is_faulty_turn(self, script: Script) -> bool:
        """Whether status and fault of `script` concern this request (counts it)."""
        if not script.times:
            return True
        self._counts[script.key] += 1
        return self._counts[script.key] <= script.times


class _Fields(msgspec.Struct):
    model: str = "fake"
    stream: bool = False
    stream_options: dict[str, Any] | None = None


_fields_decoder = msgspec.json.Decoder(_Fields)


class _Connection(asyncio.Protocol):
    """One connection; requests one after the other."""

    def __init__(self, server: FakeUpstream) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._record: Record | None = None
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server._connections.add(self)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server._connections.discard(self)
        if self._task is not None:
            self._task.cancel()
        self._writable.set()
        self._end("aborted")

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    # -- parser callbacks

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode()
        path, headers, body = self._url.decode(), self._headers, b"".join(self._body)
        self._url, self._headers, self._body = b"", [], []
        if path.startswith("/__log"):
            self._answer_log(method)
            return
        record = self._record = Record(method, path, headers)
        record.body = body
        self._server.log.append(record)
        self._handle(record)

    # -- answers

    def cut(self) -> None:
        """Close without another word."""
        self._transport.abort()

    def _end(self, how: Literal["complete", "aborted", "fault"]) -> None:
        record = self._record
        if record is not None and record.ended == "running":
            record.ended = how
            record.ended_at = time.time()
            self._server.changed()

    def _answer_log(self, method: str) -> None:
        body = b"[]"
        if method == "DELETE":
            self._server.log.clear()
        else:
            body = msgspec.json.encode([record.to_dict() for record in self._server.log])
        self._transport.write(_whole(200, body))

    def _handle(self, record: Record) -> None:
        path = record.path.partition("?")[0]
        if path == "/v1/models":
            data = [{"id": name, "object": "model", "created": 1, "owned_by": "fake"}
                    for name in self._server.models]  # fmt: skip
            self._send(_whole(200, msgspec.json.encode({"object": "list", "data": data})))
            return
        fields = _Fields()
        if record.method == "POST" and record.body.startswith(b"{"):
            fields = _fields_decoder.decode(record.body)
        text = next((v for k, v in record.headers if k.lower() == b"x-fake"), b"").decode()
        if not text:
            text = fields.model.partition(":")[2]
        try:
            script = record.script = parse_script(text)
        except ValueError as error:
            self._send(_error(400, str(error)))
            return
        self._server.changed()
        if not self._server.is_faulty_turn(script):
            script = msgspec.structs.replace(script, status=200, fault="")
        if script.first_ms or fields.stream or script.fault == "stall":
            self._task = asyncio.create_task(self._play(path, fields, script))
        else:
            self._answer(path, fields, script)

    async def _play(self, path: str, fields: _Fields, script: Script) -> None:
        if script.first_ms:
            await asyncio.sleep(script.first_ms / 1000)
        if fields.stream and script.status < 400 and script.fault not in (
            "reset", "garbage", "error200"
        ):  # fmt: skip
            await self._stream(path, fields, script)
        elif script.fault == "stall":
            await asyncio.Event().wait()
        else:
            self._answer(path, fields, script)

    def _answer(self, path: str, fields: _Fields, script: Script) -> None:
        if script.fault == "reset":
            self._fault()
        elif script.fault == "garbage":
            self._end("fault")
            self._transport.write(b"this is not HTTP\r\n\r\n")
            self._transport.close()
        elif script.status >= 400:
            self._send(_error(script.status, "scripted failure", script))
        elif script.fault == "error200":
            self._send(_whole(200, _ERROR_BODY))
        elif script.fault in ("drop", "half", "truncate"):
            # A whole body that breaks off.
            answer = whole_body(path, fields.model, script.size, script.unicode)
            self._end("fault")
            self._transport.write(_whole(200, answer)[: -len(answer) // 2])
            self._transport.close()
        elif path.endswith(("/completions", "/embeddings", "/responses")):
            self._send(whole_answer(path, fields.model, script.size, script.unicode))
        else:
            record = self._record
            assert record is not None
            content_type = record.header("content-type") or "application/json"
            self._send(_whole(200, record.body or b"{}", content_type=content_type.encode()))

    def _send(self, data: bytes) -> None:
        if self._record is not None and self._record.method == "HEAD":
            data = data[: data.index(b"\r\n\r\n") + 4]
        self._transport.write(data)
        self._end("complete")

    def _fault(self) -> None:
        self._end("fault")
        self._transport.abort()

    async def _stream(self, path: str, fields: _Fields, script: Script) -> None:
        wanted = bool(fields.stream_options and fields.stream_options.get("include_usage"))
        faulty = script.fault in ("drop", "half", "truncate", "eof", "stall")
        write = self._transport.write
        head = _STREAM_HEAD
        delay = script.delay_ms / 1000
        due = asyncio.get_running_loop().time()
        events = stream_events(path, fields.model, script, wanted)
        for count, event in enumerate(events):
            if faulty and count == script.after:
                break
            if delay and count:
                due += delay
                await asyncio.sleep(due - asyncio.get_running_loop().time())
            if not self._writable.is_set():
                await self._writable.wait()
            if script.split:
                await self._write_split(head + _chunk(event), script.split)
            else:
                write(head + _chunk(event))
            head = b""
            if not delay and count % 64 == 63:
                await asyncio.sleep(0)
        if head:
            write(head)
            head = b""
        if not faulty:
            self._send(_LAST_CHUNK)
        elif script.fault == "drop":
            # NOTE: the client shall have read what was sent: a reset throws away the rest.
            await asyncio.sleep(0.02)
            self._fault()
        elif script.fault == "half":
            write(head + _chunk(b'data: {"id": "chatcmpl-fake", "object": "chat.comp'))
            self._end("fault")
            self._transport.close()
        elif script.fault == "truncate":
            self._end("fault")
            self._transport.close()
        elif script.fault == "eof":
            self._end("fault")
            write(_LAST_CHUNK)
        else:
            await asyncio.Event().wait()

    async def _write_split(self, data: bytes, size: int) -> None:
        for start in range(0, len(data), size):
            self._transport.write(data[start : start + size])
            # Two turns of the loop: each piece becomes a segment of its own.
            await asyncio.sleep(0)
            await asyncio.sleep(0)


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\nx-request-id: fake-req\r\nopenai-organization: fake-org\r\n"
    b"x-ratelimit-remaining-requests: 42\r\nserver: fake\r\nset-cookie: a=b\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_LAST_CHUNK = b"0\r\n\r\n"
_ERROR_BODY = (
    b'{"error": {"message":"scripted failure","type":"server_error","param":null,"code":null}}'
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _whole(
    status: int, body: bytes, extra: bytes = b"", content_type: bytes = b"application/json"
) -> bytes:
    return (
        b"HTTP/1.1 %d Scripted\r\ncontent-type: %b\r\ncontent-length: %d\r\n"
        b"x-request-id: fake-req\r\nopenai-processing-ms: 7\r\nopenai-organization: fake-org\r\n"
        b"x-ratelimit-remaining-requests: 42\r\nserver: fake\r\n%b\r\n%b"
        % (status, content_type, len(body), extra, body)
    )


def _error(status: int, message: str, script: Script | None = None) -> bytes:
    extra = b""
    if script is not None:
        named = {"retry-after": script.retry_after, "retry-after-ms": script.retry_after_ms,
                 "x-should-retry": script.should_retry}  # fmt: skip
        extra = b"".join(f"{k}: {v}\r\n".encode() for k, v in named.items() if v)
    body = {"error": {"message": message, "type": "fake_error", "param": None, "code": "fake"}}
    # Odd spacing on purpose: what passes it unchanged has not re-serialised it.
    return _whole(status, msgspec.json.format(msgspec.json.encode(body), indent=3), extra)


def _text(size: int, unicode: int) -> str:
    base = "parrots échoñ 日本 🦜 " if unicode else "a parrot repeats what it was told; "
    return (base * (size // len(base) + 1))[:size]


@lru_cache(maxsize=64)
def whole_body(path: str, model: str, size: int, unicode: int = 0) -> bytes:
    """The JSON of a whole answer, with spacing and floats that a re-serialisation would change."""
    usage = b'{"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12, '
    usage += b'"prompt_tokens_details": {"cached_tokens": 3}}'
    text = msgspec.json.encode(_text(size, unicode))
    name = msgspec.json.encode(model)
    if path.endswith("/chat/completions"):
        return (
            b'{"id":"chatcmpl-fake", "object":"chat.completion","created":1, "model": %b, '
            b'"choices":[{"index":0,"message":{"role":"assistant","content":%b,"refusal":null},'
            b'"logprobs":null,"finish_reason":"stop"}], "temperature": 1.0e0, "usage": %b}'
            % (name, text, usage)
        )
    if path.endswith("/completions"):
        return (
            b'{"id":"cmpl-fake", "object":"text_completion","created":1, "model": %b, '
            b'"choices":[{"index":0,"text":%b,"logprobs":null,"finish_reason":"stop"}], '
            b'"usage": %b}' % (name, text, usage)
        )
    if path.endswith("/responses"):
        return (
            b'{"id": "resp_fake","object":"response","created_at":1.0,"status":"completed",'
            b'"model":%b,"output":[{"type":"message","id":"msg_fake","role":"assistant",'
            b'"status":"completed","content":[{"type":"output_text","text":%b,"annotations":[]}]}],'
            b'"usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":3},'
            b'"output_tokens":5,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":12}}'
            % (name, text)
        )
    return (
        b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":"AACAPw=="}],'
        b'"model":%b, "usage":{"prompt_tokens":7,"total_tokens":7}}' % name
    )


@lru_cache(maxsize=64)
def whole_answer(path: str, model: str, size: int, unicode: int = 0) -> bytes:
    """`whole_body` with its status line and headers."""
    return _whole(200, whole_body(path, model, size, unicode))


def stream_events(path: str, model: str, script: Script, usage: bool) -> Iterator[bytes]:
    """The events of a stream, blank lines included."""
    end = {"lf": b"\n", "crlf": b"\r\n", "cr": b"\r"}[script.framing]
    yield from _stream_events(path, model, script, usage or bool(script.usage), end)


@lru_cache(maxsize=64)
def _stream_events(
    path: str, model: str, script: Script, usage: bool, end: bytes
) -> tuple[bytes, ...]:
    if path.endswith("/responses"):
        return tuple(_responses_events(path, model, script, end))
    chat = path.endswith("/chat/completions")
    kind = b"chat.completion.chunk" if chat else b"text_completion"
    head = b'data: {"id":"chatcmpl-fake","object":"%b","created":1, "model":%b,' % (
        kind, msgspec.json.encode(model))  # fmt: skip
    text = msgspec.json.encode(_text(script.size, script.unicode))
    comment = b": keep-alive" + end + end if script.comments else b""
    # Without usage to come the key is absent, as in the wild; with it, it is null.
    tail = b',"usage":null}' if usage else b"}"

    def event(delta: bytes, finish: bytes) -> bytes:
        body = b'"delta":' + delta if chat else b'"text":' + delta
        choices = b'"choices":[{"index":0,%b,"logprobs":null,"finish_reason":%b}]' % (body, finish)
        return comment + head + choices + tail + end + end

    events = []
    if chat:
        events.append(event(b'{"role":"assistant","content":""}', b"null"))
    content = b'{"content":%b}' % text if chat else text
    events += [event(content, b"null")] * script.chunks
    events.append(event(b"{}" if chat else b'""', b'"stop"'))
    if usage:
        count = b'"usage":{"prompt_tokens":7,"completion_tokens":%d,"total_tokens":%d}}' % (
            script.chunks, 7 + script.chunks)  # fmt: skip
        events.append(comment + head + b'"choices":[],' + count + end + end)
    if script.done:
        events.append(b"data: [DONE]" + end + end)
    return tuple(events)


def _responses_events(path: str, model: str, script: Script, end: bytes) -> Iterator[bytes]:
    for number in range(script.chunks):
        yield b"".join(
            (b"event: response.output_text.delta", end,
             b'data: {"type":"response.output_text.delta","sequence_number":%d,"delta":"a "}'
             % number, end, end)
        )  # fmt: skip
    whole = whole_body(path, model, script.size, script.unicode)
    yield b"".join(
        (b"event: response.completed", end,
         b'data: {"type":"response.completed","sequence_number":%d,"response":%b}'
         % (script.chunks, whole), end, end)
    )  # fmt: skip


async def _serve(port: int, models: tuple[str, ...]) -> None:
    server = FakeUpstream(models=models)
    await server.start(port)
    print(server.url, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed; prints the base URL on the first line."""
    parser = argparse.ArgumentParser(description=re.split(r"\n\s*\n", __doc__ or "")[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", action="append", help="a model to list; repeatable")
    arguments = parser.parse_args()
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    with runner:
        try:
            runner.run(_serve(arguments.port, tuple(arguments.model or ("fake", "fake-2"))))
        except KeyboardInterrupt:
            sys.exit(0)


if __name__ == "__main__":
    main()
