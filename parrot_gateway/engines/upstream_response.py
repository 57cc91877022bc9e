"""An upstream's answer, from its first bytes to its end or abort. Bytes only, no meaning."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

import aiohttp

from parrot_gateway.engines.breaker import Permit
from parrot_gateway.engines.proxy_headers import response_headers
from parrot_gateway.engines.slots import Slots
from parrot_gateway.engines.upstream_errors import explain
from parrot_gateway.settings.model import UpstreamSettings

#: Answers up to this size are read whole before anything is passed on, so that a failure in their
#: middle can still be retried or reported; the rest of a longer one is streamed.
WHOLE_BODY_LIMIT = 4 * 1024 * 1024


class ResponseOwner(Protocol):
    """The upstream that a response came from, as far as the response reports to it."""

    @property
    def settings(self) -> UpstreamSettings:
        """For the wording of errors."""
        ...

    @property
    def slots(self) -> Slots:
        """The response holds one of them until it is closed."""
        ...

    def note_success(self, permit: Permit) -> None:
        """The answer came to its end."""
        ...

    def note_failure(self, permit: Permit | None) -> None:
        """The answer broke off."""
        ...


class UpstreamResponse:
    """An answer whose status, headers and first bytes are there.

    Attributes:
        status: of the upstream.
        headers: those that go on to the client, names in lower case.
        content_type: lower case, without parameters.
        first: first bytes of the body; all of it when `at_eof`.
        encoded: the body is compressed.
        exhausted: the status asked for a retry and the retries are used up.
    """

    __slots__ = (
        "_closed",
        "_inner",
        "_owner",
        "_permit",
        "content_type",
        "encoded",
        "exhausted",
        "first",
        "headers",
        "status",
    )

    def __init__(self, owner: ResponseOwner, inner: aiohttp.ClientResponse) -> None:
        self._owner = owner
        self._inner = inner
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
        """Whether the whole body has been read."""
        return self._inner.content.at_eof()

    @property
    def announced_length(self) -> int | None:
        """The upstream's `Content-Length`."""
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
            return await self._inner.content.readany()
        except (aiohttp.ClientError, OSError) as cause:
            broken = explain(self._owner.settings, cause, "broke off in the middle of an answer")
            self._owner.note_failure(self._permit)
            self._permit = None
            raise broken.error from None

    async def ends_within(self, timeout_s: float) -> bool:
        """Whether the body ends within so many seconds, without any further byte.

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
        length = self._inner.content_length
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

    def close(self) -> None:
        """Let go of the call. A body that was not read to its end is aborted at the upstream."""
        if self._closed:
            return
        self._closed = True
        self._owner.slots.release()
        if not self._inner.content.at_eof():
            self._inner.close()
        elif self._permit is not None:
            self._owner.note_success(self._permit)

    def expect_end(self, permit: Permit) -> None:
        """The end of the body decides whether this counts as a success."""
        self._permit = permit

    def discard(self) -> None:
        """Drop an answer that is going to be retried."""
        if not self._inner.content.at_eof():
            self._inner.close()
