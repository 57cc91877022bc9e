"""What the live page knows of single calls: those that run, the latest ended ones, and sums.

Always on, as the page shall show what was before it was opened: one entry for each ended call.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parrot_gateway.telemetry.call_record import CallRecord, CallRecords

#: Ended calls that are remembered; the oldest is forgotten first.
MAX_ENDED = 4096
#: Tenants whose sums are kept; further ones are summed up together.
_MAX_TENANTS = 1000
_OTHERS = "(others)"


@dataclass(slots=True)
class Tokens:
    """Sums over calls whose usage is known."""

    prompt: int = 0
    cached: int = 0
    output: int = 0

    def add(self, record: CallRecord) -> None:
        self.prompt += record.prompt_tokens or 0
        self.cached += record.cached_tokens or 0
        self.output += record.output_tokens or 0

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

    Attributes:
        placements: how many calls ended, by why they ran where they did.
    """

    def __init__(self, records: CallRecords) -> None:
        self._records = records
        self._ended: OrderedDict[str, CallRecord] = OrderedDict()
        self._tenants: dict[str, _Tenant] = {}
        self.placements: Counter[str] = Counter()
        self._follower: Callable[[CallRecord], None] | None = None
        records.sinks.append(self._end)

    def follow(self, follower: Callable[[CallRecord], None] | None) -> None:
        """Let `follower` have each record when its call has ended; None ends that."""
        self._follower = follower

    def live(self) -> dict[str, CallRecord]:
        """The calls that have not ended, by id, oldest first."""
        return {record.call_id: record for record in self._records.live()}

    def ended(self, call_id: str) -> CallRecord | None:
        """A call that has ended, if it is remembered."""
        return self._ended.get(call_id)

    def all_ended(self) -> list[CallRecord]:
        """The ended calls that are remembered, oldest first."""
        return list(self._ended.values())

    def find(self, name: str) -> CallRecord | None:
        """A call by its id or that of its request."""
        live = self.live()
        found = live.get(name) or self._ended.get(name)
        if found is None and name.startswith("req_"):
            everything = (*live.values(), *self._ended.values())
            found = next((each for each in everything if each.request_id == name), None)
        return found

    def tenants(self) -> list[dict[str, Any]]:
        """TenantViews: usage since the start, and what runs."""
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

    def _end(self, record: CallRecord) -> None:
        self._ended[record.call_id] = record
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        tenant = self._tenants.get(record.tenant)
        if tenant is None:
            name = record.tenant if len(self._tenants) < _MAX_TENANTS else _OTHERS
            tenant = self._tenants.setdefault(name, _Tenant(0, 0, Tokens()))
        tenant.calls += 1
        tenant.errors += record.error_code is not None
        tenant.tokens.add(record)
        if record.reason is not None:
            self.placements[record.reason] += 1
        if self._follower is not None:
            self._follower(record)
