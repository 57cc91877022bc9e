"""Compare arms: gateways with engines of their own that run the same workload in turn.

Arms differ by the way of calling (`way_arms`), by the scheduler's policy (`policy_arms`) or by
linking (`linking_arms`). The same seeds give all arms the same prompts, arrivals and pauses, and
all have to give the same texts. Each round has a salt of its own. A first round of each application
is not timed.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean, median
from typing import Any

import msgspec

from parrot_bench.applications.description import Call, Message
from parrot_bench.apps.arms import Arm, Fleet, Work, check_memory, run_counted, start_arms
from parrot_bench.apps.measure import Summary, alternate, characters_per_token, samples_by_kind
from parrot_bench.apps.recipes import WITH_TOOLS, Recipe
from parrot_bench.apps.runner import GatewayClient, RunResult
from parrot_bench.apps.workload import NAMED, SEMANTIC, Size, Way, Workload

#: Policies that `sessions` is compared with under linking.
SESSION_POLICIES = ("lmetric", "prefix-linear")
#: Texts that differ are listed up to this number.
MAX_DIFFERENCES = 5
#: Of an engine's KV where a share of a run has to fit, and room for so many of the longest calls.
_BLOCK_TOKENS, _LEAST_CALLS = 16, 2
#: Divide the applications' counts and lengths for a rough answer; at least two of each.
_QUICK, _QUICK_LENGTHS = 8, 2
#: Characters of which the beginnings of prompts are compared.
_PIECE = 64
#: Rounds whose ratios differ by more say little.
NOISE = 0.10


def way_arms(app: str) -> list[Arm]:
    """An arm for each way of calling: ordinary clients, the best one first, semantic variables."""
    # Each call of a chain reads the one before: there parallel is one by one.
    clients: tuple[Way, ...] = ("one by one",) if app == "chain" else ("parallel", "one by one")
    return [Arm(way, way) for way in (*clients, SEMANTIC)]


def policy_arms(app: str, policies: Sequence[str]) -> list[Arm]:
    """An arm for each policy; clients use semantic variables where the application allows it."""
    way = NAMED if app in WITH_TOOLS else SEMANTIC
    return [Arm(policy, way, policy=policy) for policy in policies]


def linking_arms(app: str, policies: Sequence[str]) -> list[Arm]:
    """Plain calls without linking and with it, declared; and policies."""
    unlinked = {"linking": {"enabled": False}}
    declared: Way = NAMED if app in WITH_TOOLS else SEMANTIC
    names = policies or (SESSION_POLICIES if app == "sessions" else ())
    return [
        Arm("off", "parallel", unlinked),
        Arm("linking", "parallel", {"linking": {"enabled": True}}),
        Arm("declared", declared, unlinked),
        *(Arm(name, "parallel", unlinked, name) for name in names),
    ]


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """A comparison to run.

    Attributes:
        recipes: the applications by name.
        arms: of an application; the others are compared with the first.
        engines: of each arm.
        cold: a salt stands first in each prompt, so that every cache starts cold.
        kv_share: of the tokens of a run, each common beginning counted once, so much fits into the
            engines' KV together; None: the model's own settings.
        loads: how many times as fast as by themselves applications arrive, one after the other.
        delays_ms: simulated round trips between client and gateway, one after the other.
        seeds: of lengths, arrivals and texts; each is run in `rounds` rounds.
        quick: fewer and shorter applications, where the plan gives no number or scale.
        time_limit_s: of an application at a load: a round that would take longer is not begun.
        settings: of the model, as in a gateway's `models`.
    """

    recipes: Mapping[str, Recipe]
    arms: Callable[[str], Sequence[Arm]]
    model: str
    engines: int
    rounds: int
    count: int | None = None
    scale: float | None = None
    cold: bool = False
    kv_share: float | None = None
    loads: Sequence[float] = (1.0,)
    delays_ms: Sequence[float] = (0.0,)
    seeds: Sequence[int] = (0,)
    quick: bool = False
    time_limit_s: float = math.inf
    settings: Mapping[str, Any] = field(default_factory=dict)

    def size(self, app: str, characters_per_token: float | None = None) -> Size:
        recipe = self.recipes[app]
        count, scale = recipe.count, recipe.scale
        if self.quick:
            count, scale = max(2, count // _QUICK), scale / _QUICK_LENGTHS
        size = Size(self.count or count, self.scale or scale)
        return replace(size, characters_per_token=characters_per_token or size.characters_per_token)

    def workload(
        self, app: str, size: Size, load: float, seed: int, number: int, delay_ms: float = 0.0
    ) -> Workload:
        salt = salt_of(app, load, delay_ms, seed, number)
        built = self.recipes[app].build(replace(size, seed=seed), salt)
        return at_load(salted(built, salt) if self.cold else built, load)


class Times(msgspec.Struct, frozen=True):
    """One kind of application in one arm, over all rounds."""

    kind: str
    #: `s`, or `ms/token` where the time is counted per token of the answer.
    unit: str
    p50: float
    p99: float
    mean: float
    #: The smallest and the largest mean of a round.
    least_mean: float
    largest_mean: float
    #: Applications of all rounds together.
    jobs: int


class ArmOutcome(msgspec.Struct, frozen=True):
    arm: str
    times: list[Times]
    #: Of each round.
    work: list[Work]
    #: Share of the time of all rounds that engines spent in steps, all together.
    busy: float
    #: By kind and round, the applications' seconds (per token, where so counted).
    samples: dict[str, list[list[float]]]

    @property
    def computed(self) -> float:
        """Prompt tokens that were computed in a round, the median."""
        return median(work.prefilled_tokens for work in self.work)

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that was found in a cache."""
        filled = sum(work.filled_tokens for work in self.work)
        return sum(work.cached_tokens for work in self.work) / max(1, filled)


