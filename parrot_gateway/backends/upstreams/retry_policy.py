"""When to try an upstream again, and how long to wait before.

Pure: randomness and the wall clock are arguments. Knows statuses and headers, not connections.
The rules mirror those of the OpenAI client (`x-should-retry` first, then `retry-after-ms`, then
`retry-after`), so that a gateway in between changes who waits, not what happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

#: Statuses that mean "not now" rather than "no".
RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently.

    Attributes:
        max_retries: tries after the first.
        backoff_s: first wait; doubles with each retry.
        max_backoff_s: longest wait the gateway takes upon itself.
    """

    max_retries: int
    backoff_s: float
    max_backoff_s: float

    def wants_retry(self, status: int, headers: Mapping[str, str]) -> bool:
        """Return whether an answer with this status is to be tried again."""
        advice = headers.get("x-should-retry", "").lower()
        if advice in ("true", "false"):
            return advice == "true"
        return status in RETRIED_STATUSES

    def backoff(self, retry: int, randomness: float) -> float:
        """Seconds before retry number `retry` (from 0): exponential, less up to a quarter.

        Args:
            retry: retries already made.
            randomness: uniform in [0, 1).
        """
        ceiling = min(self.backoff_s * 2.0**retry, self.max_backoff_s)
        return ceiling * (1.0 - 0.25 * randomness)

    def delay(
        self, retry: int, headers: Mapping[str, str], randomness: float, wall_now: float
    ) -> float | None:
        """Seconds before the next try, or None when there should be none here.

        None when the retries are used up, and when the upstream names a wait longer than
        `max_backoff_s`: its answer then goes to the client, which can wait without holding a
        place here.
        """
        if retry >= self.max_retries:
            return None
        named = named_delay(headers, wall_now)
        if named is None:
            return self.backoff(retry, randomness)
        return named if named <= self.max_backoff_s else None


def named_delay(headers: Mapping[str, str], wall_now: float) -> float | None:
    """The wait that an answer names: `retry-after-ms`, else `retry-after` (seconds or a date).

    Args:
        headers: of the answer; looked up by lower-case name.
        wall_now: seconds since the epoch.
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000.0
    text = headers.get("retry-after")
    if text is None:
        return None
    seconds = _number(text)
    if seconds is not None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - wall_now)
    except (ValueError, TypeError, OverflowError):
        return None


def _number(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    # NOTE: "nan" and "inf" parse too; neither is a time to wait.
    return value if 0.0 <= value < 1e9 else None
