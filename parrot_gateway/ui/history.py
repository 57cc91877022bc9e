"""Calls for the live page: running ones, the latest ended ones, and sums.

It is always on, with an entry per ended call, so that the page shows what happened before it was
opened.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from parrot_gateway.telemetry.call_record import CallRecord, CallRecords

#: Maximum ended calls remembered; the oldest is forgotten first.
MAX_ENDED = 4096
#: Tenants with sums of their own; further ones are summed together.
_MAX_TENANTS = 1000
_OTHERS = "(others)"
#: Fields of a record that are remembered: all except its trace and sinks.
_REMEMBERED = CallRecord.__struct_fields__.index("trace")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


@dataclass(slots=True)
class Tokens:
    """Token sums over calls with known usage."""

    prompt: int = 0
    cached: int = 0
    output: int = 0

    def count(self, record: CallRecord) -> None:
        self.prompt += record.prompt_tokens or 0
        self.cached += record.cached_tokens or 0
        self.output += record.output_tokens or 0

    def add(self, other: Tokens) -> None:
        self.prompt += other.prompt
        self.cached += other.cached
        self.output += other.output

    def to_dict(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt,
            "cached_tokens": self.cached,
            "output_tokens": self.output,
        }


@dataclass(slots=True)
class _Tenant:
    calls: int
    errors: int
    tokens: Tokens


class CallHistory:
    """The records of calls, as the live page reads them.

    Args:
        records: of the gateway's calls.
        is_queued: returns true for a call that waits for an engine.
    """

    def __init__(self, records: CallRecords, is_queued: Callable[[CallRecord], bool]) -> None:
        self._records = records
        self.is_queued = is_queued
        # NOTE: packed, in a third of the memory. As objects they would cost 5 % of each call's
        # time: a new object reuses the oldest one's memory, which is no longer in any cache.
        self._ended: OrderedDict[str, bytes] = OrderedDict()
        self._tenants: dict[str, _Tenant] = {}
        self._placements: Counter[str] = Counter()
        self._follower: Callable[[CallRecord], None] | None = None
        records.batch_sinks.append(self._take)

    def follow(self, follower: Callable[[CallRecord], None] | None) -> None:
        """Give `follower` each record soon after its call has ended, at the latest at the next read
        here; None ends that.
        """
        self._follower = follower

    def live(self) -> dict[str, CallRecord]:
        """Return the unended calls by id, oldest first."""
        self._records.settle()
        return {record.call_id: record for record in self._records.live()}

    def ended(self, call_id: str) -> CallRecord | None:
        """Return an ended call, if it is remembered."""
        self._records.settle()
        packed = self._ended.get(call_id)
        return None if packed is None else _unpacked(packed)

    def all_ended(self) -> Iterator[CallRecord]:
        """Return the remembered ended calls, oldest first."""
        self._records.settle()
        return map(_unpacked, list(self._ended.values()))

    def find(self, name: str) -> CallRecord | None:
        """Return a call by its id or its request's id."""
        live = self.live()
        found = live.get(name) or self.ended(name)
        if found is None and name.startswith("req_"):
            part = name.encode()
            ended = (_unpacked(each) for each in self._ended.values() if part in each)
            everything = chain(live.values(), ended)
            found = next((each for each in everything if each.request_id == name), None)
        return found

    def placements(self) -> dict[str, int]:
        """Count ended calls by the reason of their placement."""
        self._records.settle()
        return dict(self._placements)

    def tenants(self) -> list[dict[str, Any]]:
        """Return TenantViews: usage since the start, and running calls."""
        self._records.settle()
        running = Counter(record.tenant for record in self._records.live())
        return [
            {
                "tenant": name,
                "calls": known.calls if known else 0,
                "running": running[name],
                **(known.tokens if known else Tokens()).to_dict(),
                "errors": known.errors if known else 0,
            }
            for name in {**self._tenants, **running}
            for known in [self._tenants.get(name)]
        ]

    def _take(self, records: Sequence[CallRecord]) -> None:
        for record in records:
            values = msgspec.structs.astuple(record)[:_REMEMBERED]
            self._ended[record.call_id] = _encoder.encode(values)
            tenant = self._tenants.get(record.tenant)
            if tenant is None:
                name = record.tenant if len(self._tenants) < _MAX_TENANTS else _OTHERS
                tenant = self._tenants.setdefault(name, _Tenant(0, 0, Tokens()))
            tenant.calls += 1
            tenant.errors += record.error_code is not None
            tenant.tokens.count(record)
            if record.reason is not None:
                self._placements[record.reason] += 1
            if self._follower is not None:
                self._follower(record)
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)


def _unpacked(packed: bytes) -> CallRecord:
    return CallRecord(*_decoder.decode(packed))