class Ratio(msgspec.Struct, frozen=True):
    """The first arm's figure over another's, in the same rounds: above 1 the other is better."""

    arm: str
    #: A kind of application, or `computed` for prompt tokens.
    figure: str
    #: Of all rounds together, and the smallest and the largest of a round.
    of_all: float
    least: float
    largest: float

    @property
    def is_noise(self) -> bool:
        """True if rounds differ by more than `NOISE`, or some are ahead and others behind."""
        spread = (self.largest - self.least) / self.of_all
        return spread > NOISE or self.least < 1.0 < self.largest


class Outcome(msgspec.Struct, frozen=True):
    app: str
    #: What `count` counts.
    what: str
    count: int
    scale: float
    load: float
    delay_ms: float
    #: Of each round.
    seeds: list[int]
    engines: int
    jobs: int
    calls: int
    #: Of all answers of a run.
    tokens: int
    #: Of the clients of an application, the mean.
    pauses_s: float
    #: Tokens of a run, each common beginning counted once, and tokens of all the engines' KV where
    #: that is given.
    distinct_tokens: int
    kv_tokens: int
    #: Final texts of all rounds, and those that are not the same in all arms.
    texts: int
    different: int
    #: The first of these, if any.
    differences: list[str]
    arms: list[ArmOutcome]
    ratios: list[Ratio]
    #: Counters of the linking process, by arm, at the end.
    linking: dict[str, dict[str, Any]]

    @property
    def same_texts(self) -> bool:
        return not self.different


async def compare(
    plan: ComparisonPlan, apps: Sequence[str], progress: Callable[[str], None]
) -> list[Outcome]:
    """Run applications in all arms at all loads.

    Args:
        plan: what to run.
        apps: keys of `plan.recipes`.
        progress: called with what is being measured.

    Raises:
        BenchmarkError: there is too little memory, a gateway did not start, or a call failed.
    """
    outcomes: list[Outcome] = []
    for app in apps:
        arms = plan.arms(app)
        check_memory(plan.engines * len(arms))
        async with AsyncExitStack() as stack:
            progress(f"{app}: starting {plan.engines} engines each for {len(arms)} gateways")
            fleet = Fleet(plan.model, plan.engines, _kv(plan, app) | dict(plan.settings))
            clients = await start_arms(stack, arms, fleet)
            size = plan.size(app, await characters_per_token(clients[arms[0].name]))
            first = plan.workload(app, size, plan.loads[0], plan.seeds[0], 0)
            await _run_rounds(arms, clients, [first], progress, f"{app}, not timed")
            outcomes += [
                await _compare(app, plan, arms, clients, fleet, size, load, delay_ms, progress)
                for load in plan.loads
                for delay_ms in plan.delays_ms
            ]
    return outcomes


