"""`/v1/files`: files of batches, kept by this gateway; all others are the upstream's.

Whose an upload becomes is decided by its purpose and, where
upstreams run batches themselves, by the model of its first line.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import msgspec

from parrot_gateway.api.batches.local_routes import LocalRoutes, ours
from parrot_gateway.api.pages import page_of
from parrot_gateway.batches.files import FILE_MARK, FileStore, StoredFile
from parrot_gateway.batches.folder import full_disk_refused
from parrot_gateway.exceptions import (
    GatewayError,
    InvalidRequestError,
    NotFoundError,
    invalid_value,
    missing_parameter,
    unsupported_value,
)
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.http.route_table import Query, route

#: Bytes that are read of a content and sent at a time.
_CHUNK_BYTES = 256 * 1024
#: Bounds of a lifetime, as OpenAI has them.
_LIFETIME_S = (3_600, 2_592_000)
_CONTENT_TYPE = (b"content-type", b"application/octet-stream")


class _Body(msgspec.Struct):
    model: str | None = None


class _Line(msgspec.Struct):
    body: _Body | None = None


_line_decoder = msgspec.json.Decoder(_Line)


class FileRoutes(LocalRoutes):
    """The routes under `/v1/files`."""

    mark: ClassVar[str] = FILE_MARK

    @route("POST", "/v1/files")
    async def create(self, exchange: Exchange) -> None:
        """Upload the lines of a batch."""
        # Imported here because a gateway without batches does without the parser.
        from parrot_gateway.api.batches.upload import UploadForm, read_upload

        content_type = exchange.headers.get(b"content-type") or b""
        body: bytes | None = None
        may_pass = bool(self.models.upstreams) and not self._is_too_long(exchange)
        if may_pass or exchange.headers.get(b"content-encoding") is not None:
            body = await exchange.body(self.max_body_bytes)
            if may_pass and not await asyncio.to_thread(self._is_ours, content_type, body):
                await self.passthrough(exchange, body)
                return
        form = UploadForm(content_type)
        files = await self.service.open()
        with full_disk_refused():
            upload = await files.begin_upload()
            try:
                chunks = exchange.chunks() if body is None else _single(body)
                await read_upload(form, chunks, upload, _check_purpose)
                if "purpose" not in form.fields:
                    raise missing_parameter("purpose")
                lifetime_s = lifetime_of(form.fields)
                file = await files.keep(
                    upload.path,
                    exchange.tenant,
                    form.filename or "file",
                    "batch",
                    lifetime_s=lifetime_s,
                )
            finally:
                await asyncio.to_thread(upload.discard)
        await exchange.respond_json(shape_of(file))

    @route("GET", "/v1/files")
    async def list(self, exchange: Exchange) -> None:
        """List files, newest first."""
        query = Query(exchange, "purpose", "limit", "order", "after")
        files = self.service.files
        found = [] if files is None else files.newest_first(exchange.tenant)
        if self.is_foreign_list(found, query):
            await self.passthrough(exchange, None)
            return
        purpose = query.text("purpose")
        if purpose is not None:
            found = [file for file in found if file.purpose == purpose]
        page = page_of(found, query.text, shape_of, default_limit=10_000, max_limit=10_000)
        await exchange.respond_json(page)

    @route("GET", "/v1/files/{file_id}")
    @ours
    async def retrieve(self, exchange: Exchange, file_id: str) -> None:
        """Describe a file."""
        file = self._files(file_id).find(exchange.tenant, file_id)
        await exchange.respond_json(shape_of(file))

    @route("DELETE", "/v1/files/{file_id}")
    @ours
    async def delete(self, exchange: Exchange, file_id: str) -> None:
        """Delete a file."""
        await self.service.delete_file(self._files(file_id).find(exchange.tenant, file_id))
        await exchange.respond_json({"id": file_id, "object": "file", "deleted": True})

    @route("GET", "/v1/files/{file_id}/content")
    @ours
    async def content(self, exchange: Exchange, file_id: str) -> None:
        """Read the content of a file."""
        files = self._files(file_id)
        file = files.find(exchange.tenant, file_id)
        try:
            content = await asyncio.to_thread(files.path(file).open, "rb")
        except FileNotFoundError:
            raise NotFoundError(f"No such File object: {file_id[:80]}", param="id") from None
        try:
            chunk = await asyncio.to_thread(content.read, _CHUNK_BYTES)
            headers = [_CONTENT_TYPE, (b"content-length", b"%d" % file.num_bytes)]
            await exchange.start_stream(200, headers, chunk)
            while chunk:
                chunk = await asyncio.to_thread(content.read, _CHUNK_BYTES)
                await exchange.write(chunk)
            await exchange.end_stream()
        finally:
            content.close()

    def _files(self, file_id: str) -> FileStore:
        if self.service.files is None:
            raise NotFoundError(f"No such File object: {file_id[:80]}", param="id")
        return self.service.files

    def _is_too_long(self, exchange: Exchange) -> bool:
        """Return whether an upload is too long to pass on, and so can only be one of ours."""
        announced = exchange.headers.get(b"content-length") or b""
        runs = self.service.settings.upstream_batches == "run"
        return runs and announced.isdigit() and int(announced) > self.max_body_bytes

    def _is_ours(self, content_type: bytes, body: bytes) -> bool:
        from parrot_gateway.api.batches.upload import UploadForm

        try:
            form = UploadForm(content_type)
            form.feed(body)
        except InvalidRequestError:
            return False
        if form.fields.get("purpose") != "batch":
            return False
        if self.service.settings.upstream_batches == "run":
            return True
        first = form.take().lstrip().partition(b"\n")[0]
        try:
            line = _line_decoder.decode(first)
            model = None if line.body is None else line.body.model
            return model is not None and self.models.resolve(model).upstream is None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, GatewayError):
            return False


def shape_of(file: StoredFile) -> dict[str, Any]:
    """A file as clients see it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def lifetime_of(fields: dict[str, str]) -> int | None:
    """Seconds that `expires_after` grants a file; None without it.

    Raises:
        InvalidRequestError: it is wrong.
    """
    given = {
        name.partition("[")[2].removesuffix("]"): text
        for name, text in fields.items()
        if name.startswith("expires_after[")
    }
    if not given:
        return None
    seconds = given.get("seconds", "")
    is_number = seconds.isascii() and seconds.isdigit() and len(seconds) < 10
    return checked_lifetime("expires_after", given.get("anchor"), int(seconds) if is_number else 0)


def checked_lifetime(name: str, anchor: str | None, seconds: int) -> int:
    """Seconds of a lifetime that is given in the field `name`.

    Raises:
        InvalidRequestError: it is wrong.
    """
    if anchor != "created_at":
        raise invalid_value(f"{name}.anchor", "expected 'created_at'.")
    shortest, longest = _LIFETIME_S
    if not shortest <= seconds <= longest:
        raise invalid_value(f"{name}.seconds", f"expected an integer from {shortest} to {longest}.")
    return seconds


def _check_purpose(fields: dict[str, str]) -> None:
    purpose = fields.get("purpose", "batch")
    if purpose != "batch":
        raise unsupported_value(
            "purpose",
            f"files of the purpose '{purpose[:80]}' are not kept by this gateway, only those of "
            "'batch'. Others go to an upstream, if it has one.",
        )


async def _single(body: bytes) -> AsyncIterator[bytes]:
    yield body
