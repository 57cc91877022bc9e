"""Summaries of long documents, chained (figures 11 and 12) and as map-reduce (figure 13)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge

from parrot_bench.simulator.figures import (
    CHUNK_TOKENS,
    FIRST,
    MORE_PAPERS,
    PAPERS,
    REDUCE,
    REFINE,
    SUMMARY_TOKENS,
    Splitter,
    chunks,
)
from parrot_bench.simulator.plan import ApplicationPlan, CallPlan, Segment, one_call
from parrot_bench.simulator.workloads.base import Generator, WorkloadError, poisson
from parrot_bench.simulator.workloads.graph import deduced

#: A map-reduce application that ends within this time is on time, for goodput.
GOAL_S = 10.0


def map_reduce(
    lengths: Sequence[int], paper: str, *, name: str, arrival_s: float, output_tokens: int
) -> ApplicationPlan:
    """One application: a summary of each text, and one summary of these."""
    begin, end = Segment("map", FIRST[0]), Segment("map end", FIRST[1])
    calls = [
        CallPlan(
            index=index,
            prompt=(begin, Segment(("text", paper, index), length), end),
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
class Summaries(Generator):
    """Parameters that all summaries share; see `figures` for what a chunk of 1024 is."""

    chunk_tokens: int = CHUNK_TOKENS
    output_tokens: int = SUMMARY_TOKENS
    splitter: Splitter = "artifact"

    def lengths(self, size: int) -> list[int]:
        """Tokens of the chunks of a paper of `size` bytes, with `scale` applied."""
        if self.splitter not in ("artifact", "tokens"):
            raise WorkloadError(f"splitter must be 'artifact' or 'tokens', not {self.splitter!r}")
        return [self.tokens(n) for n in chunks(size, self.chunk_tokens, self.splitter)]

    def chain(self, name: str, paper: str, size: int, arrival_s: float) -> ApplicationPlan:
        output = self.tokens(self.output_tokens)
        calls = []
        for index, length in enumerate(self.lengths(size)):
            text = Segment(("text", paper, index), length)
            prompt: tuple[Segment, ...]
            if index == 0:
                prompt = (Segment("first", FIRST[0]), text, Segment("first end", FIRST[1]))
            else:
                prompt = (
                    Segment("refine", REFINE[0]),
                    Segment(("output", name, index - 1), output),
                    Segment("refine middle", REFINE[1]),
                    text,
                    Segment("refine end", REFINE[2]),
                )
            calls.append(
                CallPlan(
                    index=index,
                    prompt=prompt,
                    output_tokens=output,
                    max_tokens=output,
                    after=(index - 1,) if index else (),
                    template="refine" if index else "first",
                )
            )
        return ApplicationPlan(
            id=name, arrival_s=arrival_s, calls=deduced(calls), tenant="chain", kind="chain"
        )

    def summary(self, name: str, paper: str, size: int, arrival_s: float) -> ApplicationPlan:
        output = self.tokens(self.output_tokens)
        return map_reduce(
            self.lengths(size), paper, name=name, arrival_s=arrival_s, output_tokens=output
        )


@dataclass(slots=True, kw_only=True)
class _PapersInTurn(Summaries):
    #: Papers of the first sample, at most 10.
    count: int = 10

    def arrivals(self) -> Iterator[ApplicationPlan]:
        yield self._paper(0, 0.0)

    def successor(self, finished: ApplicationPlan, now: float) -> ApplicationPlan | None:
        following = int(finished.id.rpartition("-")[2]) + 1
        return self._paper(following, now) if following < min(self.count, len(PAPERS)) else None

    @abstractmethod
    def _paper(self, number: int, arrival_s: float) -> ApplicationPlan: ...


@dataclass(slots=True, kw_only=True)
class ChainSummary(_PapersInTurn):
    """Figure 11: ten papers, one after the other, each summarised chunk by chunk.

    Call 0 summarises chunk 0 in one sentence, call i refines that with chunk i; the last output is
    waited for. One A100, LLaMA 13B. Chunk 1024 with outputs of 25, 50, 75, 100 tokens; output 50
    with chunks of 512, 1024, 1536, 2048.
    """

    name: str = "chain"

    def _paper(self, number: int, arrival_s: float) -> ApplicationPlan:
        return self.chain(f"paper-{number}", f"paper-{number}", PAPERS[number], arrival_s)


@dataclass(slots=True, kw_only=True)
class ChainBackground(Summaries):
    """Figure 12a: one chain (chunk 1024, output 50) beside calls that know nothing of it.

    Background calls have a prompt of 512 times the same word and 50 output tokens, and come as a
    Poisson process of 0, 1, 2, 3 or 3.5 a second from 0 s on, nobody waiting for one before the
    next; the chain starts at 3 s. One A100, LLaMA 13B, ten papers for each rate. The words are
    the same in all of them, so an engine with a prefix cache computes them once.
    """

    name: str = "chain-background"
    background_rate: float = 3.0
    #: Which of the ten papers.
    document: int = 0
    #: How long background calls keep coming.
    duration_s: float = 300.0

    def arrivals(self) -> Iterator[ApplicationPlan]:
        if self.document >= len(PAPERS):
            raise WorkloadError(f"document must be below {len(PAPERS)}, not {self.document}")
        chain = self.chain("chain-0", f"paper-{self.document}", PAPERS[self.document], 3.0)
        yield from merge(self._background(), [chain], key=lambda plan: plan.arrival_s)

    def _background(self) -> Iterator[ApplicationPlan]:
        if self.background_rate == 0:
            return
        prompt = (Segment("word", self.tokens(512)),)
        output = self.tokens(SUMMARY_TOKENS)
        for number, now in enumerate(poisson(self.random("background"), self.background_rate)):
            if now > self.duration_s:
                return
            yield one_call(
                f"background-{number}",
                now,
                prompt,
                output,
                template="word",
                tenant="background",
                kind="background",
            )


@dataclass(slots=True, kw_only=True)
class ChainClients(Summaries):
    """Figure 12b: 10, 15, 20 or 25 clients start a chain each (chunk 2048, output 50) at 0 s.

    Client i reads paper i of the second sample (30 papers, 67 kB on average). One A100, 13B.
    """

    name: str = "chain-clients"
    chunk_tokens: int = 2048
    count: int = 10

    def arrivals(self) -> Iterator[ApplicationPlan]:
        for number in range(self.count):
            size = MORE_PAPERS[number % len(MORE_PAPERS)]
            yield self.chain(f"client-{number}", f"more-{number}", size, 0.0)


@dataclass(slots=True, kw_only=True)
class MapReduce(_PapersInTurn):
    """Figure 13: ten papers, one after the other; all maps at once, one reduce reads them all.

    One A100, LLaMA 13B. Chunk 1024 with outputs of 25, 50, 75, 100 tokens; output 50 with chunks
    of 512, 1024, 1536, 2048.
    """

    name: str = "map-reduce"

    def _paper(self, number: int, arrival_s: float) -> ApplicationPlan:
        return self.summary(f"paper-{number}", f"paper-{number}", PAPERS[number], arrival_s)


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
        lengths = [self.tokens(512)] * self.maps
        times = poisson(self.random(), self.rate)
        for number in range(-(-self.count // (self.maps + 1))):
            yield map_reduce(
                lengths,
                f"text-{number}",
                name=f"fleet-{number}",
                arrival_s=next(times),
                output_tokens=self.tokens(SUMMARY_TOKENS),
            )
