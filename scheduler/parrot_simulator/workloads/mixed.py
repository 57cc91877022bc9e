"""Chat beside map-reduce on the same engines: figure 18."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge

from parrot_simulator.plan import ApplicationPlan
from parrot_simulator.workloads.base import Generator, chat_lengths
from parrot_simulator.workloads.calibration import chat
from parrot_simulator.workloads.documents import PAPERS, Splitter, chunks
from parrot_simulator.workloads.mapreduce import map_reduce

#: Seconds after each start of a map-reduce application, over and over.
GAPS = (0.5, 0.5, 10.0)
#: The first application starts this much after the first chat.
LATER_S = 15.0


@dataclass(slots=True, kw_only=True)
class Mixed(Generator):
    """Figure 18: chats one by one, evenly, and map-reduce summaries in bursts of three.

    40 first turns of chats, one a second, nothing shared (lengths: `chat_lengths`); from 15 s on
    nine summaries of paper 0 (chunk 1024, output 50), with gaps of 0.5, 0.5 and 10 s, three times.
    Four A6000, LLaMA 7B, five repetitions.

    All nine read the same paper: with a prefix cache only the first pays for it. `same_paper=0`
    gives each a text of its own.
    """

    name: str = "mixed"
    rate: float = 1.0
    #: Chats.
    count: int = 40
    #: Map-reduce applications.
    summaries: int = 9
    #: Factor on the gaps between them.
    gap_scale: float = 1.0
    chunk_tokens: int = 1024
    output_tokens: int = 50
    splitter: Splitter = "artifact"
    same_paper: bool = True

    def arrivals(self) -> Iterator[ApplicationPlan]:
        """Both, in order of time."""
        yield from merge(self._chats(), self._summaries(), key=lambda plan: plan.arrival_s)

    def _chats(self) -> Iterator[ApplicationPlan]:
        random = self.random("chat")
        for number in range(self.count):
            prompt, output = chat_lengths(random)
            yield chat(
                f"chat-{number}", number / self.rate, self.tokens(prompt), self.tokens(output)
            )

    def _summaries(self) -> Iterator[ApplicationPlan]:
        now = LATER_S * self.gap_scale
        lengths = chunks(PAPERS[0], self.chunk_tokens, self.splitter)
        for number in range(self.summaries):
            yield map_reduce(
                [self.tokens(length) for length in lengths],
                "paper-0" if self.same_paper else f"paper-0-{number}",
                name=f"summary-{number}",
                arrival_s=now,
                output_tokens=self.tokens(self.output_tokens),
            )
            now += GAPS[number % len(GAPS)] * self.gap_scale
