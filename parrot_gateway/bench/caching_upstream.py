"""The servers of `bench upstreams`: each batches calls as an engine does, with a prefix cache.

    python -m parrot_gateway.bench.caching_upstream '[{}, {"step_s": 0.02}]'

Starts so many, of these speeds, on free ports in one process, and prints their base URLs. They
compute nothing: a step takes as long as `Speed` says. Answers follow from the prompts, so that all
runs read the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from parrot_gateway.bench.servers import loop_runner
from parrot_gateway.bench.upstream import (
    LAST_CHUNK,
    STREAM_HEAD,
    HttpConnection,
    http_answer,
    http_chunk,
)

MODEL = "simulated"
CHARACTERS_PER_TOKEN = 4
_BLOCK_TOKENS = 16
_BLOCK_CHARACTERS = _BLOCK_TOKENS * CHARACTERS_PER_TOKEN
#: Tokens between two chunks of a stream.
_CHUNK_TOKENS = 8
_DEFAULT_TOKENS = 64


class Speed(msgspec.Struct, frozen=True):
    """How long a step takes, in seconds, and what a server holds."""

    step_s: float = 8e-3
    sequence_s: float = 2e-4
    prefill_token_s: float = 1.2e-4
    #: Of a step.
    max_prefill_tokens: int = 512
    max_sequences: int = 64
    #: Of its prefix cache.
    cached_tokens: int = 100_000


class Statistics(msgspec.Struct):
    """Of one server, since the last reset."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class _Message(msgspec.Struct):
    role: str
    content: str


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Call(msgspec.Struct):
    messages: list[_Message] = []
    max_tokens: int = _DEFAULT_TOKENS
    stream: bool = False
    stream_options: _StreamOptions | None = None


_call_decoder = msgspec.json.Decoder(_Call)


