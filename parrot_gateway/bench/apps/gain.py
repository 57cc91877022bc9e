"""What linking gains: applications that declare nothing, with linking and without, and declared.

Each arm is a gateway with engines of its own, whose KV holds a given share of what a run computes.
All arms of an application stay up and run one after the other; the first in one round is the last
in the next. The same seeds give the same prompts, arrivals and pauses to all arms, which must give
the same texts. A first run of each arm is not timed: it lets linking see the application.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from parrot_gateway.bench.apps.measure import Plan, alternate
from parrot_gateway.bench.apps.policies import (
    PolicyOutcome,
    SpeedUp,
    Work,
    check_memory,
    outcome,
    run_counted,
    speed_ups,
)
from parrot_gateway.bench.apps.runner import GatewayClient, RunResult
from parrot_gateway.bench.apps.undeclared import RECIPES
from parrot_gateway.bench.apps.workload import NAMED, SEMANTIC, Size, Way, Workload
from parrot_gateway.bench.servers import Server, start_gateway

#: Policies that `sessions` is compared with.
SESSION_POLICIES = ("lmetric", "prefix-linear")
#: Engines report so often: each run waits for a report.
_HEARTBEAT_S = 0.5
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
        load: how many times as fast as by themselves applications arrive.
        seed: of the texts.
        policies: further arms without linking.
        uses: further arms with linking, of which each uses one of these alone.
        quick: fewer and shorter applications, where the plan gives no number or scale.
        time_limit_s: of an application: a round that would take longer is not begun.
    """

    plan: Plan
    engines: int
    kv_share: float
    load: float = 1.0
    seed: int = 0
    policies: Sequence[str] = ()
    uses: Sequence[str] = ()
    quick: bool = False
    time_limit_s: float = math.inf

    def size(self, app: str) -> Size:
        recipe = RECIPES[app]
        count, scale = recipe.count, recipe.scale
        if self.quick:
            count, scale = max(2, count // _QUICK), scale / _QUICK_LENGTHS
        return Size(self.plan.count or count, self.plan.scale or scale)


@dataclass(frozen=True, slots=True)
class Arm:
    """One gateway and one kind of client."""

    name: str
    way: Way
    settings: dict[str, Any] = field(default_factory=dict)
    policy: str = "parrot"


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
    return [await _compare(app, plan, progress) for app in plan.plan.apps]


async def _compare(app: str, plan: GainPlan, progress: Callable[[str], None]) -> GainOutcome:
    recipe, rounds = RECIPES[app], plan.plan.rounds
    ends_by = time.monotonic() + plan.time_limit_s
    compared = arms(app, plan.policies, plan.uses)
    check_memory(plan.engines * len(compared))
    size = plan.size(app)
    # The first is not timed.
    workloads = [
        _at_load(recipe.build(size, _salt(app, plan.seed, number)), plan.load)
        for number in range(rounds + 1)
    ]
    distinct, longest = distinct_tokens(workloads[0], size.characters_per_token)
    blocks = math.ceil(
        max(plan.kv_share * distinct / plan.engines, _LEAST_CALLS * longest) / _BLOCK_TOKENS
    )
    async with AsyncExitStack() as stack:
        progress(f"{app}: starting {plan.engines} engines each for {len(compared)} gateways")
        clients = await _start(stack, plan, compared, blocks)

        async def run(name: str, number: int) -> tuple[RunResult, Work]:
            way = next(arm.way for arm in compared if arm.name == name)
            return await run_counted(clients[name], workloads[number], way, forget_jobs=True)

        for arm in compared:
            progress(f"{app}: a first run, {arm.name}")
            await run(arm.name, 0)
        runs = await alternate(
            [arm.name for arm in compared],
            rounds,
            lambda name, number: run(name, number + 1),
            progress,
            app,
            ends_by=ends_by,
        )
        linking = {name: (await client.health())["linking"] for name, client in clients.items()}
    texts = [
        {tuple(job.texts for job in run.jobs) for run, _ in round_}
        for round_ in zip(*runs.values(), strict=True)
    ]
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
        load=plan.load,
        seed=plan.seed,
        engines=plan.engines,
        rounds=len(texts),
        jobs=len(workload.jobs),
        calls=len(workload.calls),
        tokens=workload.tokens,
        pauses_s=sum(job.pauses_s for job in workload.jobs) / len(workload.jobs),
        distinct_tokens=distinct,
        kv_tokens=plan.engines * blocks * _BLOCK_TOKENS,
        same_texts=all(len(each) == 1 for each in texts),
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


async def _start(
    stack: AsyncExitStack, plan: GainPlan, compared: Sequence[Arm], blocks: int
) -> dict[str, GatewayClient]:
    """Gateways of all arms, started together, by the arms' names; `stack` ends them."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-linking-")))
    model = {"model": plan.plan.model, "engines": plan.engines}
    model |= {"block_size": _BLOCK_TOKENS, "num_blocks": blocks}

    async def start(arm: Arm) -> Server:
        config = folder / f"{arm.name}.yaml"
        settings = {"models": [model], "engines": {"heartbeat_s": _HEARTBEAT_S}, **arm.settings}
        # JSON is YAML too.
        config.write_bytes(msgspec.json.encode(settings))
        arguments = ("--config", str(config), "--policy", arm.policy)
        server = await start_gateway(*arguments, name=arm.name)
        stack.push_async_callback(server.stop)
        return server

    started = await asyncio.gather(*map(start, compared), return_exceptions=True)
    clients = {}
    for arm, server in zip(compared, started, strict=True):
        if isinstance(server, BaseException):
            raise server
        client = GatewayClient(server.url, plan.plan.model)
        clients[arm.name] = await stack.enter_async_context(client)
    return clients


def _salt(app: str, seed: int, number: int) -> str:
    draw = random.Random(f"{app} {seed} {number}")  # noqa: S311 - a workload, not a secret
    return f"Copy {draw.randrange(10**12):012d}."


def _at_load(workload: Workload, load: float) -> Workload:
    jobs = tuple(replace(job, arrives_s=job.arrives_s / load) for job in workload.jobs)
    return replace(workload, jobs=jobs)


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