def _kv(plan: ComparisonPlan, app: str) -> dict[str, Any]:
    """Settings of engines whose KV together holds the plan's share of a run."""
    if plan.kv_share is None:
        return {}
    size = plan.size(app)
    workload = plan.workload(app, size, plan.loads[0], plan.seeds[0], 0)
    distinct, longest = distinct_tokens(workload, size.characters_per_token)
    tokens = max(plan.kv_share * distinct / plan.engines, _LEAST_CALLS * longest)
    return {"block_size": _BLOCK_TOKENS, "num_blocks": math.ceil(tokens / _BLOCK_TOKENS)}


async def _compare(
    app: str,
    plan: ComparisonPlan,
    arms: Sequence[Arm],
    clients: Mapping[str, GatewayClient],
    fleet: Fleet,
    size: Size,
    load: float,
    delay_ms: float,
    progress: Callable[[str], None],
) -> Outcome:
    for client in clients.values():
        client.round_trip_s = delay_ms / 1000
    ends_by = time.monotonic() + plan.time_limit_s
    seeds = [*plan.seeds] * plan.rounds
    workloads = [
        plan.workload(app, size, load, seed, number, delay_ms)
        for number, seed in enumerate(seeds, 1)
    ]
    title = f"{app}, load {load:g}, {delay_ms:g} ms"
    runs = await _run_rounds(arms, clients, workloads, progress, title, ends_by)
    found = [outcome(name, workloads[0], each, plan.engines) for name, each in runs.items()]
    different = differing({name: [run for run, _ in each] for name, each in runs.items()})
    rounds = len(found[0].work)
    workload = workloads[0]
    return Outcome(
        app=app,
        what=plan.recipes[app].what,
        count=size.count,
        scale=size.scale,
        load=load,
        delay_ms=delay_ms,
        seeds=seeds[:rounds],
        engines=plan.engines,
        jobs=len(workload.jobs),
        calls=len(workload.calls),
        tokens=workload.tokens,
        pauses_s=fmean(job.pauses_s for job in workload.jobs),
        distinct_tokens=distinct_tokens(workload, size.characters_per_token)[0],
        kv_tokens=fleet.kv_tokens,
        texts=sum(len(job.finals) for each in workloads[:rounds] for job in each.jobs),
        different=len(different),
        differences=different[:MAX_DIFFERENCES],
        arms=found,
        ratios=ratios(found),
        linking={name: (await client.health())["linking"] for name, client in clients.items()},
    )


async def _run_rounds(
    arms: Sequence[Arm],
    clients: Mapping[str, GatewayClient],
    workloads: Sequence[Workload],
    progress: Callable[[str], None],
    title: str,
    ends_by: float = math.inf,
) -> dict[str, list[tuple[RunResult, Work]]]:
    ways = {arm.name: arm.way for arm in arms}

    async def run(name: str, number: int) -> tuple[RunResult, Work]:
        return await run_counted(clients[name], workloads[number], ways[name])

    return await alternate(list(ways), len(workloads), run, progress, title, ends_by=ends_by)


