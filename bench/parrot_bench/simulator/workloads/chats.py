"""Chats: alone (figure 10), behind long prompts (14 to 16), beside summaries (18)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge

from parrot_bench.applications import conversations
from parrot_bench.applications.description import Passage
from parrot_bench.applications.figures import (
    COPILOT_OUTPUTS,
    COPILOT_PROMPTS,
    COPILOT_SYSTEM_TOKENS,
    GPTS,
    MIXED_CHATS,
    MIXED_SUMMARIES,
    PAPERS,
    SUMMARIES_AFTER_S,
    SUMMARY_GAPS_S,
    Gpt,
    chat_lengths,
)
from parrot_bench.simulator.plan import ApplicationPlan
from parrot_bench.simulator.workloads.base import Generator, poisson
from parrot_bench.simulator.workloads.graph import plan_of
from parrot_bench.simulator.workloads.summaries import Summaries


def chat(name: str, arrival_s: float, prompt_tokens: int, output_tokens: int) -> ApplicationPlan:
    """One call that shares nothing with any other, for somebody who waits."""
    job = conversations.chat(name, [(Passage(name, prompt_tokens), output_tokens)])
    return plan_of(job, arrival_s, tenant="chat", ttft_s=2.0, tpot_s=0.1)


@dataclass(slots=True, kw_only=True)
class Calibration(Generator):
    """Figure 10: 100 ShareGPT prompts as a Poisson process of 5 to 25 a second.

    One A100, LLaMA 13B, engine capacity 2048 to 12288 tokens; the measure is time per output
    token. Lengths: see `chat_lengths`. A chat is on time with its first token within 2 s and then
    100 ms a token.
    """

    name: str = "calibration"
    rate: float = 25.0
    count: int = 100

    def arrivals(self) -> Iterator[ApplicationPlan]:
        random = self.random()
        times = poisson(random, self.rate)
        for number in range(self.count):
            prompt, output = chat_lengths(random)
            yield chat(f"chat-{number}", next(times), self.tokens(prompt), self.tokens(output))


@dataclass(slots=True, kw_only=True)
class Copilot(Generator):
    """Figures 14 and 15: 5107 shared tokens in front of every prompt, `batch` slots in a loop.

    With `output_tokens` unset (figure 14) 64 of the 288 recorded prompts get the 64 recorded
    outputs (mean 331), at batch 8, 16, 32, 64; the shuffle is Python's, not numpy's as in the
    artifact. With `output_tokens` set (figure 15) all 288 prompts run: batch 32 with 200, 400,
    600, 800 tokens; batch 64 with 100, 200, 300, 400, 480. A slot takes the next prompt when its
    last one has ended. One A100, LLaMA 7B, no network in between.
    """

    name: str = "copilot"
    batch: int = 32
    output_tokens: int | None = None
    #: The artifact's own seed.
    seed: int = 2023

    #: Prompts that have been started.
    _started: int = field(default=0, init=False, repr=False)

    def arrivals(self) -> Iterator[ApplicationPlan]:
        self._started = min(self.batch, self._count)
        for number in range(self._started):
            yield self._plan(number, 0.0)

    def successor(self, finished: ApplicationPlan, now: float) -> ApplicationPlan | None:
        if self._started >= self._count:
            return None
        self._started += 1
        return self._plan(self._started - 1, now)

    @property
    def _count(self) -> int:
        return 64 if self.output_tokens is None else len(COPILOT_PROMPTS)

    def _plan(self, number: int, arrival_s: float) -> ApplicationPlan:
        prompts = list(COPILOT_PROMPTS)
        outputs = [length for length, count in COPILOT_OUTPUTS for _ in range(count)]
        random = self.random()
        if self.output_tokens is None:
            random.shuffle(prompts)
            random.shuffle(outputs)
        output = self.tokens(self.output_tokens or outputs[number])
        own = prompts[number] - COPILOT_SYSTEM_TOKENS
        system = Passage("system", self.tokens(COPILOT_SYSTEM_TOKENS))
        said = Passage(f"prompt {number}", self.tokens(own))
        job = conversations.question(f"user-{number}", "copilot", (system,), (said,), output)
        return plan_of(job, arrival_s)


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
        random = self.random()
        times = poisson(random, self.rate)
        # Shuffled in stretches, so that memory does not grow with `count`.
        number, left = 0, self.count // 4
        while left > 0:
            stretch = list(GPTS) * min(left, 1000)
            left -= min(left, 1000)
            random.shuffle(stretch)
            for gpt in stretch:
                yield self._plan(gpt, number, next(times))
                number += 1

    def _plan(self, gpt: Gpt, number: int, arrival_s: float) -> ApplicationPlan:
        output = self.tokens(gpt.output)
        system = Passage(gpt.name, self.tokens(gpt.system))
        query = Passage(f"query {number}", self.tokens(gpt.query))
        job = conversations.question(f"gpts-{number}", gpt.name, (system,), (query,), output)
        return plan_of(job, arrival_s, ttft_s=2.0, job_s=0.1 * output)


@dataclass(slots=True, kw_only=True)
class Mixed(Summaries):
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
    count: int = MIXED_CHATS
    #: Map-reduce applications.
    summaries: int = MIXED_SUMMARIES
    #: Factor on the gaps between them.
    gap_scale: float = 1.0
    same_paper: bool = True

    def arrivals(self) -> Iterator[ApplicationPlan]:
        yield from merge(self._chats(), self._summaries(), key=lambda plan: plan.arrival_s)

    def _chats(self) -> Iterator[ApplicationPlan]:
        random = self.random("chat")
        for number in range(self.count):
            prompt, output = chat_lengths(random)
            yield chat(
                f"chat-{number}", number / self.rate, self.tokens(prompt), self.tokens(output)
            )

    def _summaries(self) -> Iterator[ApplicationPlan]:
        now = SUMMARIES_AFTER_S * self.gap_scale
        for number in range(self.summaries):
            paper = "paper-0" if self.same_paper else f"paper-0-{number}"
            yield self.summary(f"summary-{number}", paper, PAPERS[0], now)
            now += SUMMARY_GAPS_S[number % len(SUMMARY_GAPS_S)] * self.gap_scale
