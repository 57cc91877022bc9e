"""What linking gains: applications that declare nothing, with linking and without, and declared.

Each arm is a gateway with engines of its own, whose KV holds a given share of what a run computes.
All arms of an application stay up and run one after the other; the first in one round is the last
in the next. The same seeds give the same prompts, arrivals and pauses to all arms, which must give
the same texts. A first run of each arm is not timed: it lets linking see the application.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import msgspec

from parrot_bench.apps.arms import (
    Arm,
    Fleet,
    at_load,
    check_memory,
    differing,
    run_rounds,
    salt_of,
    start_arms,
)
from parrot_bench.apps.measure import MAX_DIFFERENCES, Plan
from parrot_bench.apps.policies import PolicyOutcome, SpeedUp, outcome, speed_ups
from parrot_bench.apps.recipes import UNDECLARED as RECIPES
from parrot_bench.apps.runner import RunResult
from parrot_bench.apps.workload import NAMED, SEMANTIC, Size, Way, Workload

#: Policies that `sessions` is compared with.
SESSION_POLICIES = ("lmetric", "prefix-linear")
#: Of an engine's KV.
_BLOCK_TOKENS = 16
#: An engine has room for so many of the longest calls.
_LEAST_CALLS = 2
#: Divide the applications' counts and lengths for a rough answer; at least two of each.
_QUICK, _QUICK_LENGTHS = 8, 2
#: Characters of which the beginnings of prompts are compared.
_PIECE = 64


@dataclass(frozen=True, slots=True)
class GainPlan:
    """What to run; see `Plan`.

    Attributes:
        engines: of each arm.
        kv_share: of the tokens of a run, each common beginning counted once, so much fits into
            the engines' KV together.
        loads: how many times as fast as by themselves applications arrive, one after the other.
        seeds: of the texts, one after the other.
        policies: further arms without linking.
        uses: further arms with linking, of which each uses one of these alone.
        quick: fewer and shorter applications, where the plan gives no number or scale.
        time_limit_s: of an application: a round that would take longer is not begun.
        settings: of the model, as in a gateway's `models`.
    """

    plan: Plan
    engines: int
    kv_share: float
    loads: Sequence[float] = (1.0,)
    seeds: Sequence[int] = (0,)
    policies: Sequence[str] = ()
    uses: Sequence[str] = ()
    quick: bool = False
    time_limit_s: float = math.inf
    settings: Mapping[str, Any] = field(default_factory=dict)

    def size(self, app: str) -> Size:
        recipe = RECIPES[app]
        count, scale = recipe.count, recipe.scale
        if self.quick:
            count, scale = max(2, count // _QUICK), scale / _QUICK_LENGTHS
        return Size(self.plan.count or count, self.plan.scale or scale)


class Saving(msgspec.Struct, frozen=True):
    """What an arm's engines did; tokens computed against those of the first in the same rounds."""

    arm: str
    #: Of a round, the medians.
    computed: float
    cached: float
    #: Cached, of all prompt tokens of all rounds.
    hit_rate: float
    #: Computed by the first arm over computed by this one: median, smallest and largest of a round.
    ratio: float
    least: float
    largest: float
    #: Share of the time of all rounds that engines spent in steps, all together.
    busy: float


class GainOutcome(msgspec.Struct, frozen=True):
    app: str
    #: What `count` counts.
    what: str
    count: int
    scale: float
    load: float
    seed: int
    engines: int
    rounds: int
    jobs: int
    calls: int
    #: Of all answers of a run.
    tokens: int
    #: Of the clients of a job, the mean.
    pauses_s: float
    #: Tokens of a run, each common beginning counted once, and tokens of all the engines' KV.
    distinct_tokens: int
    kv_tokens: int
    same_texts: bool
    #: Final texts of all rounds, and those that are not the same in all arms.
    texts: int
    different: int
    #: The first of these, if any.
    differences: list[str]
    arms: list[PolicyOutcome]
    #: Of each arm but the first against it; `against` names the arm.
    speed_ups: list[SpeedUp]
    savings: list[Saving]
    #: Counters of the linking process, by arm, at the end.
    linking: dict[str, dict[str, Any]]


def arms(app: str, policies: Sequence[str], uses: Sequence[str] = ()) -> list[Arm]:
    """All arms of an application; the others are compared with the first."""
    unlinked = {"linking": {"enabled": False}}
    # A graph cannot be declared ahead where tools run between the calls.
    declared: Way = NAMED if app in ("agents", "sessions") else SEMANTIC
    names = policies or (SESSION_POLICIES if app == "sessions" else ())
    return [
        Arm("off", "parallel", unlinked),
        Arm("linking", "parallel", {"linking": {"enabled": True}}),
        *(Arm(use, "parallel", {"linking": {"enabled": True, "use": [use]}}) for use in uses),
        Arm("declared", declared, unlinked),
        *(Arm(name, "parallel", unlinked, name) for name in names),
    ]


