"""An upstream: a server that calls are passed on to, OpenAI-compatible or Anthropic's.

Owns the connection pool, the bound on calls in flight, retries, the circuit breaker and the list
of models. Passes bytes; knows neither JSON bodies nor event streams. Redirects are not followed
(one could carry the operator's key to another host): they go to the client as they are.
"""

from __future__ import annotations

import asyncio
import io
import logging
import random
import time
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from parrot_gateway.backends.upstreams.breaker import BreakerState, CircuitBreaker, Permit
from parrot_gateway.backends.upstreams.continuation_styles import ContinuationStyles
from parrot_gateway.backends.upstreams.first_content import is_looked_into
from parrot_gateway.backends.upstreams.headers import RequestHeaders, can_be_passed_on
from parrot_gateway.backends.upstreams.reported_error import reported_error
from parrot_gateway.backends.upstreams.response import (
    Broken,
    RequestTracker,
    UpstreamResponse,
    ended_early,
    explain,
)
from parrot_gateway.backends.upstreams.retry_policy import RetryPolicy
from parrot_gateway.backends.upstreams.slots import QueueFullError, Slots
from parrot_gateway.calls.usage import UsageTotals
from parrot_gateway.exceptions import (
    AnswerError,
    DrainedError,
    GatewayError,
    InvalidRequestError,
    OverloadedError,
    UpstreamError,
    UpstreamKeyError,
)
from parrot_gateway.settings.model import UpstreamSettings
from parrot_gateway.settings.secret_reference import read_secret

logger = logging.getLogger(__name__)

#: The list of models is read again after this time.
REFRESH_S = 60.0
#: Time for one answer to `GET /models`.
DISCOVERY_TIMEOUT_S = 10.0
#: Waits between attempts to reach an upstream that is down: doubling between these.
DISCOVERY_BACKOFF_S = (0.25, 15.0)
#: aiohttp warns that it may block on byte bodies above 1 MiB and takes file objects instead.
_LARGE_BODY = 1024 * 1024
_MAX_CACHED_URLS = 512
#: The one path outside of `/v1`: servers of open models tokenize there.
TOKENIZE = "/tokenize"


class _PlainRequest(aiohttp.ClientRequest):
    """A request with the headers that it is given only: aiohttp adds none, and need not look."""

    _skip_auto_headers = CIMultiDict[None]({"content-type": None})

    def update_auto_headers(self, skip_auto_headers: Iterable[str] | None) -> None:
        """See `aiohttp.ClientRequest`."""


class UpstreamRequest(NamedTuple):
    """One request to an upstream."""

    method: str
    #: As the client sent it (`/v1/…`, percent-encoded), or `TOKENIZE`.
    path: str | bytes
    #: The client's, names in lower case.
    headers: Iterable[tuple[bytes, bytes]]
    #: Sent as it is.
    body: bytes
    #: The raw query string.
    query: bytes = b""
    #: The answer is to be uncompressed.
    readable: bool = True
    #: Another server or backend can answer instead: an answer that reports an error before its
    #: first content counts as broken, and a stream is held back until then.
    holds_first: bool = False
    #: Gets the name of each server that is left for another, and why.
    note_failed: Callable[[str, str], None] | None = None


class UpstreamClient(Protocol):
    """The upstream of a call: one server, or several that take it in turns."""

    @property
    def settings(self) -> UpstreamSettings:
        """The checked settings."""

    @property
    def name(self) -> str:
        """The operator's name for it."""

    @property
    def forwards_authorization(self) -> bool:
        """True if it gets the callers' own keys."""

    @property
    def notes_failures(self) -> bool:
        """True if it notes the servers that could not answer by itself."""

    async def request(
        self, request: UpstreamRequest, *, first_byte_timeout_s: float | None = None
    ) -> UpstreamResponse:
        """See `Upstream.request`."""


