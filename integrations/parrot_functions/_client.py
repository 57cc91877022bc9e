"""The HTTP client: one thread with an event loop, pools of connections, deadlines, retries.

Synchronous and asynchronous callers use the same code: both pass coroutines to the thread and wait
in their own way.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import httpx
from parrot_client.connection import default_api_key, default_base_url

from parrot_functions._exceptions import (
    ArgumentError,
    DeadlineError,
    DependencyFailedError,
    OverloadedError,
    ProtocolError,
    ServerError,
    SessionError,
    UnreachableError,
)

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 600.0
#: Concurrent requests in a pool of connections each: requests that are answered at once, and
#: requests that wait for a text. NOTE: the cost per request in httpx's pool grows with its
#: connections and queued requests (1,000 calls took 31 s with 256 connections, and 1.7 s with
#: these). Hence they are few, and the queue is ours.
MAX_CALLS = 16
MAX_WAITS = 64
CONNECT_TIMEOUT_S = 10.0
#: Longest silence of the server beyond the requested wait, in seconds.
READ_TIMEOUT_S = 60.0
FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 8.0


class Answer(NamedTuple):
    """An answer: a JSON object, and headers by lower-case name."""

    body: dict[str, Any]
    headers: Mapping[str, str]


class _Request(NamedTuple):
    """One request; see `Client.request`."""

    method: str
    path: str
    body: object
    params: Mapping[str, str] | None
    wait_s: float
    done_code: str | None


class _Pool:
    """A bounded pool of connections, opened on first use."""

    def __init__(
        self, size: int, headers: Mapping[str, str], transport: httpx.AsyncBaseTransport | None
    ) -> None:
        self.slots = asyncio.Semaphore(size)
        self._size = size
        self._headers = headers
        self._transport = transport
        self._http: httpx.AsyncClient | None = None

    @property
    def http(self) -> httpx.AsyncClient:
        if self._http is None:
            self._http = httpx.AsyncClient(
                headers=self._headers,
                transport=self._transport,
                limits=httpx.Limits(
                    max_connections=self._size, max_keepalive_connections=self._size
                ),
            )
        return self._http

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.aclose()


class Client:
    """Connections to one server, shared by any number of sessions.

    Args:
        base_url: URL with `/v1`; by default PARROT_BASE_URL, OPENAI_API_BASE, OPENAI_BASE_URL, or
            this machine's port 8000.
        api_key: by default PARROT_API_KEY or OPENAI_API_KEY; a gateway without keys needs none.
        model: model of functions that name none.
        timeout: default limit of waits, in seconds.
        max_retries: retries of one request if the server has no room or cannot be reached.
        transport: replaces real connections in tests.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        max_retries: int = 4,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        url = base_url or default_base_url()
        if not url.startswith(("http://", "https://")):
            raise ArgumentError(f"base_url must begin with http:// or https://, not {url!r}.")
        self.base_url = url.rstrip("/")
        self.model = model
        self.timeout = timeout
        self.max_retries = max_retries
        self.is_closed = False
        key = api_key if api_key is not None else default_api_key()
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # Used only on the thread.
        self._stop = asyncio.Event()
        self._calls = _Pool(MAX_CALLS, self._headers, transport)
        self._waits = _Pool(MAX_WAITS, self._headers, transport)

    def __repr__(self) -> str:
        return f"Client({self.base_url!r})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the thread; cancelling the future cancels it.

        Raises:
            SessionError: the client is closed.
        """
        with self._lock:
            if self.is_closed:
                work.close()
                raise SessionError("The client is closed.")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), name="parrot-functions", daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel running work and close all connections. Safe to call twice."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            self._thread.join()

    async def request(
        self,
        method: str,
        path: str,
        deadline: float,
        *,
        body: object = None,
        params: Mapping[str, str] | None = None,
        wait_s: float | None = None,
        done_code: str | None = None,
        retry: bool = True,
    ) -> Answer | None:
        """Send one request, repeated while the server has no room or cannot be reached.

        Only on the thread. Cancellation drops the connection.

        Args:
            path: below `base_url`.
            deadline: in the time of `time.monotonic`.
            body: sent as JSON.
            wait_s: longest wait of the server before its answer, in seconds.
            done_code: error code that means that an earlier try succeeded.

        Returns:
            None if an earlier try succeeded but its answer was lost.

        Raises:
            DeadlineError: the deadline passed.
            UnreachableError, ServerError, ProtocolError: see their classes.
        """
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                pool = self._calls if wait_s is None else self._waits
                request = _Request(method, path, body, params, wait_s or 0.0, done_code)
                tries = 1 + (self.max_retries if retry else 0)
                async with pool.slots:
                    return await self._try(pool, request, deadline, tries)
        except TimeoutError as error:
            if isinstance(error, DeadlineError):
                raise
            raise DeadlineError(f"{method} {path}: no answer within the time given.") from None

    async def _try(
        self, pool: _Pool, request: _Request, deadline: float, tries: int
    ) -> Answer | None:
        may_be_done = False
        backoff_s = FIRST_BACKOFF_S
        for tries_left in reversed(range(tries)):
            pause_s = random.uniform(0.5, 1.0) * backoff_s  # noqa: S311 - jitter, no secret
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
            try:
                response = await self._send(pool, request)
            except httpx.HTTPError as error:
                if not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                    may_be_done = True
                if tries_left == 0 or not isinstance(error, httpx.TransportError):
                    detail = str(error) or type(error).__name__
                    raise UnreachableError(
                        f"{request.method} {self.base_url}{request.path}: {detail}. "
                        "`parrot-gateway serve` starts a gateway; give another address as "
                        "base_url, or in PARROT_BASE_URL or OPENAI_BASE_URL."
                    ) from error
            else:
                if response.is_success:
                    return Answer(_object(response), response.headers)
                failure = _failure(response)
                if may_be_done and failure.code is not None and failure.code == request.done_code:
                    return None
                retry_after_s = _retry_after(response)
                if retry_after_s is not None:
                    pause_s = retry_after_s
                may_retry = (
                    isinstance(failure, OverloadedError)
                    and response.headers.get("x-should-retry") != "false"
                    and tries_left > 0
                    and time.monotonic() + pause_s < deadline
                )
                if not may_retry:
                    raise failure
            await asyncio.sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    async def _send(self, pool: _Pool, request: _Request) -> httpx.Response:
        read_s = READ_TIMEOUT_S + request.wait_s
        return await pool.http.request(
            request.method,
            self.base_url + request.path,
            json=request.body,
            params=request.params,
            timeout=httpx.Timeout(connect=CONNECT_TIMEOUT_S, read=read_s, write=None, pool=None),
        )

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_until_complete(self._serve())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    async def _serve(self) -> None:
        await self._stop.wait()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._calls.aclose()
        await self._waits.aclose()


def _object(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of an answer; an empty body means an empty object."""
    if not response.content:
        return {}
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ProtocolError(
            f"{response.request.method} {response.request.url} answered "
            f"{response.status_code} without a JSON object."
        )
    return body


def _failure(response: httpx.Response) -> ServerError:
    """Return the exception for an error answer."""
    try:
        body = response.json()
    except ValueError:
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        error = {"message": response.text[:500]}
    variable = body.get("variable") if isinstance(body, dict) else None
    failure = variable.get("failure") if isinstance(variable, dict) else None
    kind: type[ServerError] = ServerError
    if response.status_code == 503:
        kind = OverloadedError
    elif response.status_code == 424:
        kind = DependencyFailedError
    return kind(response.status_code, error, response.headers.get("x-request-id"), failure)


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds that the server asks to wait; dates are not supported."""
    try:
        seconds = float(response.headers["retry-after"])
    except (KeyError, ValueError):
        return None
    return max(0.0, seconds) if seconds < float("inf") else None