async def compare_linking(plan: GainPlan, progress: Callable[[str], None]) -> list[GainOutcome]:
    """Run applications (keys of `undeclared.RECIPES`) in all arms.

    Args:
        plan: what to run.
        progress: called with what is being measured.

    Raises:
        BenchmarkError: there is too little memory, a gateway did not start, or a call failed.
    """
    return [
        await _compare(app, plan, load, seed, progress)
        for app in plan.plan.apps
        for load in plan.loads
        for seed in plan.seeds
    ]


async def _compare(
    app: str, plan: GainPlan, load: float, seed: int, progress: Callable[[str], None]
) -> GainOutcome:
    recipe, rounds = RECIPES[app], plan.plan.rounds
    ends_by = time.monotonic() + plan.time_limit_s
    compared = arms(app, plan.policies, plan.uses)
    check_memory(plan.engines * len(compared))
    size = plan.size(app)
    # The first is not timed.
    workloads = [
        at_load(recipe.build(size, salt_of(app, load, seed, number)), load)
        for number in range(rounds + 1)
    ]
    distinct, longest = distinct_tokens(workloads[0], size.characters_per_token)
    blocks = math.ceil(
        max(plan.kv_share * distinct / plan.engines, _LEAST_CALLS * longest) / _BLOCK_TOKENS
    )
    settings = {"block_size": _BLOCK_TOKENS, "num_blocks": blocks, **plan.settings}
    fleet = Fleet(plan.plan.model, plan.engines, settings)
    async with AsyncExitStack() as stack:
        progress(f"{app}: starting {plan.engines} engines each for {len(compared)} gateways")
        clients = await start_arms(stack, compared, fleet)

        progress(f"{app}: first runs")
        await run_rounds(compared, clients, workloads[:1], progress, app)
        runs = await run_rounds(compared, clients, workloads[1:], progress, app, ends_by)
        linking = {name: (await client.health())["linking"] for name, client in clients.items()}
    different = differing({name: [run for run, _ in each] for name, each in runs.items()})
    workload = workloads[0]
    outcomes = [
        outcome(name, workload, [run for run, _ in each], [work for _, work in each])
        for name, each in runs.items()
    ]
    return GainOutcome(
        app=app,
        what=recipe.what,
        count=size.count,
        scale=size.scale,
        load=load,
        seed=seed,
        engines=plan.engines,
        rounds=len(outcomes[0].work),
        jobs=len(workload.jobs),
        calls=len(workload.calls),
        tokens=workload.tokens,
        pauses_s=sum(job.pauses_s for job in workload.jobs) / len(workload.jobs),
        distinct_tokens=distinct,
        kv_tokens=fleet.kv_tokens,
        same_texts=not different,
        texts=len(outcomes[0].work) * sum(len(job.finals) for job in workload.jobs),
        different=len(different),
        differences=different[:MAX_DIFFERENCES],
        arms=outcomes,
        speed_ups=gains(outcomes),
        savings=savings(
            outcomes,
            {
                name: plan.engines * sum(_duration_s(run) for run, _ in each)
                for name, each in runs.items()
            },
        ),
        linking=linking,
    )


def distinct_tokens(workload: Workload, per_token: float) -> tuple[int, int]:
    """About how many tokens a run has, each common beginning counted once, and the longest call."""
    outputs = {
        call.name: f"<{call.name}>".ljust(round(call.tokens * per_token), "·")
        for call in workload.calls
    }
    seen: set[int] = set()
    characters, longest = 0, 0
    for call in workload.calls:
        messages = call.messages(outputs.__getitem__)
        text = "\n".join(message["content"] for message in messages) + outputs[call.name]
        longest = max(longest, len(text))
        beginning = 0
        for at in range(0, len(text), _PIECE):
            beginning = hash((beginning, text[at : at + _PIECE]))
            if beginning not in seen:
                seen.add(beginning)
                characters += len(text[at : at + _PIECE])
    return round(characters / per_token), round(longest / per_token)


def gains(outcomes: Sequence[PolicyOutcome]) -> list[SpeedUp]:
    """How many times faster than the first each other is, round by round."""
    first, *others = outcomes
    return [
        msgspec.structs.replace(found, against=other.policy)
        for other in others
        for found in speed_ups([other, first])
    ]


def _duration_s(run: RunResult) -> float:
    return max(done.job.arrives_s + done.seconds for done in run.jobs)


def savings(outcomes: Sequence[PolicyOutcome], engine_s: Mapping[str, float]) -> list[Saving]:
    """What each arm's engines did.

    Args:
        outcomes: the others are compared with the first, round by round.
        engine_s: by arm, seconds that its engines had for all rounds, all together.
    """
    found = []
    for each in outcomes:
        cached = [work.cached_tokens for work in each.work]
        ratios = [
            first.prefilled_tokens / max(1, work.prefilled_tokens)
            for first, work in zip(outcomes[0].work, each.work, strict=True)
        ]
        found.append(
            Saving(
                arm=each.policy,
                computed=each.prefilled(),
                cached=median(cached),
                hit_rate=sum(cached) / max(1, sum(work.filled_tokens for work in each.work)),
                ratio=median(ratios),
                least=min(ratios),
                largest=max(ratios),
                busy=sum(work.busy_s for work in each.work) / engine_s[each.policy],
            )
        )
    return found
