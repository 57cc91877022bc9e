"""Prompts and answers of the latest calls in memory, if the operator wants them kept."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque

import msgspec

from parrot_gateway.settings.model import TelemetrySettings
from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.telemetry.content.content import CallContent, ReadContent

logger = logging.getLogger(__name__)

#: Maximum calls kept, however small.
MAX_KEPT = 4096
#: Maximum bytes of ended calls waiting to be read; further calls are not kept.
_MAX_PENDING_BYTES = 64 * 1024 * 1024
#: Size of an entry besides its text.
_ENTRY_BYTES = 512

_decoder = msgspec.msgpack.Decoder(ReadContent)


class KeptContent:
    """Keeps prompts and answers of calls until later ones need the room.

    Args:
        settings: limits.
    """

    def __init__(self, settings: TelemetrySettings) -> None:
        self._settings = settings
        self._pending: deque[tuple[str, CallContent]] = deque()
        self._pending_bytes = 0
        self._has_pending = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        #: By call id, oldest first; as msgpack, so that the size is known.
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self.size_bytes = 0

    def start(self) -> None:
        """Start reading ended calls."""
        self._worker = asyncio.create_task(self._work(), name="kept-content")

    async def close(self) -> None:
        """Stop keeping content."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
            self._worker = None

    def ended(self, record: CallRecord) -> None:
        """Keep the content of an ended call; a sink of `CallRecords`."""
        content = record.content
        if content is None or self._pending_bytes + content.size_bytes > _MAX_PENDING_BYTES:
            return
        self._pending_bytes += content.size_bytes
        self._pending.append((record.call_id, content))
        self._has_pending.set()

    def find(self, call_id: str) -> ReadContent | None:
        """Return a call's prompt and answer; None if they are no longer kept."""
        found = self._kept.get(call_id)
        return None if found is None else _decoder.decode(found)

    async def _work(self) -> None:
        while True:
            await self._has_pending.wait()
            call_id, content = self._pending.popleft()
            self._pending_bytes -= content.size_bytes
            if not self._pending:
                self._has_pending.clear()
            try:
                read = await content.read(self._settings.max_content_characters)
                self._keep(call_id, msgspec.msgpack.encode(read))
            except Exception:
                logger.exception("what call %s said could not be kept", call_id)
            # Yield to the tasks that answer calls.
            await asyncio.sleep(0)

    def _keep(self, call_id: str, content: bytes) -> None:
        # Replace an earlier attempt of the same call.
        self._drop(call_id)
        self._kept[call_id] = content
        self.size_bytes += len(content) + _ENTRY_BYTES
        limit = self._settings.max_content_bytes
        while self._kept and (self.size_bytes > limit or len(self._kept) > MAX_KEPT):
            self._drop(next(iter(self._kept)))

    def _drop(self, call_id: str) -> None:
        content = self._kept.pop(call_id, None)
        if content is not None:
            self.size_bytes -= len(content) + _ENTRY_BYTES
