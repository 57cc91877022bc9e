"""Bodies of requests that come compressed.

gzip is taken, within the limit of the settings after decompression; any other coding is refused.
The text is what everything behind gets, upstreams included.
"""

from __future__ import annotations

import zlib

from parrot_gateway.exceptions import (
    InvalidRequestError,
    RequestTooLargeError,
    UnsupportedMediaTypeError,
)

_GZIP = (b"gzip", b"x-gzip")
#: `zlib`'s window for a stream with gzip's head and checksum.
_GZIP_WINDOW = 16 + zlib.MAX_WBITS


def is_gzip(encoding: bytes | None) -> bool:
    """Tell if a body with this `Content-Encoding` is to be decompressed.

    Raises:
        UnsupportedMediaTypeError: it is neither gzip nor plain.
    """
    name = (encoding or b"").strip().lower()
    if name in _GZIP:
        return True
    if name in (b"", b"identity"):
        return False
    raise UnsupportedMediaTypeError(
        f"Bodies with content-encoding '{name.decode('latin-1')[:80]}' are not taken: send gzip, "
        "or the body as it is.",
        code="unsupported_content_encoding",
    )


def decompress(body: bytes, limit: int) -> bytes:
    """The content of a gzip file of one member, which is what clients send.

    Raises:
        InvalidRequestError: it is no such file, or ends early.
        RequestTooLargeError: it holds more than `limit` bytes; no more than that is ever made.
    """
    member = zlib.decompressobj(_GZIP_WINDOW)
    try:
        text = member.decompress(body, limit + 1)
    except zlib.error as error:
        raise _malformed(str(error)) from None
    if len(text) > limit:
        raise body_too_large(limit, "decompressed")
    if not member.eof:
        raise _malformed("it ends early")
    if member.unused_data:
        # NOTE: further members too: each of many small ones would cost a copy of the rest.
        raise _malformed("something follows it")
    return text


def body_too_large(limit: int, state: str = "") -> RequestTooLargeError:
    """A body over `limit` bytes; `state` says of which form of it."""
    what = f"The {state} request body" if state else "The request body"
    return RequestTooLargeError(
        f"{what} is larger than this server's limit of {limit} bytes "
        "(setting server.max_body_bytes)."
    )


def _malformed(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The body is not the gzip that its content-encoding announces: {reason}.",
        code="malformed_body",
    )
