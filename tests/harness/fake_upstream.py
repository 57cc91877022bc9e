"""A scripted upstream: an OpenAI-compatible server that follows its script exactly.

Serves `/v1/models`, chat and text completions, `/v1/responses`, `/v1/embeddings`, and echoes any
other path under `/v1/`. What it does is scripted per request, by a header or by the model's name:

    x-fake: chunks=100, delay_ms=20, fault=drop, after=3
    {"model": "fake:status=503,times=2,key=a", …}

Generates fixed text; checks no parameters and no keys.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from parrot_bench.upstream import LAST_CHUNK, HttpConnection, http_chunk

from harness.fake_answers import (
    ERROR_BODY,
    STREAM_HEAD,
    Script,
    error_answer,
    http_answer,
    parse_script,
    stream_events,
    whole_answer,
    whole_body,
)


@dataclass(slots=True, eq=False)
class Record:
    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    script: Script = field(default_factory=Script)
    started_at: float = field(default_factory=time.time)
    ended_at: float = 0.0
    #: `running`, `complete`, `aborted` (the client went away) or `fault` (as scripted).
    ended: Literal["running", "complete", "aborted", "fault"] = "running"

    def header(self, name: str) -> str | None:
        key = name.lower().encode()
        return next((v.decode() for k, v in self.headers if k.lower() == key), None)


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

    async def wait_for(self, *, key: str, ended: str, timeout_s: float = 60.0) -> Record:
        """The newest request with this key once it has come to this state."""
        async with asyncio.timeout(timeout_s):
            while True:
                for record in reversed(self.log):
                    if record.script.key == key and record.ended == ended:
                        return record
                self._changed.clear()
                await self._changed.wait()

    def requests(self, key: str) -> list[Record]:
        return [record for record in self.log if record.script.key == key]

    def changed(self) -> None:
        self._changed.set()

    def is_faulty_turn(self, script: Script) -> bool:
        """Count this request, and tell whether status and fault of `script` concern it."""
        if not script.times:
            return True
        self._counts[script.key] += 1
        return self._counts[script.key] <= script.times


class _Fields(msgspec.Struct):
    model: str = "fake"
    stream: bool = False
    stream_options: dict[str, Any] | None = None


_fields_decoder = msgspec.json.Decoder(_Fields)


class _Connection(HttpConnection):
    def __init__(self, server: FakeUpstream) -> None:
        super().__init__()
        self._server = server
        self._record: Record | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server._connections.discard(self)
        self._end("aborted")

    def handle(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        record = self._record = Record(method, path, headers, body)
        self._server.log.append(record)
        self._handle(record)

    # -- answers

    def cut(self) -> None:
        self.transport.abort()

    def _end(self, how: Literal["complete", "aborted", "fault"]) -> None:
        record = self._record
        if record is not None and record.ended == "running":
            record.ended = how
            record.ended_at = time.time()
            self._server.changed()

    def _handle(self, record: Record) -> None:
        path = record.path.partition("?")[0]
        if path == "/v1/models":
            model = {"object": "model", "created": 1, "owned_by": "fake"}
            data = [{"id": name, **model} for name in self._server.models]
            self._send(http_answer(200, msgspec.json.encode({"object": "list", "data": data})))
            return
        is_call = record.method == "POST" and record.body.startswith(b"{")
        fields = _fields_decoder.decode(record.body) if is_call else _Fields()
        text = record.header("x-fake") or fields.model.partition(":")[2]
        try:
            script = record.script = parse_script(text)
        except ValueError as error:
            self._send(error_answer(400, str(error)))
            return
        self._server.changed()
        if not self._server.is_faulty_turn(script):
            script = msgspec.structs.replace(script, status=200, fault="")
        if script.first_ms or fields.stream or script.fault == "stall":
            self.task = asyncio.create_task(self._play(path, fields, script))
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
            self._reset()
        elif script.fault == "garbage":
            self._break_off(b"this is not HTTP\r\n\r\n")
        elif script.status >= 400:
            self._send(error_answer(script.status, "scripted failure", script))
        elif script.fault == "error200":
            self._send(http_answer(200, ERROR_BODY))
        elif script.fault in ("drop", "half", "truncate"):
            # A whole body that breaks off.
            answer = whole_body(path, fields.model, script.size, script.unicode)
            self._break_off(http_answer(200, answer)[: -len(answer) // 2])
        elif path.endswith(("/completions", "/embeddings", "/responses")):
            self._send(whole_answer(path, fields.model, script.size, script.unicode))
        else:
            record = self._record
            assert record is not None
            content_type = record.header("content-type") or "application/json"
            self._send(http_answer(200, record.body or b"{}", content_type=content_type.encode()))

    def _send(self, data: bytes) -> None:
        if self._record is not None and self._record.method == "HEAD":
            data = data[: data.index(b"\r\n\r\n") + 4]
        self.transport.write(data)
        self._end("complete")

    def _reset(self) -> None:
        self._end("fault")
        self.transport.abort()

    def _break_off(self, data: bytes) -> None:
        self._end("fault")
        self.transport.write(data)
        self.transport.close()

    async def _stream(self, path: str, fields: _Fields, script: Script) -> None:
        include_usage = bool(fields.stream_options and fields.stream_options.get("include_usage"))
        faulty = script.fault in ("drop", "half", "truncate", "eof", "stall")
        write = self.transport.write
        head = STREAM_HEAD
        delay = script.delay_ms / 1000
        due = asyncio.get_running_loop().time()
        events = stream_events(path, fields.model, script, include_usage)
        for count, event in enumerate(events):
            if faulty and count == script.after:
                break
            if delay and count:
                due += delay
                await asyncio.sleep(due - asyncio.get_running_loop().time())
            if not self.writable.is_set():
                await self.writable.wait()
            if script.split:
                await self._write_split(head + http_chunk(event), script.split)
            else:
                write(head + http_chunk(event))
            head = b""
            if not delay and count % 64 == 63:
                await asyncio.sleep(0)
        if head:
            write(head)
        if not faulty:
            if script.end_ms:
                await asyncio.sleep(script.end_ms / 1000)
            self._send(LAST_CHUNK)
        elif script.fault == "drop":
            # NOTE: the client shall have read what was sent: a reset throws away the rest.
            await asyncio.sleep(0.02)
            self._reset()
        elif script.fault == "half":
            self._break_off(http_chunk(b'data: {"id": "chatcmpl-fake", "object": "chat.comp'))
        elif script.fault == "truncate":
            self._break_off(b"")
        elif script.fault == "eof":
            self._end("fault")
            write(LAST_CHUNK)
        else:
            await asyncio.Event().wait()

    async def _write_split(self, data: bytes, size: int) -> None:
        for start in range(0, len(data), size):
            self.transport.write(data[start : start + size])
            # Two turns of the loop: each piece becomes a segment of its own.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
