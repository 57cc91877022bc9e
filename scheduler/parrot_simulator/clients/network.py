"""The way between clients and the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """Round trips between clients and the server: uniform between two times, or from samples."""

    low_s: float = 0.0
    high_s: float = 0.0
    samples_s: Sequence[float] = ()

    def __post_init__(self) -> None:
        times = (self.low_s, self.high_s, *self.samples_s)
        if not all(0 <= time < float("inf") for time in times) or self.low_s > self.high_s:
            raise ValueError(
                f"network: round trips must be finite, >= 0 and low <= high, not {times[:2]}"
            )

    @property
    def varies(self) -> bool:
        """Whether round trips differ."""
        return bool(self.samples_s) or self.low_s < self.high_s

    def round_trip_s(self, where: float) -> float:
        """The round trip at a place of [0, 1)."""
        if self.samples_s:
            return self.samples_s[int(where * len(self.samples_s))]
        return self.low_s + (self.high_s - self.low_s) * where
