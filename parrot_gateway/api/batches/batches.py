"""`/v1/batches`: batches of files that are ours; all others are the upstream's."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from parrot_gateway.api.batches.files import checked_lifetime
from parrot_gateway.api.batches.local_routes import LocalRoutes, ours
from parrot_gateway.api.pages import page_of
from parrot_gateway.batches.batch import BATCH_MARK, WINDOW, Batch
from parrot_gateway.batches.files import FILE_MARK, FileStore
from parrot_gateway.batches.folder import full_disk_refused
from parrot_gateway.batches.lines import ENDPOINTS, LineUsage
from parrot_gateway.calls.requests.call import decode
from parrot_gateway.calls.requests.types import Metadata
from parrot_gateway.exceptions import (
    InvalidRequestError,
    NotFoundError,
    invalid_value,
    missing_parameter,
    unsupported_value,
)
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.http.route_table import Query, route


class ExpiresAfter(msgspec.Struct):
    """When something is deleted."""

    anchor: str
    seconds: int


class BatchBody(msgspec.Struct):
    """The body of `POST /v1/batches`."""

    input_file_id: str | None = None
    endpoint: str | None = None
    completion_window: str | None = None
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class _Head(msgspec.Struct):
    input_file_id: Any = None


_body_decoder = msgspec.json.Decoder(BatchBody)
_head_decoder = msgspec.json.Decoder(_Head)


class BatchRoutes(LocalRoutes):
    """The routes under `/v1/batches`."""

    mark: ClassVar[str] = BATCH_MARK

    @route("POST", "/v1/batches")
    async def create(self, exchange: Exchange) -> None:
        """Begin a batch."""
        body = await exchange.body(self.max_body_bytes)
        if self.models.upstreams and not _is_ours(body):
            await self.passthrough(exchange, body)
            return
        given = decode(body, _body_decoder)
        for name in ("input_file_id", "endpoint", "completion_window"):
            if not getattr(given, name):
                raise missing_parameter(name)
        assert given.input_file_id
        assert given.endpoint
        if given.endpoint not in ENDPOINTS:
            raise unsupported_value(
                "endpoint",
                f"batches of '{given.endpoint[:80]}' are not offered by this gateway; those of "
                f"{', '.join(ENDPOINTS)} are.",
            )
        if given.completion_window != WINDOW:
            raise invalid_value("completion_window", f"expected '{WINDOW}'.")
        expires = given.output_expires_after
        lifetime_s = None
        if expires is not None:
            lifetime_s = checked_lifetime("output_expires_after", expires.anchor, expires.seconds)
        file_id = given.input_file_id
        file = self._files(file_id).find(exchange.tenant, file_id, "input_file_id")
        if file.purpose != "batch":
            raise InvalidRequestError(
                f"File '{file.id}' has the purpose '{file.purpose}', not 'batch'.",
                param="input_file_id",
            )
        with full_disk_refused():
            batch = await self.service.create(
                file, given.endpoint, metadata=given.metadata, output_lifetime_s=lifetime_s
            )
        await exchange.respond_json(self._shape(batch))

    @route("GET", "/v1/batches")
    async def list(self, exchange: Exchange) -> None:
        """List batches, newest first."""
        query = Query(exchange, "limit", "after")
        found = self.service.newest_first(exchange.tenant)
        if self.is_foreign_list(found, query):
            await self.passthrough(exchange, None)
            return
        page = page_of(found, query.text, self._shape, default_limit=20, max_limit=100)
        await exchange.respond_json(page)

    @route("GET", "/v1/batches/{batch_id}")
    @ours
    async def retrieve(self, exchange: Exchange, batch_id: str) -> None:
        """Describe a batch."""
        batch = self.service.find(exchange.tenant, batch_id)
        await exchange.respond_json(self._shape(batch))

    @route("POST", "/v1/batches/{batch_id}/cancel")
    @ours
    async def cancel(self, exchange: Exchange, batch_id: str) -> None:
        """Stop a batch."""
        await exchange.body(self.max_body_bytes)
        batch = self.service.find(exchange.tenant, batch_id)
        await self.service.cancel(batch)
        await exchange.respond_json(self._shape(batch))

    def _files(self, file_id: str) -> FileStore:
        if self.service.files is None:
            raise NotFoundError(f"No such File object: {file_id[:80]}", param="input_file_id")
        return self.service.files

    def _shape(self, batch: Batch) -> dict[str, Any]:
        completed, failed, usage = self.service.counts(batch)
        reached, has_ended = batch.reached, batch.has_ended
        errors = [msgspec.to_builtins(error) for error in batch.errors]
        return {
            "id": batch.id,
            "object": "batch",
            "endpoint": batch.endpoint,
            "model": batch.model,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": batch.input_file_id,
            "completion_window": WINDOW,
            "status": batch.status,
            "output_file_id": batch.output_file_id if has_ended else None,
            "error_file_id": batch.error_file_id if has_ended else None,
            "created_at": batch.created_at,
            "in_progress_at": reached.get("in_progress"),
            "expires_at": batch.expires_at,
            "finalizing_at": reached.get("finalizing"),
            "completed_at": reached.get("completed"),
            "failed_at": reached.get("failed"),
            "expired_at": reached.get("expired"),
            "cancelling_at": reached.get("cancelling"),
            "cancelled_at": reached.get("cancelled"),
            "request_counts": {"total": batch.total, "completed": completed, "failed": failed},
            "usage": _usage(usage),
            "metadata": batch.metadata,
        }


def _usage(usage: LineUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def _is_ours(body: bytes) -> bool:
    try:
        file_id = _head_decoder.decode(body).input_file_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(file_id, str) and file_id.startswith(FILE_MARK)
