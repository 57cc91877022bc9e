"""Messages from the gateway that the linking process has not handled yet.

Messages are read as they come, so that the gateway need not buffer them. Each tenant's messages
stay in order. Tenants take turns, so that a flood of one delays no other. Messages beyond the
limits of size and age are skipped and counted.
"""

from __future__ import annotations

import os
import select
import time
from collections import OrderedDict, deque

import msgspec

from parrot_gateway.linking.process.wire import (
    PREFIX_BYTES,
    AnswerSeen,
    ForecastsWanted,
    RequestSeen,
    ToWorker,
    Watch,
    decode_to_worker,
    length_of,
)

#: Bytes of waiting messages above which each tenant gets at most an equal share.
MAX_WAITING_BYTES = 64 * 1024 * 1024
#: Approximate size of a message besides its body.
_MESSAGE_BYTES = 256
#: A request that has waited longer is skipped; questions wait as long.
MAX_WAIT_S = 5.0
#: Bytes of one read, and reads in a row.
_READ_BYTES = 1 << 18
_MAX_READS = 16
#: Time of work on messages before the next read.
_READ_EVERY_S = 0.001
#: Time for the remaining messages after the gateway has gone.
_LAST_S = 1.0


class _Waiting:
    """Messages of one tenant, with their sizes."""

    __slots__ = ("messages", "num_bytes")

    def __init__(self) -> None:
        self.messages: deque[tuple[ToWorker, int]] = deque()
        self.num_bytes = 0


class Inbox:
    """Yields the messages of a pipe or socket one after the other.

    Attributes:
        skipped: requests and answers that were not handled.

    Args:
        source: file descriptor; made non-blocking.
        max_bytes: limit of waiting messages.
    """

    def __init__(self, source: int, max_bytes: int = MAX_WAITING_BYTES) -> None:
        os.set_blocking(source, False)
        self._source = source
        self._max_bytes = max_bytes
        self._tenants: OrderedDict[str, _Waiting] = OrderedDict()
        self._waiting_bytes = 0
        self._unread = bytearray()
        self._read_at = 0.0
        #: Time to stop, once the other end is closed.
        self._ends_at: float | None = None
        self.skipped = 0

    def next(self) -> ToWorker | None:
        """Wait for the next message; None once the other end is closed."""
        while True:
            now = time.monotonic()
            if self._ends_at is not None:
                if not self._tenants or now > self._ends_at:
                    return None
            elif not self._tenants:
                select.select([self._source], [], [])
                self._read()
            elif now - self._read_at > _READ_EVERY_S:
                self._read()
            message = self._take()
            if message is not None:
                return message

    @property
    def is_empty(self) -> bool:
        """Return true if no message that was read waits."""
        return not self._tenants

    def describe(self) -> dict[str, float]:
        """Return gauges: the waiting messages and the age of the oldest."""
        oldest = min(
            (
                message.now
                for waiting in self._tenants.values()
                for message, _ in list(waiting.messages)[:1]
                if isinstance(message, RequestSeen | AnswerSeen)
            ),
            default=None,
        )
        return {
            "waiting": sum(len(each.messages) for each in self._tenants.values()),
            "waiting_bytes": self._waiting_bytes,
            "behind_s": 0.0 if oldest is None else round(max(0.0, time.time() - oldest), 3),
            "skipped": self.skipped,
        }

    def _take(self) -> ToWorker | None:
        if not self._tenants:
            return None
        tenant, waiting = next(iter(self._tenants.items()))
        message, size = waiting.messages.popleft()
        waiting.num_bytes -= size
        self._waiting_bytes -= size
        if not waiting.messages:
            del self._tenants[tenant]
        elif len(self._tenants) > 1:
            self._tenants.move_to_end(tenant)
        if isinstance(message, RequestSeen) and time.time() - message.now > MAX_WAIT_S:
            self.skipped += 1
            return None
        return message

    def _read(self) -> None:
        self._read_at = time.monotonic()
        for _ in range(_MAX_READS):
            try:
                data = os.read(self._source, _READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                self._ends_at = time.monotonic() + _LAST_S
                break
            self._unread += data
            if len(data) < _READ_BYTES:
                break
        self._split()

    def _split(self) -> None:
        """Split the bytes read into messages."""
        view, at = memoryview(self._unread), 0
        while at + PREFIX_BYTES <= len(view):
            begin = at + PREFIX_BYTES
            end = begin + length_of(view[at:begin])
            if end > len(view):
                break
            for message in decode_to_worker(view[begin:end]):
                self._add(message)
            at = end
        view.release()
        del self._unread[:at]

    def _add(self, message: ToWorker) -> None:
        tenant = "" if isinstance(message, ForecastsWanted | Watch) else message.tenant
        size = _MESSAGE_BYTES
        if isinstance(message, RequestSeen | AnswerSeen):
            size += len(message.body)
        waiting = self._tenants.get(tenant)
        if waiting is None:
            waiting = self._tenants[tenant] = _Waiting()
        share = self._max_bytes / len(self._tenants)
        if self._waiting_bytes + size > self._max_bytes and waiting.num_bytes + size > share:
            if isinstance(message, RequestSeen):
                self.skipped += 1
                if not waiting.messages:
                    del self._tenants[tenant]
                return
            if isinstance(message, AnswerSeen):
                # The end of the call is kept even so.
                self.skipped += 1
                message = msgspec.structs.replace(message, body=b"")
                size = _MESSAGE_BYTES
        waiting.messages.append((message, size))
        waiting.num_bytes += size
        self._waiting_bytes += size
