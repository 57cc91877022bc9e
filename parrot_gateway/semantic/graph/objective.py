"""What a call is for: parsed, ordered by strength, and written out again.

    throughput  <  deadline=…  <  tpot=…  <  ttft=…  <  latency

The stronger of two leaves the scheduler less freedom: throughput leaves all of it; a deadline
leaves when, within a span; `tpot` (time per output token) leaves the beginning; `ttft` (time to
first token) fixes the beginning; latency leaves nothing. Of two of one kind the shorter time is
the stronger.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from parrot_gateway.exceptions import InvalidRequestError

Kind: TypeAlias = Literal["throughput", "deadline", "tpot", "ttft", "latency"]

#: Weakest first.
KINDS: tuple[Kind, ...] = ("throughput", "deadline", "tpot", "ttft", "latency")

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_TIMED = re.compile(r"(deadline|tpot|ttft)\s*=\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(us|ms|s|min|h)")
_LONGEST_S = 24 * 3600.0
_MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Objective:
    """One objective; `seconds` is given for the timed kinds and None for the other two."""

    kind: Kind
    seconds: float | None = None

    def __post_init__(self) -> None:
        timed = self.kind in ("deadline", "tpot", "ttft")
        if timed != (self.seconds is not None) or (self.seconds is not None and self.seconds <= 0):
            raise ValueError(f"an objective {self.kind} cannot have the time {self.seconds}")

    @property
    def strength(self) -> tuple[int, float]:
        """Larger is stronger."""
        return KINDS.index(self.kind), -(self.seconds or 0.0)

    def __str__(self) -> str:
        """As `parse_objective` reads it, in the largest unit that gives a short number."""
        if self.seconds is None:
            return self.kind
        for unit in ("h", "min", "s", "ms", "us"):
            number = f"{self.seconds / _UNITS[unit]:.9f}".rstrip("0").rstrip(".")
            if float(number) * _UNITS[unit] == self.seconds and self.seconds >= _UNITS[unit]:
                return f"{self.kind}={number}{unit}"
        return f"{self.kind}={self.seconds:.9f}".rstrip("0").rstrip(".") + "s"


THROUGHPUT = Objective("throughput")
LATENCY = Objective("latency")


def stronger(one: Objective, other: Objective) -> Objective:
    """The stronger of two; the first when they are equal."""
    return other if other.strength > one.strength else one


def parse_objective(text: str, param: str = "objective") -> Objective:
    """Read `latency`, `throughput`, `ttft=200ms`, `tpot=50ms` or `deadline=2s`.

    Units are us, ms, s, min and h; a number needs one. Case and blanks around do not matter.

    Raises:
        InvalidRequestError: anything else, no time at all, or more than a day.
    """
    plain = text.strip().lower()
    if plain == "latency":
        return LATENCY
    if plain == "throughput":
        return THROUGHPUT
    found = _TIMED.fullmatch(plain)
    if found is None:
        shown = text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
        raise InvalidRequestError(
            f"'{shown}' is no objective. Give latency, throughput, or a time with its unit: "
            "ttft=200ms, tpot=50ms, deadline=2s.",
            param=param,
            code="invalid_value",
        )
    kind: Kind = "deadline"
    if found[1] == "tpot":
        kind = "tpot"
    elif found[1] == "ttft":
        kind = "ttft"
    seconds = float(found[2]) * _UNITS[found[3]]
    if not 0 < seconds <= _LONGEST_S:
        raise InvalidRequestError(
            f"The time of '{plain}' must be more than nothing and at most a day.",
            param=param,
            code="invalid_value",
        )
    return Objective(kind, seconds)