def outcome(
    arm: str, workload: Workload, runs: Sequence[tuple[RunResult, Work]], engines: int
) -> ArmOutcome:
    """The figures of one arm over its rounds."""
    results, work = [run for run, _ in runs], [each for _, each in runs]
    samples = samples_by_kind(workload, results)
    times = []
    for kind, rounds in samples.items():
        means = [Summary.of(workload, kind, [each]).mean for each in rounds]
        times.append(
            Times(
                kind,
                *Summary.of(workload, kind, rounds),
                least_mean=min(means),
                largest_mean=max(means),
                jobs=sum(map(len, rounds)),
            )
        )
    durations = [max(done.job.arrives_s + done.seconds for done in run.jobs) for run in results]
    busy = sum(each.busy_s for each in work) / (engines * sum(durations))
    return ArmOutcome(arm, times, work, busy, samples)


def ratios(outcomes: Sequence[ArmOutcome]) -> list[Ratio]:
    """The first arm against each other, by kind of application and by prompt tokens computed."""
    first, *others = outcomes
    found = []
    for other in others:
        for kind, rounds in first.samples.items():
            pairs = list(zip(rounds, other.samples[kind], strict=True))
            means = [fmean(ours) / fmean(theirs) for ours, theirs in pairs]
            whole = [fmean(chain.from_iterable(side)) for side in zip(*pairs, strict=True)]
            found.append(Ratio(other.arm, kind, whole[0] / whole[1], min(means), max(means)))
        tokens = [
            ours.prefilled_tokens / max(1, theirs.prefilled_tokens)
            for ours, theirs in zip(first.work, other.work, strict=True)
        ]
        whole_tokens = first.computed / max(1, other.computed)
        found.append(Ratio(other.arm, "computed", whole_tokens, min(tokens), max(tokens)))
    return found


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


def salt_of(app: str, load: float, delay_ms: float, seed: int, number: int) -> str:
    """The salt of a round at a load and a delay; all salts have one length."""
    draw = random.Random(f"{app} {load:g} {delay_ms:g} {seed} {number}")
    return f"Copy {draw.randrange(10**12):012d}."


def at_load(workload: Workload, load: float) -> Workload:
    """The workload with applications that arrive `load` times as fast."""
    jobs = tuple(replace(job, arrives_s=job.arrives_s / load) for job in workload.jobs)
    return replace(workload, jobs=jobs)


def salted(workload: Workload, salt: str) -> Workload:
    """The workload with a salt in front of each chat, so that no cache knows its prompts."""

    def with_salt(call: Call) -> Call:
        if not call.history:
            return replace(call, prompt=(f"{salt}\n", *call.prompt))
        first, *others = call.history
        opening = Message(first.role, (f"{salt}\n", *first.content))
        return replace(call, history=(opening, *others))

    jobs = tuple(replace(job, calls=tuple(map(with_salt, job.calls))) for job in workload.jobs)
    return replace(workload, jobs=jobs)


def differing(runs: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """Texts that are not the same in all arms: the call, its round, and from which character on."""
    found = []
    for number, round_ in enumerate(zip(*runs.values(), strict=True), 1):
        for jobs in zip(*(run.jobs for run in round_), strict=True):
            for name, *texts in zip(jobs[0].job.finals, *(job.texts for job in jobs), strict=True):
                if len(set(texts)) > 1:
                    at = _first_difference(texts)
                    arms = ", ".join(
                        arm for arm, text in zip(runs, texts, strict=True) if text != texts[0]
                    )
                    found.append(
                        f"{name}, round {number}: {arms} from character {at} of {len(texts[0])} on"
                    )
    return found


def _first_difference(texts: Sequence[str]) -> int:
    """The first place at which not all texts have the same character."""
    places = zip(*texts, strict=False)
    shortest = min(map(len, texts))
    return next((at for at, each in enumerate(places) if len(set(each)) > 1), shortest)


def to_dict(outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain data, derived figures included."""
    content: dict[str, Any] = msgspec.to_builtins(outcome)
    content["same_texts"] = outcome.same_texts
    for plain, arm in zip(content["arms"], outcome.arms, strict=True):
        plain |= {"computed": arm.computed, "hit_rate": arm.hit_rate}
    for plain, ratio in zip(content["ratios"], outcome.ratios, strict=True):
        plain["noise"] = ratio.is_noise
    return content
