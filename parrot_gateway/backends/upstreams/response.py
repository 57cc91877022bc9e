"""An upstream's answer, from its first bytes to its end or abort, and what goes wrong on the way.

Bytes only, no meaning; errors are in words for the client and name no address.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import aiohttp

from parrot_gateway.backends.upstreams.breaker import Permit
from parrot_gateway.backends.upstreams.first_content import MAX_HELD_BYTES, FirstContent
from parrot_gateway.backends.upstreams.headers import response_headers
from parrot_gateway.backends.upstreams.slots import Slots
from parrot_gateway.calls.usage import Usage, UsageTotals
from parrot_gateway.exceptions import UpstreamError, UpstreamTimeoutError
from parrot_gateway.settings.model import UpstreamSettings

logger = logging.getLogger(__name__)

#: Answers up to this size are read whole before anything is passed on, so that a failure in their
#: middle can still be retried or reported; the rest of a longer one is streamed.
WHOLE_BODY_LIMIT = 4 * 1024 * 1024
#: A stream of comments alone is held back for so long: they keep connections open.
MAX_HELD_S = 10.0


class Broken(Exception):
    """One try failed before anything was passed on."""

    def __init__(self, error: UpstreamError, *, retry: bool, at_once: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.retry = retry
        #: The connection may just have been an idle one that the upstream had closed.
        self.at_once = at_once


class RequestTracker(Protocol):
    """Follows one request to a server of several; see `UpstreamResponse`."""

    @property
    def queued_s(self) -> float:
        """Seconds that the call waited for a server."""

    @property
    def reason(self) -> str:
        """Why it is this server, in a few words."""

    def read(self, data: bytes) -> None:
        """Bytes of the answer's body, as they come."""

    def succeeded(self, usage: Usage | None) -> None:
        """The answer is complete; what it says of tokens, if anything."""

    def close(self) -> None:
        """The request is over. Safe to call twice."""


def explain(name: str, settings: UpstreamSettings, cause: BaseException, otherwise: str) -> Broken:
    """Word a failure of the connection to the server `name` for the client, without an
    address."""
    upstream = f"The upstream '{name}'"
    logger.debug("%s: %r", name, cause)
    if isinstance(cause, aiohttp.ConnectionTimeoutError):
        message = f"{upstream} did not accept a connection in {settings.connect_timeout_s:g} s."
        return Broken(UpstreamTimeoutError(message), retry=True)
    if isinstance(cause, TimeoutError):
        # NOTE: not retried: the first try may still be at work after all this time.
        message = f"{upstream} was silent for {settings.read_timeout_s:g} s."
        return Broken(UpstreamTimeoutError(message), retry=False)
    if isinstance(cause, aiohttp.ClientConnectorError):
        number = cause.os_error.errno
        reason = os.strerror(number) if number and number > 0 else "no connection"
        if isinstance(cause, aiohttp.ClientConnectorDNSError):
            reason = "its name cannot be resolved"
        return Broken(
            UpstreamError(
                f"{upstream} cannot be reached ({reason}). Check that it is running and its "
                "address in the gateway's settings."
            ),
            retry=True,
        )
    if isinstance(cause, (aiohttp.ClientResponseError, aiohttp.InvalidURL, ValueError)):
        return Broken(
            UpstreamError(f"{upstream} did not answer in HTTP that can be understood."), retry=False
        )
    return Broken(UpstreamError(f"{upstream} {otherwise}."), retry=True, at_once=True)


def ended_early(server: str) -> UpstreamError:
    """The error of a stream without any content."""
    return UpstreamError(f"The upstream '{server}' ended its stream before it began.")


