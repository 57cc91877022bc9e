"""Agents that write a program together, as MetaGPT does: figure 17."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from parrot_bench.applications.figures import ARCHITECT, CODERS, REVIEWERS, REVIEWS, REVISERS
from parrot_bench.simulator.plan import ApplicationPlan, CallPlan, Segment
from parrot_bench.simulator.workloads.base import Generator, WorkloadError, poisson
from parrot_bench.simulator.workloads.graph import deduced

Counting: TypeAlias = Literal["recorded", "llama"]


#: Seconds for each token of the longest outputs, for goodput.
GOAL_TOKEN_S = 0.03
ROUNDS = (ARCHITECT, CODERS, *(REVIEWERS, REVISERS) * REVIEWS)


@dataclass(slots=True, kw_only=True)
class MultiAgent(Generator):
    """Figure 17: an architect, then coders, then reviewers and revisers four times.

    Ten rounds with a barrier after each: every agent of a round reads what the round before wrote.
    `branches` (4, 8, 12, 16) agents a round, branch i on file i modulo 8; as in the artifact the
    architect's call is made once for each branch, with the same prompt. Prompts of a round differ
    in their last few per cent only. The recorded trace repeats its review round with the same text;
    here each round's shared part is new, as it is when files really change, so that a prefix cache
    gains nothing from one round to the next.

    The recorded lengths were counted with another tokenizer than the model's: the artifact's own
    sums of Llama tokens (at 8 branches 33654, 42237 and 47938 for the three kinds of rounds) are
    1.23 to 1.32 times larger. `counting="llama"`, what ran, scales each round to these sums.

    One A100, LLaMA 13B, one application at a time; with `rate` and `count`, many that arrive as a
    Poisson process. An application is on time if it ends as if its rounds' longest outputs came one
    after the other at `GOAL_TOKEN_S` a token.
    """

    name: str = "multi-agent"
    branches: int = 16
    counting: Counting = "llama"
    rate: float = 0.01
    count: int = 1

    def arrivals(self) -> Iterator[ApplicationPlan]:
        if self.counting not in ("recorded", "llama"):
            raise WorkloadError(f"counting must be 'recorded' or 'llama', not {self.counting!r}")
        times = poisson(self.random(), self.rate)
        for number in range(self.count):
            yield self._plan(f"program-{number}", next(times) if number else 0.0)

    def _plan(self, name: str, arrival_s: float) -> ApplicationPlan:
        calls: list[CallPlan] = []
        previous: tuple[int, ...] = ()
        longest = 0
        for number, current in enumerate(ROUNDS):
            factor = self.scale * (current.llama if self.counting == "llama" else 1.0)
            shared = Segment(("round", name, number), max(1, round(current.shared * factor)))
            own = max(0, round(current.prompt * factor) - shared.tokens)
            first = len(calls)
            for branch in range(self.branches):
                output = current.outputs[branch % len(current.outputs)]
                tokens = max(1, round(output * factor))
                tail = (Segment(("own", name, number, branch), own),) if own else ()
                calls.append(
                    CallPlan(
                        index=len(calls),
                        prompt=(shared, *tail),
                        output_tokens=tokens,
                        max_tokens=tokens,
                        after=previous,
                        template=current.role,
                    )
                )
            previous = tuple(range(first, len(calls)))
            longest += max(call.output_tokens for call in calls[first:])
        return ApplicationPlan(
            id=name,
            arrival_s=arrival_s,
            calls=deduced(calls),
            tenant="agents",
            kind="multi-agent",
            job_s=GOAL_TOKEN_S * longest,
        )
