"""Four chat applications, each behind a long prompt of its own: figure 16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from parrot_scheduler.task import LATENCY

from parrot_simulator.plan import ApplicationPlan, CallPlan, Segment
from parrot_simulator.workloads.base import Generator, poisson


class Gpt(NamedTuple):
    """One of the applications: its name and lengths in tokens."""

    name: str
    system: int
    query: int
    output: int


APPLICATIONS = (
    Gpt("productivity", 7437, 7, 704),
    Gpt("image-generation", 1116, 8, 89),
    Gpt("programming", 1694, 4, 631),
    Gpt("data-analysis", 2031, 4, 416),
)


@dataclass(slots=True, kw_only=True)
class Gpts(Generator):
    """Figure 16: four applications in equal numbers, shuffled, as one Poisson process.

    System prompt, query and output in tokens: productivity 7437/7/704, image generation
    1116/8/89, programming 1694/4/631, data analysis 2031/4/416. Four A6000, LLaMA 7B; 1 to 32
    calls a second (the baseline 0.25 to 2); the measure is the mean of latency / output length.
    A call is on time with its first token within 2 s and 100 ms a token from its arrival on.
    """

    name: str = "gpts"
    rate: float = 8.0
    #: Calls, in whole fours.
    count: int = 500

    def arrivals(self) -> Iterator[ApplicationPlan]:
        """`count` calls."""
        random = self.random()
        times = poisson(random, self.rate)
        # Shuffled in stretches, so that memory does not grow with `count`.
        number, left = 0, self.count // 4
        while left > 0:
            stretch = list(APPLICATIONS) * min(left, 1000)
            left -= min(left, 1000)
            random.shuffle(stretch)
            for gpt in stretch:
                yield self._plan(gpt, number, next(times))
                number += 1

    def _plan(self, gpt: Gpt, number: int, arrival_s: float) -> ApplicationPlan:
        output = self.tokens(gpt.output)
        call = CallPlan(
            index=0,
            prompt=(
                Segment(("system", gpt.name), self.tokens(gpt.system)),
                Segment(("query", number), self.tokens(gpt.query)),
            ),
            output_tokens=output,
            max_tokens=output,
            template=gpt.name,
            objective=LATENCY,
        )
        return ApplicationPlan(
            id=f"gpts-{number}",
            arrival_s=arrival_s,
            calls=(call,),
            kind=gpt.name,
            ttft_s=2.0,
            job_s=0.1 * output,
        )
