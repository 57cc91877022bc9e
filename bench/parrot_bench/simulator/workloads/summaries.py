"""Summaries of long documents, chained (figures 11 and 12) and as map-reduce (figure 13)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge

from parrot_bench.applications.description import Passage
from parrot_bench.applications.figures import (
    CHUNK_TOKENS,
    MORE_PAPERS,
    PAPERS,
    SUMMARY_TOKENS,
    Splitter,
    chunks,
)
from parrot_bench.applications.summaries import chain, map_reduce
from parrot_bench.simulator.plan import ApplicationPlan, Segment, one_call
from parrot_bench.simulator.workloads.base import Generator, WorkloadError, poisson
from parrot_bench.simulator.workloads.graph import plan_of

#: A map-reduce application that ends within this time is on time, for goodput.
GOAL_S = 10.0


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

    def texts(self, paper: str, size: int) -> list[Passage]:
        """The chunks of a paper of `size` bytes."""
        lengths = enumerate(self.lengths(size))
        return [Passage(paper, length, number) for number, length in lengths]

    def chain(self, name: str, paper: str, size: int, arrival_s: float) -> ApplicationPlan:
        job = chain(name, self.texts(paper, size), self.tokens(self.output_tokens))
        return plan_of(job, arrival_s, deduce=True, tenant="chain")

    def summary(self, name: str, paper: str, size: int, arrival_s: float) -> ApplicationPlan:
        job = map_reduce(name, self.texts(paper, size), self.tokens(self.output_tokens))
        return plan_of(job, arrival_s, deduce=True, tenant="documents", job_s=GOAL_S)


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
        length, output = self.tokens(512), self.tokens(SUMMARY_TOKENS)
        times = poisson(self.random(), self.rate)
        for number in range(-(-self.count // (self.maps + 1))):
            texts = [Passage(f"text-{number}", length, part) for part in range(self.maps)]
            job = map_reduce(f"fleet-{number}", texts, output)
            yield plan_of(job, next(times), deduce=True, tenant="documents", job_s=GOAL_S)
