"""Reads the model, and what may name a session, from requests for routes that are passed on.

Of a JSON body some fields, of a multipart form one. Nothing else of a body is decoded.
"""

from __future__ import annotations

import re

import msgspec

from parrot_gateway.calls.requests.call import IdentityFields
from parrot_gateway.exceptions import InvalidRequestError
from parrot_gateway.http.exchange import Exchange

#: Headers of one part, and the value of a field.
MAX_PART_HEAD_BYTES = 4096
MAX_VALUE_BYTES = 256
#: Parts that are looked at; a field behind them counts as left out.
MAX_PARTS = 1024

_BOUNDARY = re.compile(rb';[ \t]*boundary=(?:"([^"\r\n]{1,200})"|([^;"\s]{1,200}))', re.IGNORECASE)
_NAME = re.compile(rb';[ \t]*name=(?:"([^"\r\n]*)"|([^;"\s]*))', re.IGNORECASE)


class Envelope(IdentityFields):
    """The fields that are read of a request for one of the other routes."""

    model: str | None = None


_envelope_decoder = msgspec.json.Decoder(Envelope)


def model_of(exchange: Exchange, body: bytes) -> str | None:
    """The model that a request for one of the other routes names; as `envelope_of`."""
    return envelope_of(exchange, body).model


def envelope_of(exchange: Exchange, body: bytes) -> Envelope:
    """Read the fields of a JSON body, or the form field `model` of a multipart body.

    Raises:
        InvalidRequestError: the body is declared as JSON and is not, or `model` is no string.
    """
    content_type = exchange.headers.get(b"content-type") or b""
    lowered = content_type.lower()
    if lowered.startswith(b"application/json") and body:
        try:
            return _envelope_decoder.decode(body)
        except msgspec.ValidationError:
            if not body.lstrip().startswith(b"{"):
                return Envelope()
            raise InvalidRequestError("'model' must be a string.", param="model") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequestError(f"The body is not valid JSON: {error}") from None
    if lowered.startswith(b"multipart/form-data"):
        return Envelope(model=form_field(content_type, body, b"model"))
    return Envelope()


def form_field(content_type: bytes, body: bytes, name: bytes) -> str | None:
    """The value of a multipart form's first field of that name; None without one, empty when it is
    too long.

    Linear in the body: parts are cut at their boundary, and of each only the beginning is looked
    at. Nothing is decoded or checked; that is left to the upstream.

    Args:
        content_type: the header, with the boundary.
        body: the whole form.
        name: of the field.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        return None
    mark = b"--" + (found[1] or found[2])
    start = 0 if body.startswith(mark) else body.find(b"\r\n" + mark) + 2
    if start == 1:
        return None
    for _ in range(MAX_PARTS):
        head = body.find(b"\r\n", start + len(mark), start + len(mark) + MAX_PART_HEAD_BYTES)
        if head < 0:
            return None
        end = body.find(b"\r\n" + mark, head)
        if end < 0:
            return None
        blank = body.find(b"\r\n\r\n", head, min(head + MAX_PART_HEAD_BYTES, end))
        if blank >= 0 and _name_of(body[head:blank]) == name:
            value = body[blank + 4 : end]
            return value.decode("utf-8", "replace").strip() if len(value) <= MAX_VALUE_BYTES else ""
        start = end + 2
    return None


def _name_of(head: bytes) -> bytes | None:
    for line in head.split(b"\r\n"):
        title, _, text = line.partition(b":")
        if title.strip().lower() == b"content-disposition":
            found = _NAME.search(text)
            return None if found is None else found[1] if found[1] is not None else found[2]
    return None
