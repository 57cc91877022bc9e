"""The base of all workloads: common parameters, and Poisson arrivals."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from random import Random

from parrot_bench.simulator.plan import ApplicationPlan, Workload


class WorkloadError(ValueError):
    """An unknown workload, or a parameter out of range."""


@dataclass(slots=True, kw_only=True)
class Generator(ABC):
    """A workload; its fields are its parameters.

    Deterministic: two generators with equal fields give equal plans, and `arrivals` starts anew
    each time. Numbers must be positive, whole where the default is whole; `seed` may be 0.

    Raises:
        WorkloadError: a parameter is out of range, when the generator is made.
    """

    #: As `--workload` of the command line takes it; fixed by each generator.
    name: str = ""
    seed: int = 0
    #: Factor on all lengths in tokens.
    scale: float = 1.0

    def __post_init__(self) -> None:
        for parameter in fields(self):
            value = getattr(self, parameter.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (parameter.init and is_number):
                continue
            allowed_zero = parameter.name in ZERO_ALLOWED
            if not math.isfinite(value) or value < 0 or (value == 0 and not allowed_zero):
                raise WorkloadError(
                    f"workload {self.name}: {parameter.name} must be a positive number, not {value}"
                )

    @abstractmethod
    def arrivals(self) -> Iterator[ApplicationPlan]: ...

    def successor(self, finished: ApplicationPlan, now: float) -> ApplicationPlan | None:
        """Closed loop: what comes after `finished`; an open loop has nothing."""
        return None

    def tokens(self, count: float) -> int:
        """A length with `scale` applied, at least 1."""
        return max(1, round(count * self.scale))

    def random(self, *names: object) -> Random:
        """Draws that depend on the seed and `names` alone."""
        return Random(":".join(map(str, (self.name, self.seed, *names))))


#: Parameters that may be 0.
ZERO_ALLOWED = frozenset(
    {"seed", "document", "background_rate", "flood_rate", "sessions", "spread"}
)


def poisson(random: Random, rate: float) -> Iterator[float]:
    """Times of a Poisson process of `rate` events a second, the first at its first gap."""
    now = 0.0
    while True:
        now += random.expovariate(rate)
        yield now


class Changed:
    """A workload with something changed in each of its plans."""

    def __init__(
        self, workload: Workload, change: Callable[[ApplicationPlan], ApplicationPlan]
    ) -> None:
        self.name = workload.name
        self._workload = workload
        self._change = change

    def arrivals(self) -> Iterator[ApplicationPlan]:
        return map(self._change, self._workload.arrivals())

    def successor(self, finished: ApplicationPlan, now: float) -> ApplicationPlan | None:
        plan = self._workload.successor(finished, now)
        return None if plan is None else self._change(plan)
