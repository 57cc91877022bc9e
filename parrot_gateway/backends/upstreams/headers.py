"""The headers that cross the gateway, in either direction.

Towards the upstream everything passes except: hop-by-hop headers and those named in `Connection`,
`Host`, `Content-Length` (made anew), cookies, what is meant for the gateway (`X-Parrot-*`), and the
caller's credentials unless they are to be forwarded. Without the caller's own credentials its
choice of organization and project is dropped too: those would act on the operator's account.

Towards the client everything passes except: hop-by-hop headers, `Content-Length`, `Date`, `Server`
(made anew), cookies, CORS and what binds a browser to the upstream's host. `x-request-id` is the
gateway's in every answer, so that one id finds a call in its log; the upstream's becomes
`x-upstream-request-id`, and its `openai-processing-ms` `x-upstream-processing-ms`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from multidict import CIMultiDict

#: Of Anthropic's API; the only one since 2023.
ANTHROPIC_VERSION = "2023-06-01"

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_CREDENTIALS = frozenset({b"authorization", b"api-key", b"x-api-key"})
_ACCOUNT = frozenset({b"openai-organization", b"openai-project"})
_REQUEST_DROPPED = HOP_BY_HOP | {b"host", b"content-length", b"cookie", b"expect"}
_RESPONSE_DROPPED = HOP_BY_HOP | {
    b"alt-svc",
    b"content-length",
    b"date",
    b"openai-version",
    b"server",
    b"set-cookie",
    b"strict-transport-security",
}
#: CORS: which pages may read answers is this gateway's to say (`server.cors_origins`).
_CORS_PREFIX = b"access-control-"
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_RENAMED = {
    b"x-request-id": b"x-upstream-request-id",
    b"openai-processing-ms": b"x-upstream-processing-ms",
}


class RequestHeaders:
    """Makes the headers of requests to one upstream.

    Args:
        secret: the upstream's key, sent as `Authorization: Bearer …`, or as `x-api-key` where
            `api` is Anthropic's; None sends none.
        forward_credentials: the caller's own credentials pass instead.
        api: the one that the upstream speaks.
    """

    __slots__ = ("_api", "_dropped", "_key")

    def __init__(
        self,
        secret: str | None,
        *,
        forward_credentials: bool,
        api: Literal["openai", "anthropic"] = "openai",
    ) -> None:
        self._api = api
        self._key: tuple[str, str] | None = None
        if secret is not None:
            anthropic = ("x-api-key", secret)
            self._key = anthropic if api == "anthropic" else ("authorization", f"Bearer {secret}")
        self._dropped = _REQUEST_DROPPED
        if not forward_credentials:
            self._dropped = _REQUEST_DROPPED | _CREDENTIALS | _ACCOUNT

    def build(self, headers: Iterable[tuple[bytes, bytes]], *, readable: bool) -> CIMultiDict[str]:
        """The headers to send.

        Args:
            headers: the caller's, names in lower case (as ASGI gives them).
            readable: request an uncompressed answer, so that the gateway can find the
                usage in it and end a broken stream properly.
        """
        dropped = self._dropped
        result: CIMultiDict[str] = CIMultiDict()
        for name, value in headers:
            if name in dropped or name.startswith(b"x-parrot-"):
                if name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
                    dropped = dropped | _tokens(value)
                continue
            result.add(name.decode("latin-1"), value.decode("utf-8", "replace"))
        if dropped is not self._dropped:
            for token in dropped - self._dropped:
                result.popall(token.decode("latin-1"), None)
        if readable:
            result["accept-encoding"] = "identity"
        if self._key is not None:
            header, secret = self._key
            result[header] = secret
        if self._api == "anthropic":
            # Required; calls that were made here, such as those for the list of models, lack it.
            result.setdefault("anthropic-version", ANTHROPIC_VERSION)
        return result


def can_be_passed_on(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether an answer with this head can be sent to a client at all.

    HTTP clients, the one for upstreams included, let more pass than a server may
    send: statuses that no HTTP knows, one that switches protocols, control characters in headers.
    """
    return 200 <= status <= 599 and not _CONTROL.search(b"".join([value for _, value in headers]))


def response_headers(raw: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of an upstream's answer that go on to the client, names in lower case."""
    result: list[tuple[bytes, bytes]] = []
    named: frozenset[bytes] = frozenset()
    for name, value in raw:
        name = name.lower()
        if name in _RESPONSE_DROPPED or name.startswith(_CORS_PREFIX):
            if name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
                named = _tokens(value)
            continue
        result.append((_RENAMED.get(name, name), value))
    if named:
        result = [(name, value) for name, value in result if name not in named]
    return result


def _tokens(value: bytes) -> frozenset[bytes]:
    return frozenset(token.strip().lower() for token in value.split(b","))
