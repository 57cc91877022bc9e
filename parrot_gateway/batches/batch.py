"""A batch and its states. Pure: the clock is an argument, nothing waits.

    validating -> in_progress -> finalizing -> completed, expired
         |             |
         |             +-> cancelling -> cancelled
         +-> failed, cancelling

Any batch that has not ended may fail, where its files cannot be read or written.
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

#: In the ids of batches of this gateway, which an upstream's do not have.
BATCH_MARK = "batch_parrot_"
#: The one completion window that there is.
WINDOW = "24h"
WINDOW_S = 86_400

_NEXT: dict[Status, tuple[Status, ...]] = {
    "validating": ("in_progress", "cancelling", "failed"),
    "in_progress": ("finalizing", "cancelling", "failed"),
    "finalizing": ("completed", "expired", "failed"),
    "cancelling": ("cancelled", "failed"),
}


class Batch(msgspec.Struct):
    """One batch, as it is kept; times are seconds of the Unix epoch."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    #: When it came to each status.
    reached: dict[Status, int] = {}
    metadata: dict[str, str] | None = None
    #: Lifetime of its output and error files, where given.
    output_lifetime_s: int | None = None
    #: The model of its first line.
    model: str | None = None
    errors: list[LineError] = []
    total: int = 0
    #: Lines with an answer of 2xx, and others, once it has ended.
    completed: int = 0
    failed: int = 0
    usage: LineUsage = LineUsage()
    #: What finalizing leads to.
    is_late: bool = False
    #: Chosen before the files are made, so that they are made once.
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def has_ended(self) -> bool:
        """Return whether nothing of it will change."""
        return self.status not in _NEXT

    @property
    def ended_at(self) -> int:
        """When it ended; 0 before."""
        return self.reached.get(self.status, 0) if self.has_ended else 0

    def can_become(self, status: Status) -> bool:
        """Return whether this status may follow."""
        return status in _NEXT.get(self.status, ())

    def become(self, status: Status, now: float) -> None:
        """Change the status.

        Raises:
            ValueError: it cannot follow.
        """
        if not self.can_become(status):
            story = " -> ".join(["validating", *self.reached])
            raise ValueError(f"batch {self.id} cannot become {status}: {story}")
        self.status = status
        self.reached[status] = int(now)


def new_batch_id() -> str:
    return BATCH_MARK + secrets.token_hex(12)
