"""What all generators of workloads share: common parameters, and draws of random lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from random import Random

from parrot_simulator.plan import ApplicationPlan


class WorkloadError(ValueError):
    """A workload was asked for that does not exist, or with a parameter that makes no sense."""


@dataclass(slots=True, kw_only=True)
class Generator:
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

    def arrivals(self) -> Iterator[ApplicationPlan]:
        """Open loop: plans in order of arrival."""
        raise NotImplementedError

    def successor(self, finished: ApplicationPlan, now: float) -> ApplicationPlan | None:
        """Closed loop: what comes after `finished`; an open loop has nothing."""
        return None

    def tokens(self, count: float) -> int:
        """A length with `scale` applied, at least 1."""
        return max(1, round(count * self.scale))

    def random(self, *names: object) -> Random:
        """Draws that depend on the seed and `names` alone."""
        return Random(":".join(map(str, (self.name, self.seed, *names))))  # noqa: S311


#: Parameters that may be 0.
ZERO_ALLOWED = frozenset({"seed", "document", "background_rate", "flood_rate", "spread"})


def poisson(random: Random, rate: float) -> Iterator[float]:
    """Times of a Poisson process of `rate` events a second, the first at its first gap."""
    now = 0.0
    while True:
        now += random.expovariate(rate)
        yield now


def lognormal(random: Random, *, mean: float, median: float) -> float:
    """A draw from the log-normal distribution with this mean and median (mean > median)."""
    sigma = math.sqrt(2.0 * math.log(mean / median))
    return random.lognormvariate(math.log(median), sigma)


def chat_lengths(random: Random) -> tuple[int, int]:
    """Prompt and output tokens of the first turn of a chat.

    The paper samples ShareGPT, which is not shipped here. These are log-normal draws with the
    means that the vLLM paper (SOSP '23, figure 11) reports for it, 161 and 338 tokens; medians
    (60 and 220) are our choice, for the long tail that both have there. Filtered as the
    benchmark scripts filter: at least 4 tokens each, prompt up to 1024, both up to 2048.
    """
    while True:
        prompt = round(lognormal(random, mean=161.0, median=60.0))
        output = round(lognormal(random, mean=338.0, median=220.0))
        if prompt >= 4 and output >= 4 and prompt <= 1024 and prompt + output <= 2048:
            return prompt, output
