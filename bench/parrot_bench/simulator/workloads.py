"""The applications of the Parrot paper, and coding agents, as plans that arrive over time.

Every workload follows from its seed. `scale` is a factor on all lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import islice
from random import Random

from parrot_bench.applications import conversations
from parrot_bench.applications.conversations import AgentLimits, agent
from parrot_bench.applications.description import Passage
from parrot_bench.applications.figures import (
    ARCHITECT,
    CODERS,
    GPTS,
    REVIEWERS,
    REVIEWS,
    REVISERS,
    SUMMARIES_AFTER_S,
    SUMMARY_GAPS_S,
    SUMMARY_TOKENS,
    SYSTEM_TOKENS,
    TASK_TOKENS,
    WINDOW_TOKENS,
    chat_lengths,
    paper_chunks,
)
from parrot_bench.applications.summaries import map_reduce
from parrot_bench.simulator.graph import deduced, plan_of
from parrot_bench.simulator.plan import ApplicationPlan, CallPlan, Segment

#: Texts of a map-reduce application, and the tokens of each.
MAPS, MAP_TOKENS = 16, 512
ROUNDS = (ARCHITECT, CODERS, *(REVIEWERS, REVISERS) * REVIEWS)


def _length(tokens: float, scale: float) -> int:
    return max(1, round(tokens * scale))


def _random(*names: object) -> Random:
    """Draws that depend on `names` alone."""
    return Random(":".join(map(str, names)))


def _poisson(random: Random, rate: float) -> Iterator[float]:
    """Times of a Poisson process of `rate` events a second, the first at its first gap."""
    now = 0.0
    while True:
        now += random.expovariate(rate)
        yield now


def gpts(rate: float, count: int, *, scale: float, seed: int) -> Iterator[ApplicationPlan]:
    """Figure 16: four applications in equal numbers, shuffled, as one Poisson process."""
    random = _random("gpts", seed)
    times = _poisson(random, rate)
    order = list(GPTS) * (count // 4)
    random.shuffle(order)
    for number, gpt in enumerate(order):
        system = Passage(gpt.name, _length(gpt.system, scale))
        query = Passage(f"query {number}", _length(gpt.query, scale))
        output = _length(gpt.output, scale)
        job = conversations.question(f"gpts-{number}", gpt.name, (system,), (query,), output)
        yield plan_of(job, next(times))


def mixed(
    rate: float, count: int, summaries: int, gap_scale: float, *, scale: float, seed: int
) -> Iterator[ApplicationPlan]:
    """Figure 18: chats one by one, evenly, and map-reduce summaries in bursts of three.

    All texts differ. `gap_scale` is a factor on the gaps between summaries.
    """

    def chats() -> Iterator[ApplicationPlan]:
        random = _random("mixed", seed, "chat")
        for number in range(count):
            prompt, output = chat_lengths(random)
            said = Passage(f"chat-{number}", _length(prompt, scale))
            job = conversations.chat(f"chat-{number}", [(said, _length(output, scale))])
            yield plan_of(job, number / rate, tenant="chat")

    def documents() -> Iterator[ApplicationPlan]:
        now = SUMMARIES_AFTER_S * gap_scale
        for number in range(summaries):
            texts = [
                Passage(f"paper-0-{number}", _length(tokens, scale), part)
                for part, tokens in enumerate(paper_chunks())
            ]
            job = map_reduce(f"summary-{number}", texts, _length(SUMMARY_TOKENS, scale))
            yield plan_of(job, now, deduce=True, tenant="documents")
            now += SUMMARY_GAPS_S[number % len(SUMMARY_GAPS_S)] * gap_scale

    return merge(chats(), documents(), key=lambda plan: plan.arrival_s)


def agents(
    count: int, pause_max_s: float, *, scale: float, seed: int, spread_s: float = 10.0
) -> Iterator[ApplicationPlan]:
    """Coding agents side by side, with a tenth of the recorded turns.

    Lengths and pauses follow 710 public traces of a coding agent (callanjfox/kv-cache-tester,
    49,334 calls): 69.5 turns on average (median 45.5, at most 561), 440 output tokens (median 216),
    prompts of 122,000 tokens on average (median 104,000) of which 97 % are the prompt before, and
    47,948 gaps between turns with a median of 10 s. Nobody knows how many turns will come.

    Args:
        count: agents; they start within `spread_s`, evenly.
        pause_max_s: longer pauses are cut to this: tools alone, where the recorded ones include
            people.
        scale: a factor on all lengths.
        seed: of the draws.
        spread_s: see `count`.
    """
    limits = AgentLimits(turns=0.1, turns_max=12, pause_max_s=pause_max_s, window=WINDOW_TOKENS)
    for number in range(count):
        name = f"agent-{number}-0"
        job = agent(
            name,
            "agent",
            _random("agents", seed, number, 0),
            Passage("the rules of agents", _length(SYSTEM_TOKENS, scale)),
            Passage(f"task of {name}", _length(TASK_TOKENS, scale)),
            limits,
            scale,
        )
        most = _length(limits.output_max, scale)
        yield plan_of(job, spread_s * number / count, max_tokens=most, tenant=f"team-{number % 4}")


def multi_agent(
    rate: float, count: int, *, scale: float, seed: int, branches: int = 8
) -> Iterator[ApplicationPlan]:
    """Figure 17, many times: an architect, coders, then reviewers and revisers four times.

    Ten rounds with a barrier after each: every agent of a round reads what the round before wrote.
    As in the paper's artifact the architect's call is made once for each branch, with the same
    prompt. Prompts of a round differ in their last few per cent only. The recorded trace repeats
    its review round with the same text; here each round's shared part is new, as it is when files
    really change. Lengths are in tokens of the model, see `figures.Round`.
    """
    times = _poisson(_random("multi-agent", seed), rate)
    for program in range(count):
        name = f"program-{program}"
        calls: list[CallPlan] = []
        previous: tuple[int, ...] = ()
        for number, current in enumerate(ROUNDS):
            factor = scale * current.llama
            shared = Segment(("round", name, number), _length(current.shared, factor))
            own = max(0, round(current.prompt * factor) - shared.tokens)
            first = len(calls)
            for branch in range(branches):
                tokens = _length(current.outputs[branch % len(current.outputs)], factor)
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
        arrival_s = next(times) if program else 0.0
        yield ApplicationPlan(name, arrival_s, deduced(calls), "agents", "multi-agent")


def map_reduces(rate: float, count: int, *, scale: float, seed: int) -> Iterator[ApplicationPlan]:
    """Figure 13, many times: documents that arrive as a Poisson process."""
    length, output = _length(MAP_TOKENS, scale), _length(SUMMARY_TOKENS, scale)
    times = _poisson(_random("mapreduce-fleet", seed), rate)
    for number, arrival_s in enumerate(islice(times, count)):
        texts = [Passage(f"text-{number}", length, part) for part in range(MAPS)]
        job = map_reduce(f"fleet-{number}", texts, output)
        yield plan_of(job, arrival_s, deduce=True, tenant="documents")
