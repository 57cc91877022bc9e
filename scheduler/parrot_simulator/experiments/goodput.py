"""Goodput: the highest load at which applications still meet their objectives.

As the field uses the word: of the applications of every kind at least `SHARE` meet all bounds that
they have. What differs between arms is how much load that allows. Loads are steps of a geometric
grid, the same for all arms; the search assumes that what holds at a load holds below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from parrot_simulator.experiments.definitions import MODERN, OURS, RECORDED, VARIANTS, Arm
from parrot_simulator.experiments.fleet import GOODPUT, mixed_load
from parrot_simulator.experiments.runner import Plain, run_arm
from parrot_simulator.metrics import Results
from parrot_simulator.plan import ApplicationPlan, Workload
from parrot_simulator.profiles import DEFAULT_PROFILE
from parrot_simulator.workloads import Changed, build

#: Of the applications of each kind, how many have to meet their objective.
SHARE = 0.9
#: Steps of the grid of loads for a factor of two: neighbours are 9 % apart.
STEPS = 8
#: Loads that the search begins with are this many steps apart, before it halves what is between.
STRIDE = 4
#: Steps below and above a case's first load at which the search gives up.
LOWEST, HIGHEST = -24, 32


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an application has to meet; None: any."""

    #: Seconds to the first token, of the slowest call; seconds a token after it, on average.
    ttft_s: float | None = None
    tpot_s: float | None = None
    #: The whole application, in times of what it takes on the empty fleet of the modern baseline.
    times_alone: float | None = None
    why: str = ""


_PERSON = Bounds(
    ttft_s=2.0,
    tpot_s=0.05,
    why="A person reads along: 50 ms a token is 20 tokens/s, well above reading speed, and 2 s is "
    "about what one waits for an answer to begin.",
)
_JOB = Bounds(
    times_alone=3.0,
    why="Somebody waits for the whole result only. Three times as long as with nobody else there, "
    "on the baseline's fleet, so that a faster arm gets no tighter bound.",
)
_TURN = Bounds(
    ttft_s=5.0,
    tpot_s=0.05,
    why="Each turn's first token within what filling a context of 186,000 tokens anew takes (26.8 "
    "us a token): a context may be lost, but not wait besides. Tokens as for a person.",
)

#: Bounds by kind of application. Fixed before any search was run.
OBJECTIVES: Mapping[str, Bounds] = {
    "multi-agent": _JOB,
    "map-reduce": _JOB,
    "chat": _PERSON,
    "productivity": _PERSON,
    "image-generation": _PERSON,
    "programming": _PERSON,
    "data-analysis": _PERSON,
    "agent": _TURN,
}


@dataclass(frozen=True, slots=True)
class GoodputCase:
    """A workload whose load is searched."""

    workload: str
    #: What the load counts.
    unit: str
    parameters: Callable[[float], Mapping[str, str | float]]
    #: Where the search of the first arm begins; others begin where the one before them ended.
    first: float
    #: The workload with one application of each kind, for `Bounds.times_alone`.
    alone: Mapping[str, str | float] = field(default_factory=dict)
    engines: int = 4
    #: Of `PROFILES`.
    profile: str = DEFAULT_PROFILE
    #: Baselines besides `ARMS`.
    more: tuple[Arm, ...] = ()
    note: str = ""


#: The first is what the others are compared with.
ARMS: tuple[Arm, ...] = (MODERN[0], MODERN[2], VARIANTS[0], OURS)
BASELINE = ARMS[0]
#: A baseline whose operator trades speed of prompts for steady decoding; shown where prompts of
#: many tokens are filled beside decodes whose time is bounded.
_SMALL_CHUNKS = Arm("LMetric, chunks of 2048", "lmetric", engine={"max_batch_tokens": 2048})

