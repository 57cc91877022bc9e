"""A load generator that is not the bottleneck: raw asyncio and httptools, in a process of its own.

    python -m parrot_bench.load < plan.json > result.json

`run_load` starts that process. Each of `concurrency` connections sends its next request as soon as
the last answer is complete (a closed loop). Parses no JSON; a chunk
is one `data:` event. A request fails by its status, by a broken connection, or by an error event.
"""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import time
from asyncio.subprocess import PIPE
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from parrot_bench.servers import loop_runner

#: The end of a stream, which holds its usage.
_TAIL_BYTES = 1024
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')


class LoadPlan(msgspec.Struct, frozen=True):
    #: Base URL, ending in `/v1`.
    url: str
    body: str
    path: str = "/chat/completions"
    #: Sent once each, in turn, in place of `body`; `requests` is their number.
    bodies: list[str] = []
    #: Pattern of the first event with text: what comes before it is no first token. Empty: any.
    first_text: str = ""
    method: str = "POST"
    headers: dict[str, str] = {}
    concurrency: int = 1
    #: Measured requests over all connections, or as many as fit in `duration_s`.
    requests: int = 0
    duration_s: float = 0.0
    #: Requests over all connections that are sent first and not measured.
    warmup: int = 0
    #: Chunks further apart than this count as a stall.
    stall_ms: float = 100.0
    #: Whole run; what is unanswered then has failed.
    timeout_s: float = 120.0


