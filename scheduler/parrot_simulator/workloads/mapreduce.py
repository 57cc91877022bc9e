"""Map-reduce summaries: figure 13, and a large fleet of small ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parrot_simulator.plan import ApplicationPlan, CallPlan, Segment
from parrot_simulator.workloads.base import Generator, poisson
from parrot_simulator.workloads.documents import PAPERS, Splitter, chunks
from parrot_simulator.workloads.graph import deduced

#: Tokens around the texts, at 4 characters a token: of a map, before and after; of the reduce.
MAP = (17, 6)
REDUCE = (10, 25)
#: An application that ends within this time is on time, for goodput.
GOAL_S = 10.0


def map_reduce(
    lengths: Sequence[int], paper: str, *, name: str, arrival_s: float, output_tokens: int
) -> ApplicationPlan:
    """One application: a summary of each text, and one summary of these."""
    calls = [
        CallPlan(
            index=index,
            prompt=(
                Segment("map", MAP[0]),
                Segment(("text", paper, index), length),
                Segment("map end", MAP[1]),
            ),
            output_tokens=output_tokens,
            max_tokens=output_tokens,
            template="map",
        )
        for index, length in enumerate(lengths)
    ]
    outputs = [Segment(("output", name, call.index), output_tokens) for call in calls]
    calls.append(
        CallPlan(
            index=len(calls),
            prompt=(Segment("reduce", REDUCE[0]), *outputs, Segment("reduce end", REDUCE[1])),
            output_tokens=output_tokens,
            max_tokens=output_tokens,
            after=tuple(range(len(calls))),
            template="reduce",
        )
    )
    return ApplicationPlan(
        id=name,
        arrival_s=arrival_s,
        calls=deduced(calls),
        tenant="documents",
        kind="map-reduce",
        job_s=GOAL_S,
    )


@dataclass(slots=True, kw_only=True)
class MapReduce(Generator):
    """Figure 13: ten papers, one after the other; all maps at once, one reduce reads them all.

    One A100, LLaMA 13B. Chunk 1024 with outputs of 25, 50, 75, 100 tokens; output 50 with chunks
    of 512, 1024, 1536, 2048. See `documents` for what a chunk of 1024 is.
    """

    name: str = "map-reduce"
    chunk_tokens: int = 1024
    output_tokens: int = 50
    splitter: Splitter = "artifact"
    #: Papers, at most 10.
    count: int = 10

    def arrivals(self) -> Iterator[ApplicationPlan]:
        """The first paper; `successor` gives the others."""
        yield self._paper(0, 0.0)

    def successor(self, finished: ApplicationPlan, now: float) -> ApplicationPlan | None:
        """The next paper."""
        following = int(finished.id.rpartition("-")[2]) + 1
        return self._paper(following, now) if following < min(self.count, len(PAPERS)) else None

    def _paper(self, number: int, arrival_s: float) -> ApplicationPlan:
        lengths = chunks(PAPERS[number], self.chunk_tokens, self.splitter)
        return map_reduce(
            [self.tokens(length) for length in lengths],
            f"paper-{number}",
            name=f"paper-{number}",
            arrival_s=arrival_s,
            output_tokens=self.tokens(self.output_tokens),
        )


@dataclass(slots=True, kw_only=True)
class MapReduceFleet(Generator):
    """Many map-reduce applications over many engines, for measuring the simulator itself.

    Poisson arrivals; each has `maps` texts of 512 tokens and outputs of 50. The defaults make
    1,000,008 calls.
    """

    name: str = "mapreduce-fleet"
    rate: float = 500.0
    #: Calls in all, rounded up to whole applications.
    count: int = 1_000_000
    maps: int = 16

    def arrivals(self) -> Iterator[ApplicationPlan]:
        """Applications until there are `count` calls."""
        lengths = [self.tokens(512)] * self.maps
        times = poisson(self.random(), self.rate)
        for number in range(-(-self.count // (self.maps + 1))):
            yield map_reduce(
                lengths,
                f"text-{number}",
                name=f"fleet-{number}",
                arrival_s=next(times),
                output_tokens=self.tokens(50),
            )