#: Short horizons, so that all searches together take some minutes: a load a little beyond what
#: engines can do in the long run may pass. That is so for every arm.
CASES: tuple[GoodputCase, ...] = (
    GoodputCase(
        "multi-agent",
        "jobs/s",
        lambda load: {"branches": 8, "rate": load, "count": max(1, round(120 * load))},
        first=0.4,
        alone={"branches": 8, "count": 1},
        note="8 branches, arrivals for 120 s",
    ),
    GoodputCase(
        "gpts",
        "calls/s",
        lambda load: {"rate": load, "count": max(4, round(30 * load))},
        first=50.0,
        note="arrivals for 30 s",
    ),
    GoodputCase(
        "mixed",
        "times 30 chats/s and 1.09 summaries/s",
        mixed_load,
        first=2.0,
        alone={**mixed_load(1.0), "count": 1, "summaries": 1},
        more=(_SMALL_CHUNKS,),
        note="arrivals for 30 s",
    ),
    GoodputCase(
        "agents",
        "agents at once",
        lambda load: {
            "clients": max(1, round(load)),
            "count": max(1, round(load)),
            "turns_scale": 0.2,
            "turns_max": 40,
            "pause_max_s": 60,
        },
        first=48.0,
        engines=1,
        more=(_SMALL_CHUNKS,),
        note="a fifth of the recorded turns, pauses of at most 60 s",
    ),
)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found: the highest step that passes, and the lowest seen to fail.

    `passed` is None when nothing passed, `failed` when nothing failed.
    """

    passed: int | None
    failed: int | None
    runs: int


def search(
    passes: Callable[[int], bool],
    start: int,
    *,
    lowest: int = LOWEST,
    highest: int = HIGHEST,
    stride: int = STRIDE,
    finest: int = 1,
) -> SearchResult:
    """The highest step in `lowest` to `highest` that passes, where all below it pass too.

    Goes from `start` in strides until one passes and one fails, then halves what is between them
    until they are `finest` apart: at most (highest - lowest) / stride + log2(stride) + 2 runs.

    Raises:
        ValueError: `start` is out of range, or a stride is below 1.
    """
    if not lowest <= start <= highest or stride < 1 or finest < 1:
        raise ValueError(f"cannot search from {start} in {lowest} to {highest} by {stride}")
    passed: int | None = None
    failed: int | None = None
    runs, step = 0, start
    while True:
        runs += 1
        passed, failed = (step, failed) if passes(step) else (passed, step)
        if failed is None and step < highest:
            step = min(highest, step + stride)
        elif passed is None and step > lowest:
            step = max(lowest, step - stride)
        elif passed is not None and failed is not None and failed - passed > finest:
            step = (passed + failed) // 2
        else:
            return SearchResult(passed, failed, runs)


@dataclass(frozen=True, slots=True)
class GoodputResult(Plain):
    workload: str
    unit: str
    arm: str
    runs: int
    #: Highest load that passed and the next one of the grid, which failed; None: none did.
    load: float | None = None
    beyond: float | None = None
    #: Share of applications of the worst kind that met their objective, at both loads.
    share: float | None = None
    share_beyond: float | None = None
    #: The worst kind at `beyond`: what limits the arm.
    limit: str | None = None
    #: `load` over that of `BASELINE`.
    ratio: float | None = None


def run(
    case: GoodputCase,
    *,
    seeds: int = 1,
    finest: int = 1,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[GoodputResult]:
    """The goodput of each arm, that of `BASELINE` first.

    Args:
        case: What to run.
        seeds: Runs at each load; a kind's share is the mean over them.
        finest: Steps of the grid between what passes and what fails at the end.
        progress: Called before each load.
    """
    bounds = jobs_alone(case)
    start, base = 0, None
    for arm in (*ARMS, *case.more):
        shares: dict[int, tuple[float, str]] = {}

        def passes(
            step: int, arm: Arm = arm, shares: dict[int, tuple[float, str]] = shares
        ) -> bool:
            load = load_of(case, step)
            progress(f"{GOODPUT}, {case.workload}, {load:.3g} {case.unit}: {arm.name}")
            shares[step] = _worst([run_once(case, arm, load, bounds, s) for s in range(seeds)])
            return shares[step][0] >= SHARE

        level = search(passes, start, finest=finest)
        result = GoodputResult(case.workload, case.unit, arm.name, level.runs)
        if level.failed is not None:
            share, limit = shares[level.failed]
            beyond = load_of(case, level.failed)
            result = replace(result, beyond=beyond, share_beyond=share, limit=limit)
        if level.passed is not None:
            start = level.passed
            load = load_of(case, start)
            base = load if arm is BASELINE else base
            result = replace(result, load=load, share=shares[start][0])
            result = replace(result, ratio=load / base if base else None)
        yield result


def load_of(case: GoodputCase, step: int) -> float:
    return float(case.first * 2.0 ** (step / STEPS))


def run_once(
    case: GoodputCase, arm: Arm, load: float, alone: Mapping[str, float], seed: int
) -> Results:
    """One simulation at one load, with the objectives of `OBJECTIVES`.

    `alone`: seconds of an application on the empty fleet, by kind; see `jobs_alone`.
    """
    workload = build(case.workload, {**case.parameters(load), "seed": seed})
    return _simulate(case, arm, with_objectives(workload, alone), seed)


def jobs_alone(case: GoodputCase) -> dict[str, float]:
    """Seconds of one application on the baseline's empty fleet, by kind; empty without need."""
    if not case.alone:
        return {}
    results = _simulate(case, BASELINE, build(case.workload, case.alone), 0)
    return {kind: measures.job_s.mean for kind, measures in results.kinds.items()}


def _simulate(case: GoodputCase, arm: Arm, workload: Workload, seed: int) -> Results:
    return run_arm(
        workload, arm, profile=case.profile, engines=case.engines, network=RECORDED, seed=seed
    )


def _worst(results: list[Results]) -> tuple[float, str]:
    """The smallest share of a kind's applications that met their objective, and the kind."""
    kinds = sorted(results[0].kinds)
    shares = {
        kind: fmean(r.kinds[kind].good / r.kinds[kind].applications for r in results)
        for kind in kinds
    }
    kind = min(kinds, key=shares.__getitem__)
    return shares[kind], kind


def with_objectives(workload: Workload, alone: Mapping[str, float]) -> Workload:
    """The workload with the objectives of `OBJECTIVES` in place of its applications' own."""

    def change(plan: ApplicationPlan) -> ApplicationPlan:
        objective = OBJECTIVES[plan.kind]
        times = objective.times_alone
        return replace(
            plan,
            ttft_s=objective.ttft_s,
            tpot_s=objective.tpot_s,
            job_s=None if times is None else times * alone[plan.kind],
        )

    return Changed(workload, change)