class Spread(msgspec.Struct, frozen=True):
    """Percentiles of some times, in milliseconds."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, seconds: list[float]) -> Spread:
        """The percentiles (nearest rank); zeros when there are no values."""
        if not seconds:
            return cls()
        ordered = sorted(seconds)

        def rank(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000

        return cls(rank(0.5), rank(0.9), rank(0.99), ordered[-1] * 1000)


class LoadResult(msgspec.Struct, frozen=True):
    requests: int
    errors: int
    seconds: float
    requests_per_s: float
    latency_ms: Spread
    #: To the first byte of the body, or to the first text.
    ttft_ms: Spread
    chunks: int
    chunks_per_s: float
    #: Gaps between chunks of one stream, as they arrived.
    gap_ms: Spread
    #: Gaps longer than the plan's `stall_ms`, and the streams that had one.
    stalls: int
    stalled_streams: int
    bytes: int
    #: Processor time of the load generator: near `seconds`, it was the bottleneck.
    cpu_s: float
    #: Of `bodies`: generated tokens, and a request's time behind its first token by each other one.
    tokens: int = 0
    token_ms: Spread = Spread()
    first_error: str = ""


@dataclass(slots=True)
class _Run:
    plan: LoadPlan
    #: Of the plan's body, or of each of its bodies in turn.
    requests: list[bytes]
    left: int
    ends_at: float = 0.0
    tokens: int = 0
    token_times: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    stalled_streams: int = 0
    errors: int = 0
    chunks: int = 0
    num_bytes: int = 0
    first_error: str = ""

    def take(self) -> bytes | None:
        """The request to send next; None: no more."""
        if self.ends_at:
            return self.requests[0] if time.perf_counter() < self.ends_at else None
        if self.left <= 0:
            return None
        self.left -= 1
        return self.requests[-1 - self.left] if len(self.requests) > 1 else self.requests[0]

    def fail(self, reason: str) -> None:
        self.errors += 1
        self.first_error = self.first_error or reason


class _Client(asyncio.Protocol):
    def __init__(self, run: _Run) -> None:
        self._run = run
        first_text = run.plan.first_text
        self._first_text = re.compile(first_text.encode()) if first_text else None
        self._counts_tokens = bool(run.plan.bodies)
        self._transport: asyncio.Transport
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._busy = False
        self._reset()

    def _reset(self) -> None:
        self._started = self._first = self._last = 0.0
        self._stalled = False
        self._events = 0
        self._failed = ""
        self._tail = b""
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def drive(self) -> None:
        """Send requests until the run has none left."""
        self._next()
        await self._finished

    def connection_lost(self, exc: Exception | None) -> None:
        if self._busy:
            self._run.fail(f"connection lost: {exc!r}")
        self._finish()

    def _finish(self) -> None:
        if not self._finished.done():
            self._finished.set_result(None)

    def close(self) -> None:
        self._busy = False
        self._transport.abort()

    def _next(self) -> None:
        request = self._run.take()
        if request is None:
            self._busy = False
            self._finish()
            self._transport.close()
            return
        self._busy = True
        self._reset()
        self._started = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._run.num_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._failed = self._failed or f"not HTTP: {error}"
            self._transport.abort()

    def on_body(self, body: bytes) -> None:
        now = time.perf_counter()
        run = self._run
        if not self._first:
            if self._first_text is None or self._first_text.search(body):
                self._first = now
        elif now != self._last:
            gap = now - self._last
            run.gaps.append(gap)
            if gap * 1000 > run.plan.stall_ms:
                self._stalled = True
        self._last = now
        self._events += body.count(b"data:")
        if self._counts_tokens:
            self._tail = (self._tail + body)[-_TAIL_BYTES:]
        if b'"error":' in body:
            self._failed = self._failed or body[:200].decode("utf-8", "replace")

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        run = self._run
        status = self._parser.get_status_code()
        if status >= 400:
            self._failed = f"status {status}: {self._failed}"
        usage = _COMPLETION_TOKENS.findall(self._tail) if self._counts_tokens else []
        if self._counts_tokens and not usage and not self._failed:
            self._failed = "no usage"
        if self._failed:
            run.fail(self._failed)
        else:
            if usage:
                tokens = int(usage[-1])
                run.tokens += tokens
                if tokens > 1 and self._first:
                    run.token_times.append((now - self._first) / (tokens - 1))
            run.latencies.append(now - self._started)
            # An answer without text has no first one.
            run.ttfts.append((self._first or now) - self._started)
            run.chunks += self._events
            run.stalled_streams += self._stalled
        # NOTE: not from inside the parser's callback: a new parser replaces this one.
        asyncio.get_running_loop().call_soon(self._next)


async def drive(plan: LoadPlan) -> LoadResult:
    """Put the load on from this process; `run_load` starts another one for it."""
    if plan.warmup:
        warmup = msgspec.structs.replace(plan, requests=plan.warmup, duration_s=0.0, warmup=0)
        await _drive(warmup)
    return await _drive(plan)


async def _drive(plan: LoadPlan) -> LoadResult:
    loop = asyncio.get_running_loop()
    requests = [_request_bytes(plan, body) for body in plan.bodies or [plan.body]]
    run = _Run(plan, requests, len(plan.bodies) or plan.requests)
    parts = urlsplit(plan.url)
    address = parts.hostname or "127.0.0.1", parts.port or 80
    clients = []
    for _ in range(plan.concurrency):
        _, client = await loop.create_connection(lambda: _Client(run), *address)
        clients.append(client)
    cpu = time.process_time()
    started = time.perf_counter()
    if plan.duration_s:
        run.ends_at = started + plan.duration_s
    tasks = [asyncio.create_task(client.drive()) for client in clients]
    _, late = await asyncio.wait(tasks, timeout=plan.timeout_s)
    seconds = time.perf_counter() - started
    for task, client in zip(tasks, clients, strict=True):
        if task in late:
            run.fail(f"no answer within {plan.timeout_s:g} s")
            task.cancel()
            client.close()
    stall_s = plan.stall_ms / 1000
    return LoadResult(
        requests=len(run.latencies),
        errors=run.errors,
        seconds=seconds,
        requests_per_s=len(run.latencies) / seconds,
        latency_ms=Spread.of(run.latencies),
        ttft_ms=Spread.of(run.ttfts),
        chunks=run.chunks,
        chunks_per_s=run.chunks / seconds,
        gap_ms=Spread.of(run.gaps),
        stalls=sum(gap > stall_s for gap in run.gaps),
        stalled_streams=run.stalled_streams,
        bytes=run.num_bytes,
        cpu_s=time.process_time() - cpu,
        tokens=run.tokens,
        token_ms=Spread.of(run.token_times),
        first_error=run.first_error,
    )


def _request_bytes(plan: LoadPlan, text: str) -> bytes:
    parts = urlsplit(plan.url)
    body = text.encode()
    # What an OpenAI client sends, in size and kind.
    headers = {
        "Host": parts.netloc,
        "Accept-Encoding": "gzip, deflate",
        "Connection": "keep-alive",
        "Accept": "application/json",
        "Content-Type": "application/json",
        "User-Agent": "AsyncOpenAI/Python 2.54.0",
        "X-Stainless-Lang": "python",
        "X-Stainless-Package-Version": "2.54.0",
        "X-Stainless-Retry-Count": "0",
        "X-Stainless-Read-Timeout": "600",
        "Authorization": "Bearer benchmark",
        "Content-Length": str(len(body)),
        **plan.headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{plan.method} {parts.path}{plan.path} HTTP/1.1\r\n{lines}\r\n".encode() + body


async def run_load(plan: LoadPlan) -> LoadResult:
    """Put the load on from a process of its own.

    Raises:
        RuntimeError: that process failed.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "parrot_bench.load", stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    try:
        output, complaint = await process.communicate(msgspec.json.encode(plan))
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        lines = complaint.decode("utf-8", "replace").strip().splitlines()
        raise RuntimeError(f"the load generator failed: {lines[-1] if lines else 'no output'}")
    return msgspec.json.decode(output, type=LoadResult)


def main() -> None:
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadPlan)
    with loop_runner() as runner:
        result = runner.run(drive(plan))
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")


if __name__ == "__main__":
    main()
