"""Coding agents in a closed loop: contexts that grow turn by turn, with pauses for tools.

Not an experiment of the paper. Lengths and pauses follow 710 public traces of a coding agent
(callanjfox/kv-cache-tester, 49,334 calls): 69.5 turns on average (median 45.5, at most 561),
440 output tokens (median 216), prompts of 122,000 tokens on average (median 104,000) of which 97 %
are the prompt before, and 47,948 gaps between turns with a median of 10 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parrot_bench.applications.conversations import AgentLimits, agent
from parrot_bench.applications.description import Passage
from parrot_bench.applications.figures import (
    GAPS,
    SYSTEM_TOKENS,
    TASK_TOKENS,
    TURNS_MAX,
    WINDOW_TOKENS,
)
from parrot_bench.simulator.plan import ApplicationPlan
from parrot_bench.simulator.workloads.base import Generator
from parrot_bench.simulator.workloads.graph import plan_of


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
        limits = AgentLimits(
            turns=self.turns_scale,
            turns_max=self.turns_max,
            pause_max_s=self.pause_max_s,
            window=WINDOW_TOKENS,
        )
        job = agent(
            name,
            "agent",
            self.random(client, number),
            Passage("the rules of agents", self.tokens(SYSTEM_TOKENS)),
            Passage(f"task of {name}", self.tokens(TASK_TOKENS)),
            limits,
            self.scale,
        )
        return plan_of(
            job,
            arrival_s,
            max_tokens=self.tokens(limits.output_max),
            tenant=f"team-{client % 4}",
            ttft_s=self.goal_s,
        )
