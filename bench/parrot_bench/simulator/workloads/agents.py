"""Coding agents in a closed loop: contexts that grow turn by turn, with pauses for tools.

Not an experiment of the paper. Lengths and pauses follow 710 public traces of a coding agent
(callanjfox/kv-cache-tester, 49,334 calls): 69.5 turns on average (median 45.5, at most 561),
440 output tokens (median 216), prompts of 122,000 tokens on average (median 104,000) of which 97 %
are the prompt before, and 47,948 gaps between turns with a median of 10 s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, log
from random import Random

from parrot_scheduler.task import LATENCY

from parrot_bench.simulator.figures import lognormal
from parrot_bench.simulator.plan import ApplicationPlan, CallPlan, Segment
from parrot_bench.simulator.workloads.base import Generator

#: Seconds, and the share of gaps that are no longer. From the recorded hazards of return (.51 in
#: the first 10 s, .50 after 5 s, .34 after 10, .18 after 20, .14 after 30, .09 after 60, .07 after
#: 300) and quantiles (75 % at 34 s, 90 % at 171 s, 95 % at 472 s). The ends, 1 s and an hour, are
#: ours; in between the logarithm of the time is interpolated.
GAPS = (
    *((1.0, 0.0), (5.0, 0.20), (10.0, 0.51), (15.0, 0.60), (20.0, 0.677), (30.0, 0.74)),
    *((34.0, 0.75), (60.0, 0.81), (120.0, 0.87), (171.0, 0.90), (300.0, 0.927), (472.0, 0.95)),
    (3600.0, 1.0),
)
TURNS_MEAN, TURNS_MEDIAN, TURNS_MAX = 69.5, 45.5, 561
OUTPUT_MEAN, OUTPUT_MEDIAN = 440.0, 216.0
#: What tools give back in a turn; with the outputs it makes prompts as long as recorded.
RESULT_MEAN, RESULT_MEDIAN = 1800.0, 700.0
#: System prompt and tools, the same for all agents; then the task.
SYSTEM_TOKENS, TASK_TOKENS = 20_000, 1_000
#: At this length an agent goes on with a summary of this many tokens.
WINDOW_TOKENS, SUMMARY_TOKENS = 400_000, 8_000


def gap_s(random: Random) -> float:
    """A pause between two turns, in seconds."""
    share = random.random()
    high = bisect_right(GAPS, share, key=lambda point: point[1])
    (t0, f0), (t1, f1) = GAPS[high - 1], GAPS[min(high, len(GAPS) - 1)]
    if f1 == f0:
        return t1
    return exp(log(t0) + (log(t1) - log(t0)) * (share - f0) / (f1 - f0))


@dataclass(slots=True, kw_only=True)
class Agents(Generator):
    """`clients` coding agents side by side; a client starts the next one when its agent has ended.

    An agent's turn reads everything before it (the shared system prompt, its task, all its
    outputs and tool results) and something new. How many turns will come is not known to anybody,
    so successors are unknown, in graph mode too. Somebody waits for each turn: its first token
    should come within `goal_s`.
    """

    name: str = "agents"
    clients: int = 32
    #: Agents in all.
    count: int = 64
    #: Agents start within this many seconds, evenly.
    spread: float = 60.0
    #: Factor on the number of turns, for short runs.
    turns_scale: float = 1.0
    #: No agent has more turns than this.
    turns_max: int = TURNS_MAX
    #: Longer pauses are cut to this: tools alone, where the recorded ones include people.
    pause_max_s: float = GAPS[-1][0]
    #: A first token is on time within this.
    goal_s: float = 10.0

    def arrivals(self) -> Iterator[ApplicationPlan]:
        for client in range(min(self.clients, self.count)):
            yield self._agent(client, 0, self.spread * client / self.clients)

    def successor(self, finished: ApplicationPlan, now: float) -> ApplicationPlan | None:
        _, client, number = finished.id.split("-")
        following = int(number) + 1
        if following * self.clients + int(client) >= self.count:
            return None
        return self._agent(int(client), following, now)

    def _agent(self, client: int, number: int, arrival_s: float) -> ApplicationPlan:
        name = f"agent-{client}-{number}"
        random = self.random(client, number)
        turns = lognormal(random, mean=TURNS_MEAN, median=TURNS_MEDIAN)
        turns = max(1, min(self.turns_max, round(min(turns, TURNS_MAX) * self.turns_scale)))
        system = Segment("agent system", self.tokens(SYSTEM_TOKENS))
        prompt = [system, Segment(("task", name), self.tokens(TASK_TOKENS))]
        length = sum(segment.tokens for segment in prompt)
        calls = []
        for index in range(turns):
            output = self.tokens(
                min(8192, lognormal(random, mean=OUTPUT_MEAN, median=OUTPUT_MEDIAN))
            )
            calls.append(
                CallPlan(
                    index=index,
                    prompt=tuple(prompt),
                    output_tokens=output,
                    max_tokens=max(output, self.tokens(8192)),
                    after=(index - 1,) if index else (),
                    pause_s=min(gap_s(random), self.pause_max_s) if index else 0.0,
                    template="agent",
                    objective=LATENCY,
                )
            )
            result = self.tokens(
                min(25_000, lognormal(random, mean=RESULT_MEAN, median=RESULT_MEDIAN))
            )
            prompt += [
                Segment(("output", name, index), output),
                Segment(("result", name, index), result),
            ]
            length += output + result
            if length > self.tokens(WINDOW_TOKENS):
                summary = Segment(("summary", name, index), self.tokens(SUMMARY_TOKENS))
                prompt = [system, summary]
                length = system.tokens + summary.tokens
        return ApplicationPlan(
            id=name,
            arrival_s=arrival_s,
            calls=tuple(calls),
            tenant=f"team-{client % 4}",
            kind="agent",
            ttft_s=self.goal_s,
        )
