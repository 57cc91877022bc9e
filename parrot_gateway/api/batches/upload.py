"""Reads the multipart form of an upload: its file in portions, its fields whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from parrot_gateway.batches.files import Upload
from parrot_gateway.exceptions import InvalidRequestError, missing_parameter

#: Bounds of a form: bytes of all fields and heads together, and parts.
_MAX_FIELD_BYTES = 64 * 1024
_MAX_PARTS = 32
#: Bytes of a file that are collected before they are written.
_PORTION_BYTES = 1024 * 1024
FILE_FIELD = "file"


class UploadForm:
    """A form that is fed with bytes.

    Args:
        content_type: the header, with the boundary.

    Raises:
        InvalidRequestError: it is no form.
    """

    def __init__(self, content_type: bytes) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidRequestError(
                "A file is uploaded as multipart/form-data with a boundary.",
                code="invalid_content_type",
            )
        #: Those that have ended, by name.
        self.fields: dict[str, str] = {}
        #: None until the file has begun.
        self.filename: str | None = None
        self._portions: list[bytes] = []
        self._pending_bytes = 0
        self._name = ""
        self._value = bytearray()
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        self._field_bytes = 0
        self._parts = 0
        self._is_file = False
        self._is_complete = False
        callbacks: dict[str, Callable[..., Any]] = {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]
        except FormParserError:
            raise _malformed() from None

    @property
    def pending_bytes(self) -> int:
        """Bytes of the file that nobody has taken."""
        return self._pending_bytes

    def feed(self, data: bytes) -> None:
        """Take bytes.

        Raises:
            InvalidRequestError: it is malformed or too long.
        """
        try:
            self._parser.write(data)
        except FormParserError:
            raise _malformed() from None

    def take(self) -> bytes:
        """The bytes of the file that have come since the last time."""
        taken, self._portions, self._pending_bytes = b"".join(self._portions), [], 0
        return taken

    def check_complete(self) -> None:
        """Raises:
        InvalidRequestError: its end or its file is missing.
        """
        if not self._is_complete:
            raise _malformed()
        if self.filename is None:
            raise missing_parameter(FILE_FIELD)

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise InvalidRequestError(f"The form has more than {_MAX_PARTS} parts.")
        self._disposition = b""
        self._value.clear()

    def _add_header(self, which: int, data: bytes) -> None:
        self._count(len(data))
        self._header[which].extend(data)

    def _end_header(self) -> None:
        name, value = self._header
        if bytes(name).lower() == b"content-disposition":
            self._disposition = bytes(value)
        name.clear()
        value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == FILE_FIELD
        if not self._is_file:
            return
        if self.filename is not None:
            raise InvalidRequestError("The form has more than one file.", param=FILE_FIELD)
        self.filename = options.get(b"filename", b"").decode("utf-8", "replace")[:512] or "file"

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._portions.append(data[start:end])
            self._pending_bytes += end - start
        else:
            self._count(end - start)
            self._value += data[start:end]

    def _end_part(self) -> None:
        if self._is_file:
            self._is_file = False
            return
        self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_complete = True

    def _count(self, num_bytes: int) -> None:
        self._field_bytes += num_bytes
        if self._field_bytes > _MAX_FIELD_BYTES:
            raise InvalidRequestError("The fields of the form are too long.")


async def read_upload(
    form: UploadForm,
    chunks: AsyncIterator[bytes],
    upload: Upload,
    check: Callable[[dict[str, str]], None],
) -> None:
    """Read a form whose file goes to disk as it comes.

    Args:
        form: may hold something already.
        upload: gets the file; closed at the end.
        check: refuses fields, as soon as some have ended.

    Raises:
        GatewayError: the form is malformed, its fields were refused, or the file is too large.
    """
    async for chunk in chunks:
        form.feed(chunk)
        check(form.fields)
        if form.pending_bytes >= _PORTION_BYTES:
            await asyncio.to_thread(upload.write, form.take())
    form.check_complete()
    await asyncio.to_thread(upload.write, form.take())
    await asyncio.to_thread(upload.close)


def _malformed() -> InvalidRequestError:
    return InvalidRequestError("The body is no complete multipart form.", code="invalid_form")
