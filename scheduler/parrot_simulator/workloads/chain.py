"""Chain summaries: figures 11 (one at a time), 12a (beside other calls) and 12b (many clients)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge

from parrot_scheduler.task import LATENCY

from parrot_simulator.plan import ApplicationPlan, CallPlan, Segment
from parrot_simulator.workloads.base import Generator, WorkloadError, poisson
from parrot_simulator.workloads.documents import (
    MORE_PAPERS,
    PAPERS,
    Splitter,
    chunks,
)
from parrot_simulator.workloads.graph import deduced

#: Tokens of the prompts around the texts, counted at 4 characters a token: "Write an one-sentence
#: summary …:", "CONCISE SUMMARY:"; before, between and after the texts of the refining prompt.
FIRST = (17, 6)
REFINE = (37, 28, 32)


@dataclass(slots=True, kw_only=True)
class _Summaries(Generator):
    #: Parameters that the chain experiments share.
    chunk_tokens: int = 1024
    output_tokens: int = 50
    splitter: Splitter = "artifact"

    def _chain(self, name: str, paper: str, size: int, arrival_s: float) -> ApplicationPlan:
        output = self.tokens(self.output_tokens)
        calls = []
        for index, length in enumerate(chunks(size, self.chunk_tokens, self.splitter)):
            text = Segment(("text", paper, index), self.tokens(length))
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


@dataclass(slots=True, kw_only=True)
class ChainSummary(_Summaries):
    """Figure 11: ten papers, one after the other, each summarised chunk by chunk.

    Call 0 summarises chunk 0 in one sentence, call i refines that with chunk i; the last output is
    waited for. One A100, LLaMA 13B. Chunk 1024 with outputs of 25, 50, 75, 100 tokens; output 50
    with chunks of 512, 1024, 1536, 2048. See `documents` for what a chunk of 1024 is.
    """

    name: str = "chain"
    #: Papers of the first sample, at most 10.
    count: int = 10

    def arrivals(self) -> Iterator[ApplicationPlan]:
        """The first paper; `successor` gives the others."""
        yield self._paper(0, 0.0)

    def successor(self, finished: ApplicationPlan, now: float) -> ApplicationPlan | None:
        """The next paper."""
        following = int(finished.id.rpartition("-")[2]) + 1
        return self._paper(following, now) if following < min(self.count, len(PAPERS)) else None

    def _paper(self, number: int, arrival_s: float) -> ApplicationPlan:
        return self._chain(f"paper-{number}", f"paper-{number}", PAPERS[number], arrival_s)


@dataclass(slots=True, kw_only=True)
class ChainBackground(_Summaries):
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
        """Background calls, and the chain at 3 s."""
        if self.document >= len(PAPERS):
            raise WorkloadError(f"document must be below {len(PAPERS)}, not {self.document}")
        chain = self._chain("chain-0", f"paper-{self.document}", PAPERS[self.document], 3.0)
        yield from merge(self._background(), [chain], key=lambda plan: plan.arrival_s)

    def _background(self) -> Iterator[ApplicationPlan]:
        if self.background_rate == 0:
            return
        prompt = (Segment("word", self.tokens(512)),)
        output = self.tokens(50)
        for number, now in enumerate(poisson(self.random("background"), self.background_rate)):
            if now > self.duration_s:
                return
            call = CallPlan(
                index=0,
                prompt=prompt,
                output_tokens=output,
                max_tokens=output,
                template="word",
                objective=LATENCY,
            )
            yield ApplicationPlan(
                id=f"background-{number}",
                arrival_s=now,
                calls=(call,),
                tenant="background",
                kind="background",
            )


@dataclass(slots=True, kw_only=True)
class ChainClients(_Summaries):
    """Figure 12b: 10, 15, 20 or 25 clients start a chain each (chunk 2048, output 50) at 0 s.

    Client i reads paper i of the second sample (30 papers, 67 kB on average). One A100, 13B.
    """

    name: str = "chain-clients"
    chunk_tokens: int = 2048
    count: int = 10

    def arrivals(self) -> Iterator[ApplicationPlan]:
        """All at once."""
        for number in range(self.count):
            size = MORE_PAPERS[number % len(MORE_PAPERS)]
            yield self._chain(f"client-{number}", f"more-{number}", size, 0.0)
