"""The upstream of `bench overhead`: answers chat completions at once, as their model's name says.

    python -m parrot_bench.upstream 'fake:chunks=100;size=16;delay_ms=20' …

Lists the given models, on a free port, and prints its base URL; checks no parameters and no keys.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import suppress
from functools import lru_cache
from typing import cast

import httptools
import msgspec

from parrot_bench.servers import loop_runner

#: Takes traces, and drops them.
TRACES_PATH = "/v1/traces"

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


class Script(msgspec.Struct, frozen=True):
    """In the name of a model, behind `:`, with `;` between."""

    #: Chunks of a stream; bytes of text in a chunk, or in a whole answer.
    chunks: int = 16
    size: int = 8
    #: Between chunks.
    delay_ms: float = 0.0


class _Call(msgspec.Struct):
    model: str = "fake"
    stream: bool = False


_call_decoder = msgspec.json.Decoder(_Call)


@lru_cache(maxsize=64)
def script_of(model: str) -> Script:
    pairs = (item.partition("=") for item in model.partition(":")[2].split(";") if item)
    return msgspec.convert({key: value for key, _, value in pairs}, Script, strict=False)


def http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def http_answer(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    return head % (len(body), body)


@lru_cache(maxsize=64)
def answer_of(model: str) -> bytes:
    """A whole answer, head included."""
    message = {"role": "assistant", "content": "a" * script_of(model).size}
    return http_answer(
        msgspec.json.encode(
            {
                "id": "chatcmpl-fake",
                "object": "chat.completion",
                "created": 1,
                "model": model,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
            }
        )
    )


@lru_cache(maxsize=64)
def stream_of(model: str) -> tuple[bytes, ...]:
    """The events of a stream, each in an HTTP chunk: role, texts, finish reason, `[DONE]`."""
    script = script_of(model)
    head = {"id": "chatcmpl-fake", "object": "chat.completion.chunk", "created": 1, "model": model}

    def event(delta: dict[str, str], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        data = msgspec.json.encode({**head, "choices": [choice]})
        return http_chunk(b"data: " + data + b"\n\n")

    return (
        event({"role": "assistant", "content": ""}),
        *[event({"content": "a" * script.size})] * script.chunks,
        event({}, "stop"),
        http_chunk(b"data: [DONE]\n\n"),
    )


class HttpConnection(asyncio.Protocol):
    """A server's end of one connection; calls `handle` for one request after the other."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.writable = asyncio.Event()
        self.writable.set()
        #: What plays an answer, if any.
        self.task: asyncio.Task[None] | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []

    def handle(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        """Answer a request, now or from a task."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.task is not None:
            self.task.cancel()
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.close()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path, headers, body = self._url.decode(), self._headers, b"".join(self._body)
        self._url, self._headers, self._body = b"", [], []
        self.handle(self._parser.get_method().decode(), path, headers, body)


class _Connection(HttpConnection):
    def __init__(self, models: tuple[str, ...]) -> None:
        super().__init__()
        self._models = models

    def handle(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        if path == "/v1/models":
            data = [{"id": name, "object": "model", "created": 1} for name in self._models]
            plain = {"object": "list", "data": data}
            self.transport.write(http_answer(msgspec.json.encode(plain)))
            return
        if path == TRACES_PATH:
            self.transport.write(http_answer(b"{}"))
            return
        call = _call_decoder.decode(body)
        if call.stream:
            self.task = asyncio.create_task(self._stream(call.model))
        else:
            self.transport.write(answer_of(call.model))

    async def _stream(self, model: str) -> None:
        loop = asyncio.get_running_loop()
        delay_s = script_of(model).delay_ms / 1000
        due = loop.time()
        head = STREAM_HEAD
        for count, chunk in enumerate(stream_of(model)):
            if delay_s and count:
                due += delay_s
                await asyncio.sleep(due - loop.time())
            await self.writable.wait()
            self.transport.write(head + chunk)
            head = b""
            if not delay_s and count % 64 == 63:
                await asyncio.sleep(0)
        self.transport.write(LAST_CHUNK)


async def _serve(models: tuple[str, ...]) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(models), "127.0.0.1", backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with loop_runner() as runner, suppress(KeyboardInterrupt):
        runner.run(_serve(tuple(sys.argv[1:])))
