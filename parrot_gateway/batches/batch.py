"""A batch and its states. Pure: the clock is an argument, and nothing waits.

    validating -> in_progress -> finalizing -> completed, expired
         |             |
         |             +-> cancelling -> cancelled
         +-> failed, cancelling

Every unfinished batch may also fail because its files cannot be read or written.
"""

from __future__ import annotations

import secrets
from typing import Literal, TypeAlias

import msgspec

from parrot_gateway.batches.lines import LineError, LineUsage

Status: TypeAlias = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]

#: Part of the ids of batches of this gateway, but not of those of upstreams.
BATCH_MARK = "batch_parrot_"
#: The only completion window.
WINDOW = "24h"
WINDOW_S = 86_400

_NEXT: dict[Status, tuple[Status, ...]] = {
    "validating": ("in_progress", "cancelling", "failed"),
    "in_progress": ("finalizing", "cancelling", "failed"),
    "finalizing": ("completed", "expired", "failed"),
    "cancelling": ("cancelled", "failed"),
}


class Batch(msgspec.Struct):
    """The kept state of one batch; times are seconds of the Unix epoch."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    #: Time at which it reached each status.
    reached: dict[Status, int] = {}
    metadata: dict[str, str] | None = None
    #: Lifetime of its output and error files; None for the settings'.
    output_lifetime_s: int | None = None
    #: Model of its first line.
    model: str | None = None
    errors: list[LineError] = []
    total: int = 0
    #: Lines answered with a 2xx, and all others, once the batch has ended.
    completed: int = 0
    failed: int = 0
    usage: LineUsage = LineUsage()
    #: True if finalizing leads to `expired`, false for `completed`.
    is_late: bool = False
    #: Chosen before the files are made, so that a restarted gateway makes them once.
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def has_ended(self) -> bool:
        """Return true once its state is final."""
        return self.status not in _NEXT

    @property
    def ended_at(self) -> int:
        """Time of its end; 0 before."""
        return self.reached.get(self.status, 0) if self.has_ended else 0

    def can_become(self, status: Status) -> bool:
        """Return true if `status` may follow the current one."""
        return status in _NEXT.get(self.status, ())

    def become(self, status: Status, now: float) -> None:
        """Change the status.

        Raises:
            ValueError: `status` may not follow the current one.
        """
        if not self.can_become(status):
            story = " -> ".join(["validating", *self.reached])
            raise ValueError(f"batch {self.id} cannot become {status}: {story}")
        self.status = status
        self.reached[status] = int(now)


def new_batch_id() -> str:
    return BATCH_MARK + secrets.token_hex(12)