class Upstream:
    """One upstream server.

    Args:
        settings: as checked.
        secret: its key; by default the one that the settings refer to.
        gateway_has_key: callers send the gateway's own key, which must not leave it.
        server: name and URL of this server, where the upstream has several.
        on_breaker: called with each state that its circuit breaker enters.
    """

    def __init__(
        self,
        settings: UpstreamSettings,
        secret: str | None = None,
        *,
        gateway_has_key: bool = True,
        server: tuple[str, str] | None = None,
        on_breaker: Callable[[BreakerState], None] | None = None,
    ) -> None:
        reference = settings.key_reference()
        if secret is None and reference is not None:
            secret = read_secret(reference)
        forward = settings.forward_authorization
        if forward is None:
            forward = secret is None and not gateway_has_key
        self.settings = settings
        self.forwards_authorization = forward
        #: There is no other server that it could be left for.
        self.notes_failures = False
        #: How it is told to go on with answers that broke off elsewhere.
        self.continuation = ContinuationStyles(settings)
        self._secret = secret
        #: The operator's name for it.
        self.name, self._base_url = server or next(iter(settings.servers.items()))
        #: Tokens and calls since the start.
        self.usage = UsageTotals()
        #: Calls in flight and in line.
        self.slots = Slots(settings.max_concurrency, settings.max_waiting)
        #: Tries after the first, and tries that failed, since the start.
        self.retries = 0
        self.failures = 0
        self._base = URL(self._base_url)
        self._headers = RequestHeaders(secret, forward_credentials=forward, api=settings.api)
        self._policy = RetryPolicy(settings.max_retries, settings.backoff_s, settings.max_backoff_s)
        self._breaker = CircuitBreaker(
            failures=settings.breaker_failures,
            window_s=settings.breaker_window_s,
            open_s=settings.breaker_open_s,
            successes=settings.breaker_successes,
            on_change=on_breaker,
        )
        self._url = lru_cache(maxsize=_MAX_CACHED_URLS)(self._make_url)
        self._random = random.Random()  # noqa: S311 - jitter, not a secret
        self._session: aiohttp.ClientSession | None = None
        self._discovery: asyncio.Task[None] | None = None
        #: The operator gives it no new calls; those that it has go on.
        self.drained = False
        self._ready = asyncio.Event()
        #: Why it lists no models, where only its operator can change that.
        self.refusal: UpstreamError | None = None
        self._models: tuple[str, ...] = ()
        self._names: frozenset[str] = frozenset()
        if isinstance(settings.models, list):
            self._list(settings.models)

    def serves(self, model: str) -> bool:
        return model in self._names

    def serves_any(self) -> bool:
        return self.settings.models == "*"

    def models(self) -> tuple[str, ...]:
        """The models it lists; empty until they were read from it, where that is needed."""
        return self._models

    @property
    def ready(self) -> bool:
        """Return whether its models are known. It may still be failing: see `describe`."""
        return self._ready.is_set()

    def has_present_key(self) -> bool:
        """Return whether its key is still the one that its settings refer to.

        Raises:
            ConfigError: they refer to none any more.
        """
        reference = self.settings.key_reference()
        return self._secret == (None if reference is None else read_secret(reference))

    def set_drained(self, name: str, *, drained: bool) -> list[str]:
        """Send no new calls to a server, or calls again; what it has goes on.

        Returns: names of the servers that are meant, none if `name` is that of no one here.
        """
        if name != self.name:
            return []
        self.drained = drained
        return [name]

    async def start(self) -> None:
        """`open` and `join`."""
        await self.open()

    def join(self) -> None:
        """Be one that calls are sent to: nothing to do for a single server."""

    def succeed(self, other: object) -> None:
        """Take the place of another of the same name: drained if it is, with its models until
        its own are known."""
        if isinstance(other, Upstream):
            self.drained = other.drained
            if not self.ready and other.ready:
                self._list(other.models())
                self._ready.set()

    async def open(self) -> None:
        """Open the connection pool and begin to read the models; does not wait for them."""
        self._open_session()
        if self.settings.models is None:
            self._discovery = asyncio.create_task(
                self._keep_discovering(), name=f"discover-{self.name}"
            )
        else:
            self._ready.set()

    def _open_session(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=30),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=self.settings.connect_timeout_s,
                sock_read=self.settings.read_timeout_s,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            request_class=_PlainRequest,
            skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
            proxy=_proxy_for(self._base),
        )

    async def wait_ready(self) -> None:
        """Return once the models are known; an upstream that is down is tried again and again."""
        await self._ready.wait()

    async def close(self) -> None:
        """Abort what is in flight and close all connections."""
        if self._discovery is not None:
            self._discovery.cancel()
            await asyncio.gather(self._discovery, return_exceptions=True)
            self._discovery = None
        if self._session is not None:
            await self._session.close()
            self._session = None

    def describe(self) -> dict[str, Any]:
        """State and counters as plain types, for `/health`. No keys, no user names."""
        return {
            "name": self.name,
            "url": str(self._base.with_user(None)),
            "drained": self.drained,
            "models": len(self._models),
            **self.statistics(),
        }

    def statistics(self) -> dict[str, Any]:
        """The part of `describe` that changes with calls."""
        now = asyncio.get_running_loop().time()
        return {
            "ready": self.ready,
            "breaker": self._breaker.state(now),
            "breaker_openings": self._breaker.openings,
            "running": self.slots.held,
            "waiting": self.slots.waiting,
            "retries": self.retries,
            "failures": self.failures,
            "usage": self.usage.to_dict(),
        }

    async def request(
        self,
        request: UpstreamRequest,
        *,
        first_byte_timeout_s: float | None = None,
        tracker: RequestTracker | None = None,
        max_retries: int | None = None,
    ) -> UpstreamResponse:
        """Send one request and return its answer once the first bytes of the body are there.

        Retries what may be retried; so far nothing has been passed on. The caller closes the
        response in every case. A cancellation aborts the request at the upstream.

        Args:
            first_byte_timeout_s: seconds that the client waits for a first byte: no wait in line
                and no retry goes beyond it.
            tracker: notified of what becomes of the answer that is returned.
            max_retries: fewer than the settings allow.

        Raises:
            InvalidRequestError: the path leads elsewhere.
            DrainedError: the operator has drained it.
            OverloadedError: too many calls wait already, or the breaker is open.
            UpstreamError: it could not be reached or broke off, after all retries.
            UpstreamTimeoutError: it was silent for `read_timeout_s`.
        """
        limit_s = self.settings.read_timeout_s
        if first_byte_timeout_s is not None:
            limit_s = min(limit_s, first_byte_timeout_s)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        path = request.path
        url = self._url(path if isinstance(path, bytes) else path.encode(), request.query)
        headers = self._headers.build(request.headers, readable=request.readable)
        holds = request.holds_first and is_looked_into(path)
        send = partial(self._try_once, request.method, url, headers, request.body, tracker, holds)
        retries = self.settings.max_retries if max_retries is None else max_retries
        self._check_drained()
        if not self.slots.acquire_nowait():
            await self._wait_in_line(limit_s)
        try:
            self._check_drained()
            return await self._try_until_answered(send, deadline, retries)
        except BaseException:
            self.slots.release()
            raise

    def _check_drained(self) -> None:
        if self.drained:
            raise DrainedError(f"The upstream '{self.name}' is drained")

    async def _wait_in_line(self, limit_s: float) -> None:
        try:
            await self.slots.acquire(limit_s)
        except QueueFullError:
            raise OverloadedError(
                f"{self.slots.waiting} calls wait for the upstream '{self.name}' already. "
                "Try again later."
            ) from None
        except TimeoutError:
            raise OverloadedError(
                f"The upstream '{self.name}' had no room within {limit_s:g} s. Try again later."
            ) from None

    async def check(self) -> None:
        """Ask a server that is not in use for its models, once; to be closed afterwards.

        Raises:
            GatewayError: calls would fail there, or its models would not be known.
            TimeoutError: it does not answer.
        """
        self._open_session()
        if self.settings.models is None:
            await self._read_models()
            return
        # Its models are said: it may have no list.
        response = await self._ask_for_models()
        if response.status in (401, 403) or response.status >= 500:
            raise self._unexpected(response)

    async def _try_until_answered(
        self, send: Callable[[], Awaitable[UpstreamResponse]], deadline: float, max_retries: int
    ) -> UpstreamResponse:
        loop = asyncio.get_running_loop()
        retry = 0
        while True:
            permit = self._breaker.acquire(loop.time())
            if permit is None:
                raise self._unavailable()
            try:
                response = await send()
            except Broken as broken:
                if isinstance(broken.error, AnswerError):
                    # It may be the request's fault: whoever writes such must not open the breaker.
                    self.failures += 1
                    self._breaker.abandon(permit)
                else:
                    self._note_end(permit, complete=False)
                if not broken.retry or retry >= max_retries:
                    raise broken.error from None
                delay = 0.0
                if not broken.at_once or retry > 0:
                    delay = self._policy.backoff(retry, self._random.random())
                if self._must_stop(delay, deadline):
                    raise broken.error from None
            except BaseException:
                self._breaker.abandon(permit)
                raise
            else:
                status = response.status
                if status == 401 and not self.forwards_authorization:
                    self._breaker.success(permit)
                    response.discard()
                    raise self._key_error(status)
                if status == 404 and self._lacks_v1 and b'"error"' not in response.first:
                    self._breaker.success(permit)
                    response.discard()
                    raise self._url_error()
                if status >= 500:
                    self._note_end(permit, complete=False)
                elif self._breaker.state(loop.time()) == "half_open":
                    # The first byte is enough for a probe: streams can take minutes to end.
                    self._breaker.success(permit)
                else:
                    response.expect_end(permit)
                if status < 400 or not self._policy.wants_retry(status, response.hints):
                    return response
                wait = None
                if retry < max_retries:
                    wait = self._policy.delay(
                        retry, response.hints, self._random.random(), time.time()
                    )
                if wait is None or self._must_stop(wait, deadline):
                    response.exhausted = 0 < retry >= max_retries
                    return response
                response.discard()
                delay = wait
            self.retries += 1
            retry += 1
            if delay > 0:
                await asyncio.sleep(delay)

    async def _try_once(
        self,
        method: str,
        url: URL,
        headers: CIMultiDict[str],
        body: bytes,
        tracker: RequestTracker | None = None,
        holds_first: bool = False,
    ) -> UpstreamResponse:
        session = self._session
        if session is None:
            raise Broken(UpstreamError(f"The upstream '{self.name}' is closed."), retry=False)
        data = body if len(body) < _LARGE_BODY else io.BytesIO(body)
        try:
            inner = await session.request(
                method, url, data=data or None, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError, ValueError) as cause:
            raise self._explained(cause, "closed the connection without an answer") from None
        if not can_be_passed_on(inner.status, inner.raw_headers):
            inner.close()
            raise self._explained(ValueError("status or headers"), "") from None
        response = UpstreamResponse(
            self.name, self.settings, inner, self.slots, self._note_end, self.usage, tracker
        )
        try:
            await response.read_first()
            if holds_first and inner.status < 400 and not response.encoded:
                await self._check_beginning(response)
        except (aiohttp.ClientError, OSError) as cause:
            inner.close()
            raise self._explained(cause, "broke off before its answer was whole") from None
        except BaseException:
            inner.close()
            raise
        if not response.first and response.content_type == "text/event-stream":
            raise Broken(ended_early(self.name), retry=True)
        return response

    async def _check_beginning(self, response: UpstreamResponse) -> None:
        """Hold a stream back until its first content, and look for errors before it."""
        try:
            if response.content_type == "text/event-stream":
                await response.hold_until_content()
            elif response.at_eof and (error := reported_error(response.first)) is not None:
                raise error
        except AnswerError as error:
            raise Broken(error, retry=False) from None
        except UpstreamError as error:
            raise Broken(error, retry=True) from None

    @property
    def _lacks_v1(self) -> bool:
        return not self._base.path.rstrip("/").endswith("/v1")

    def _key_error(self, status: int) -> UpstreamKeyError:
        return UpstreamKeyError(
            f"The upstream '{self.name}' refuses the key that this gateway has for it (status "
            f"{status}). The gateway's operator can set another: {self.settings.key_variable()}, "
            "or upstreams.api_key."
        )

    def _url_error(self) -> UpstreamError:
        return UpstreamError(
            f"The upstream '{self.name}' does not know this route (status 404). The gateway's "
            "operator can correct its URL (upstreams.url), which should probably end in /v1."
        )

    def _explained(self, cause: BaseException, otherwise: str) -> Broken:
        return explain(self.name, self.settings, cause, otherwise)

    def _note_end(self, permit: Permit | None, complete: bool) -> None:
        """Count an answer that broke off; of one with a permit the breaker learns the outcome."""
        self.failures += not complete
        if permit is not None and complete:
            self._breaker.success(permit)
        elif permit is not None:
            self._breaker.failure(permit, asyncio.get_running_loop().time())

    def _must_stop(self, delay: float, deadline: float) -> bool:
        now = asyncio.get_running_loop().time()
        return now + delay >= deadline or self._breaker.state(now) == "open"

    def breaker_state(self) -> BreakerState:
        """The state of its circuit breaker now."""
        return self._breaker.state(asyncio.get_running_loop().time())

    @property
    def open_s(self) -> float:
        """Seconds until its breaker is half open; 0 unless it is open."""
        return self._breaker.retry_after_s(asyncio.get_running_loop().time())

    @property
    def retry_after_s(self) -> float:
        """Seconds after which a failing server may be tried again; at least one."""
        return max(1.0, self.open_s)

    async def listens(self) -> bool:
        """Return whether the server answers anything at all; calls may still fail there."""
        try:
            async with asyncio.timeout(DISCOVERY_TIMEOUT_S):
                response = await self._get_models()
        except (Broken, TimeoutError):
            return False
        response.discard()
        return True

    def try_again(self) -> None:
        """Let a call through, however long its breaker would stay open."""
        self._breaker.hasten(asyncio.get_running_loop().time())

    def _unavailable(self) -> GatewayError:
        wait = self.retry_after_s
        return OverloadedError(
            f"The upstream '{self.name}' has been failing and is left alone for now. "
            f"Try again in {wait:.0f} s.",
            code="upstream_unavailable",
            retry_after_s=round(wait, 1),
        )

    def _make_url(self, path: bytes, query: bytes) -> URL:
        suffix = f"?{query.decode('latin-1')}" if query else ""
        if path == TOKENIZE.encode():
            return URL(self._base_url.removesuffix("/v1") + TOKENIZE, encoded=True)
        return URL(f"{self._base_url}{_below_v1(path)}{suffix}", encoded=True)

    async def _keep_discovering(self) -> None:
        shortest, longest = DISCOVERY_BACKOFF_S
        backoff, complained = shortest, False
        while True:
            try:
                names = await self._read_models()
            except (GatewayError, TimeoutError) as error:
                if not complained:
                    reason = error.message if isinstance(error, GatewayError) else "no answer"
                    logger.warning("models of upstream '%s': %s Trying on.", self.name, reason)
                    complained = True
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, longest)
                continue
            self._list(names)
            self._ready.set()
            backoff, complained = shortest, False
            await asyncio.sleep(REFRESH_S)

    async def _read_models(self) -> list[str]:
        response = await self._ask_for_models()
        if response.status != 200:
            self.refusal = self._refusal_of(response.status)
            raise self._unexpected(response)
        self.refusal = None
        try:
            return [model.id for model in _model_list_decoder.decode(response.first).data]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise UpstreamError("GET /models did not answer with a list of models.") from None

    async def _ask_for_models(self) -> UpstreamResponse:
        async with asyncio.timeout(DISCOVERY_TIMEOUT_S):
            try:
                response = await self._get_models()
            except Broken as broken:
                raise broken.error from None
        response.discard()
        return response

    def _get_models(self) -> Coroutine[Any, Any, UpstreamResponse]:
        headers = self._headers.build([(b"accept", b"application/json")], readable=True)
        return self._try_once("GET", self._url(b"/v1/models", b""), headers, b"")

    def _refusal_of(self, status: int) -> UpstreamError | None:
        """Word for callers why it lists no models, unless that may pass by itself."""
        if status in (401, 403):
            return self._key_error(status)
        if status == 404 and self._lacks_v1:
            return self._url_error()
        if status < 500 and status not in (408, 429):
            return UpstreamError(
                f"The upstream '{self.name}' does not list its models (status {status}). The "
                "gateway's operator can name them (upstreams.models)."
            )
        return None

    def _unexpected(self, response: UpstreamResponse) -> UpstreamError:
        advice = "Which models there are can be said with the setting upstreams.models."
        if response.status in (401, 403):
            variable = self.settings.key_variable()
            advice = (
                f"It wants a key, or another one: set {variable}, or name it in upstreams.api_key."
            )
        elif response.status == 404 and self._lacks_v1:
            advice = f"Should its URL, {self._base.with_user(None)}, end in /v1?"
        return UpstreamError(f"GET /models answered {response.status}. {advice}")

    def _list(self, names: Iterable[str]) -> None:
        self._models = tuple(dict.fromkeys(names))
        self._names = frozenset(self._models)


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


_model_list_decoder = msgspec.json.Decoder(_ModelList)


def _below_v1(path: bytes) -> str:
    """Return the part of a path behind `/v1`, as the client sent it.

    NOTE: it is appended to the upstream's URL as it is. An encoded slash in the place of the first
    one would make the upstream's host the user name of another host, and `..` would lead out of
    the routes that the URL stands for.

    Raises:
        InvalidRequestError: it does not begin with a plain `/v1/`, or goes up.
    """
    text = path.decode("latin-1")
    segments = unquote(text, "latin-1").replace("\\", "/").split("/")
    if not text.startswith("/v1/") or "." in segments or ".." in segments:
        raise InvalidRequestError(
            "A path that goes to an upstream begins with '/v1/' and has no '.' or '..' in it.",
            code="invalid_path",
        )
    return text.removeprefix("/v1")


def _proxy_for(url: URL) -> str | None:
    """The proxy that the environment (`HTTPS_PROXY`, `NO_PROXY`, …) names, read once."""
    host = url.host or ""
    if urllib.request.proxy_bypass(host) or host in ("localhost", "127.0.0.1", "::1"):
        return None
    return urllib.request.getproxies().get(url.scheme)