class _Sequence:
    """One call: tokens still to be filled and generated."""

    def __init__(self, text: str, max_tokens: int, on_token: Callable[[_Sequence], None]) -> None:
        self.text = text
        self.prompt_tokens = max(1, len(text) // CHARACTERS_PER_TOKEN)
        self.max_tokens = max(1, max_tokens)
        #: Prompt tokens found in the cache, and those to be computed.
        self.cached = 0
        self.to_fill = 0
        self.generated = 0
        self.is_cancelled = False
        self.on_token = on_token

    @property
    def is_done(self) -> bool:
        return self.generated >= self.max_tokens

    def answer(self) -> str:
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        length = self.max_tokens * CHARACTERS_PER_TOKEN
        return (digest * (length // len(digest) + 1))[:length]


class CachingServer:
    """One server."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.statistics = Statistics()
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._stepping: asyncio.Task[None] | None = None

    def submit(self, sequence: _Sequence) -> None:
        self._waiting.append(sequence)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._steps())

    def reset(self) -> None:
        """Forget all that was cached and counted."""
        self._cache.clear()
        self.statistics = Statistics()

    async def _steps(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while self._running or self._waiting:
            filled, decoding = self._begin_step()
            speed = self.speed
            due = max(due, loop.time() - speed.step_s)
            due += speed.step_s + len(decoding) * speed.sequence_s
            due += sum(filled.values()) * speed.prefill_token_s
            await asyncio.sleep(due - loop.time())
            self._end_step(filled, decoding)

    def _begin_step(self) -> tuple[dict[_Sequence, int], list[_Sequence]]:
        """Tokens that the step fills of sequences, and those that generate."""
        self._running = [each for each in self._running if not each.is_cancelled]
        while self._waiting and len(self._running) < self.speed.max_sequences:
            sequence = self._waiting.popleft()
            if sequence.is_cancelled:
                continue
            self._look_up(sequence)
            self._running.append(sequence)
        budget, filled = self.speed.max_prefill_tokens, {}
        for sequence in self._running:
            if sequence.to_fill and budget:
                filled[sequence] = min(sequence.to_fill, budget)
                budget -= filled[sequence]
        return filled, [each for each in self._running if not each.to_fill]

    def _end_step(self, filled: dict[_Sequence, int], decoding: list[_Sequence]) -> None:
        for sequence, tokens in filled.items():
            sequence.to_fill -= tokens
            if not sequence.to_fill:
                self._store(sequence.text)
                decoding.append(sequence)
        for sequence in decoding:
            if sequence.is_cancelled:
                continue
            sequence.generated += 1
            sequence.on_token(sequence)
            if sequence.is_done:
                self._running.remove(sequence)
                self._store(sequence.text + sequence.answer())

    def _look_up(self, sequence: _Sequence) -> None:
        blocks = 0
        for key in _block_keys(sequence.text):
            if key not in self._cache:
                break
            self._cache.move_to_end(key)
            blocks += 1
        sequence.cached = min(blocks * _BLOCK_TOKENS, sequence.prompt_tokens - 1)
        sequence.to_fill = sequence.prompt_tokens - sequence.cached
        self.statistics.calls += 1
        self.statistics.prompt_tokens += sequence.prompt_tokens
        self.statistics.cached_tokens += sequence.cached

    def _store(self, text: str) -> None:
        # The beginning last: ends of chains go first.
        for key in reversed(_block_keys(text)):
            self._cache[key] = None
            self._cache.move_to_end(key)
        while len(self._cache) > self.speed.cached_tokens // _BLOCK_TOKENS:
            self._cache.popitem(last=False)


def _block_keys(text: str) -> list[int]:
    keys, last = [], 0
    for end in range(_BLOCK_CHARACTERS, len(text) + 1, _BLOCK_CHARACTERS):
        last = hash((last, text[end - _BLOCK_CHARACTERS : end]))
        keys.append(last)
    return keys


class _Connection(HttpConnection):
    def __init__(self, server: CachingServer) -> None:
        super().__init__()
        self._server = server
        self._sequence: _Sequence | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._sequence is not None:
            self._sequence.is_cancelled = True

    def handle(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        if path == "/v1/models":
            self._send({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        elif path == "/v1/statistics":
            self._send(msgspec.to_builtins(self._server.statistics))
        elif path == "/v1/reset":
            self._server.reset()
            self._send({})
        else:
            call = _call_decoder.decode(body)
            text = "".join(f"{each.role}\n{each.content}" for each in call.messages)
            text += "assistant\n"
            write = self._streamed(call) if call.stream else self._whole
            self._sequence = _Sequence(text, call.max_tokens, write)
            self._server.submit(self._sequence)

    def _send(self, value: object) -> None:
        self.transport.write(http_answer(msgspec.json.encode(value)))

    def _whole(self, sequence: _Sequence) -> None:
        if sequence.is_done:
            message = {"role": "assistant", "content": sequence.answer()}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self._send(
                {
                    "id": "chatcmpl-simulated",
                    "object": "chat.completion",
                    "created": 1,
                    "model": MODEL,
                    "choices": [choice],
                    "usage": _usage(sequence),
                }
            )

    def _streamed(self, call: _Call) -> Callable[[_Sequence], None]:
        with_usage = call.stream_options is not None and call.stream_options.include_usage
        sent = 0

        def write(sequence: _Sequence) -> None:
            nonlocal sent
            is_due = sequence.generated == 1 or sequence.generated - sent >= _CHUNK_TOKENS
            if not (is_due or sequence.is_done):
                return
            start, end = sent * CHARACTERS_PER_TOKEN, sequence.generated * CHARACTERS_PER_TOKEN
            head = STREAM_HEAD if sent == 0 else b""
            sent = sequence.generated
            data = head + _event({"content": sequence.answer()[start:end]})
            if sequence.is_done:
                data += _event({}, "stop")
                if with_usage:
                    data += _event(None, usage=_usage(sequence))
                data += http_chunk(b"data: [DONE]\n\n") + LAST_CHUNK
            self.transport.write(data)

        return write


def _usage(sequence: _Sequence) -> dict[str, object]:
    return {
        "prompt_tokens": sequence.prompt_tokens,
        "completion_tokens": sequence.generated,
        "total_tokens": sequence.prompt_tokens + sequence.generated,
        "prompt_tokens_details": {"cached_tokens": sequence.cached},
    }


def _event(
    delta: dict[str, str] | None, finish: str | None = None, usage: dict[str, object] | None = None
) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    event = {
        "id": "chatcmpl-simulated",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": choices,
    }
    if usage is not None:
        event["usage"] = usage
    return http_chunk(b"data: " + msgspec.json.encode(event) + b"\n\n")


async def listen(server: CachingServer) -> tuple[asyncio.Server, str]:
    """Serve on a free port; the base URL."""
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: _Connection(server), "127.0.0.1", backlog=2048)
    return listening, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"


async def _serve(speeds: list[Speed]) -> None:
    urls = [(await listen(CachingServer(speed)))[1] for speed in speeds]
    print("simulated servers at", *urls, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with loop_runner() as runner, suppress(KeyboardInterrupt):
        runner.run(_serve(msgspec.json.decode(sys.argv[1], type=list[Speed])))