class UpstreamResponse:
    """An answer whose status, headers and first bytes are there; holds a slot until it is closed.

    Args:
        server: name of the server that answers.
        settings: of the upstream, for the wording of errors.
        inner: the client's own response.
        slots: the slot is released there.
        report: called with the permit, if one decides by the end, and whether the end was reached.
        usage: what is counted of the server's answers.
        tracker: of the call, where the server is one of several.

    Attributes:
        server: see above.
        status: of the upstream.
        headers: those that go on to the client, names in lower case.
        content_type: lower case, without parameters.
        first: first bytes of the body; all of it when `at_eof`.
        encoded: the body is compressed.
        exhausted: the status calls for a retry and the retries are used up.
    """

    def __init__(
        self,
        server: str,
        settings: UpstreamSettings,
        inner: aiohttp.ClientResponse,
        slots: Slots,
        report: Callable[[Permit | None, bool], None],
        usage: UsageTotals,
        tracker: RequestTracker | None = None,
    ) -> None:
        self.server = server
        self._settings = settings
        self._inner = inner
        self._slots = slots
        self._report = report
        self._usage = usage
        self._tracker = tracker
        self._permit: Permit | None = None
        self._closed = False
        self.status = inner.status
        self.headers = response_headers(inner.raw_headers)
        content_type = inner.headers.get("content-type", "")
        self.content_type = content_type.partition(";")[0].strip().lower()
        self.encoded = inner.headers.get("content-encoding", "identity").lower() != "identity"
        self.first = b""
        self.exhausted = False

    @property
    def at_eof(self) -> bool:
        return self._inner.content.at_eof()

    @property
    def queued_s(self) -> float:
        """Seconds that the call waited for a server of several."""
        return 0.0 if self._tracker is None else self._tracker.queued_s

    @property
    def reason(self) -> str:
        """Why it is this server, in a few words; empty for the only one."""
        return "" if self._tracker is None else self._tracker.reason

    @property
    def announced_length(self) -> int | None:
        return self._inner.content_length

    @property
    def hints(self) -> Mapping[str, str]:
        """The upstream's own headers, by name in any case: when to retry is in them."""
        return self._inner.headers

    async def read(self) -> bytes:
        """The next bytes, as they come; empty at the end.

        Raises:
            UpstreamError: the body broke off or stalled.
        """
        try:
            data = await self._inner.content.readany()
        except (aiohttp.ClientError, OSError) as cause:
            doing = "broke off in the middle of an answer"
            broken = explain(self.server, self._settings, cause, doing)
            self._report(self._permit, False)
            self._permit = None
            raise broken.error from None
        if self._tracker is not None:
            self._tracker.read(data)
        return data

    async def ends_within(self, timeout_s: float) -> bool:
        """Wait for the end of the body; False if it takes longer, or if another byte comes.

        A failure in the meantime is raised by the next `read`.
        """
        content = self._inner.content
        try:
            async with asyncio.timeout(timeout_s):
                await content.wait_eof()
        except (aiohttp.ClientError, OSError):
            # TimeoutError is an OSError.
            return False
        return content.at_eof()

    async def read_first(self) -> None:
        """Fill `first`: the whole body of a document, the first bytes of a stream."""
        content = self._inner.content
        length = self.announced_length
        if length is None:
            is_whole = self.content_type == "application/json"
        else:
            is_whole = length <= WHOLE_BODY_LIMIT and self.content_type != "text/event-stream"
        self.first = await content.readany()
        if not is_whole or content.at_eof():
            return
        chunks, size = [self.first], len(self.first)
        while size < WHOLE_BODY_LIMIT and not content.at_eof():
            chunk = await content.readany()
            chunks.append(chunk)
            size += len(chunk)
        self.first = b"".join(chunks)

    async def hold_until_content(self) -> None:
        """Let `first` of a stream reach to its first content.

        Raises:
            AnswerError: it reported an error, or made no sense, before that.
            UpstreamError: it ended before that.
        """
        content, held = self._inner.content, FirstContent()
        state, ends = held.feed(self.first), time.monotonic() + MAX_HELD_S
        pieces, size = [self.first], len(self.first)
        while state == "waiting" and size < MAX_HELD_BYTES:
            if held.comments and time.monotonic() > ends:
                break
            if content.at_eof():
                raise ended_early(self.server)
            piece = await content.readany()
            pieces.append(piece)
            size += len(piece)
            state = held.feed(piece)
        if held.error is not None:
            raise held.error
        self.first = b"".join(pieces)

    def headers_for_client(self) -> list[tuple[bytes, bytes]]:
        """The headers of the client's answer: those of the upstream, and the server's name."""
        headers = [*self.headers, (b"x-parrot-engine", self.server.encode())]
        if self.exhausted:
            headers = [item for item in headers if item[0] != b"x-should-retry"]
            headers.append((b"x-should-retry", b"false"))
        return headers

    def succeeded(self, usage: Usage | None) -> None:
        """Count the answer as a success; it is complete, and says so much of tokens."""
        self._usage.add(usage)
        if self._tracker is not None:
            self._tracker.succeeded(usage)

    def close(self) -> None:
        """Release the slot. A body that was not read to its end is aborted at the upstream."""
        if self._closed:
            return
        self._closed = True
        self._slots.release()
        if self._tracker is not None:
            self._tracker.close()
        if not self.at_eof:
            self._inner.close()
        elif self._permit is not None:
            self._report(self._permit, True)

    def expect_end(self, permit: Permit) -> None:
        """The end of the body decides whether this counts as a success."""
        self._permit = permit

    def discard(self) -> None:
        """Drop an answer that is going to be retried."""
        if not self.at_eof:
            self._inner.close()
