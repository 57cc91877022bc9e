"""Bad input: what policies lose where they are told what is not true, or load is not as usual.

Each case runs both policies on the same calls and engines. A ratio is the other policy's time over
the first one's: below 1 the first is behind. A case may be behind on purpose where it serves others
before: see its figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from parrot_scheduler.config import PRESETS

from parrot_simulator.engines.prompts import uniform
from parrot_simulator.experiments.applications import ENGINES, select
from parrot_simulator.experiments.definitions import OWN
from parrot_simulator.experiments.runner import DEFAULT_SEEDS, Plain
from parrot_simulator.metrics import Figure, Results
from parrot_simulator.options import SimulationOptions
from parrot_simulator.plan import ApplicationPlan, CallPlan, Knowledge, Workload
from parrot_simulator.profiles import DEFAULT_PROFILE, PROFILES, EngineProfile
from parrot_simulator.simulation import simulate
from parrot_simulator.workloads import Changed, build

#: What a policy is compared with.
BASELINE = "lmetric"

_ENGINE = PROFILES[DEFAULT_PROFILE].with_(**OWN)


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of bad input on one workload."""

    name: str
    #: What is wrong, in a few words.
    what: str
    workload: Callable[[int, float], Workload]
    figures: tuple[Figure, ...]
    engines: tuple[EngineProfile, ...] = (_ENGINE,) * ENGINES
    knowledge: Knowledge | None = None


def _application(
    name: str, change: Callable[[ApplicationPlan], ApplicationPlan] | None = None
) -> Callable[[int, float], Workload]:
    """One of the five at its middle load, with a change."""

    def make(seed: int, share: float) -> Workload:
        (application,) = select([name])
        load = application.loads_of(DEFAULT_PROFILE).values[1]
        if name == "agents":
            load = max(1, round(load * share))
        workload = application.build(DEFAULT_PROFILE, load, seed, share=share)
        return workload if change is None else Changed(workload, change)

    return make


def _figures(name: str) -> tuple[Figure, ...]:
    return select([name])[0].means


def _calls(plan: ApplicationPlan, change: Callable[[CallPlan], CallPlan]) -> ApplicationPlan:
    return replace(plan, calls=tuple(map(change, plan.calls)))


def too_long(plan: ApplicationPlan) -> ApplicationPlan:
    """Calls ask for ten times of what they generate, each of a template of its own."""
    return _calls(
        plan,
        lambda call: replace(
            call, max_tokens=10 * call.output_tokens, template=f"{plan.id} {call.index}"
        ),
    )


def too_short(plan: ApplicationPlan) -> ApplicationPlan:
    """Nine calls of ten generate a tenth, so that the others are ten times as long as expected."""

    def change(call: CallPlan) -> CallPlan:
        if uniform("short", plan.id, call.index) < 0.1:
            return call
        return replace(call, output_tokens=max(1, call.output_tokens // 10))

    return _calls(plan, change)


def _sessions(seed: int, share: float) -> Workload:
    return build(
        "sessions", {"seed": seed, "sessions": round(1000 * share), "tenants": round(20 * share)}
    )


_LIAR = replace(_ENGINE.slowed(4.0), described=_ENGINE.step_model, claims_idle=True)
_SLOW = _ENGINE.slowed(3.0)
_SMALL = _ENGINE.with_(capacity_tokens=40_000)
_WRONG_LINKS = Knowledge(
    sessions=True, groups=True, lengths=True, inferred=True, recall=0.7, precision=0.5
)
_SHARED_BY = ("gpts", "mixed", "multi-agent")

CASES: tuple[Case, ...] = (
    *(
        Case(
            f"idle and slow, {name}",
            "one engine of four takes four times as long as it says, and reports that it is idle",
            _application(name),
            _figures(name),
            engines=(*(_ENGINE,) * (ENGINES - 1), _LIAR),
        )
        for name in _SHARED_BY
    ),
    *(
        Case(
            f"lengths 10x too long, {name}",
            "calls ask for ten times of what they generate, and nothing can be learned",
            _application(name, too_long),
            _figures(name),
        )
        for name in _SHARED_BY
    ),
    *(
        Case(
            f"lengths 10x too short, {name}",
            "one call of ten is ten times as long as others of its kind",
            _application(name, too_short),
            _figures(name),
        )
        for name in _SHARED_BY
    ),
    *(
        Case(
            f"wrong links, {name}",
            "sessions and groups are inferred from texts; half of what is found is wrong",
            _application(name),
            _figures(name),
            knowledge=_WRONG_LINKS,
        )
        for name in ("agents", "mixed", "multi-agent")
    ),
    Case(
        "a thousand sessions",
        "one tenant has a thousand, twenty others have one each; engines with little memory",
        _sessions,
        (
            Figure("twenty tenants, s a call", "call_s", "tenant"),
            Figure("the large one, s a call", "call_s", "crowd"),
        ),
        engines=(_SMALL,) * ENGINES,
    ),
    *(
        Case(
            f"two speeds, {name}",
            "two engines of four take three times as long, and say so",
            _application(name),
            _figures(name),
            engines=(_ENGINE, _ENGINE, _SLOW, _SLOW),
        )
        for name in _SHARED_BY
    ),
)


@dataclass(frozen=True, slots=True)
class RobustnessFigure(Plain):
    """One figure of a case: means over the seeds."""

    case: str
    what: str
    figure: str
    policy: float
    baseline: float
    #: Jain's index over the tenants' speeds.
    fairness: float
    baseline_fairness: float
    #: Applications that failed.
    failed: int

    @property
    def ratio(self) -> float:
        """How many times as fast as the baseline the policy is."""
        return self.baseline / self.policy


def select_cases(names: Iterable[str]) -> tuple[Case, ...]:
    """Cases whose names begin so, in that order; all without any.

    Raises:
        ValueError: an unknown name; lists the known ones.
    """
    found: list[Case] = []
    for name in names:
        matches = [case for case in CASES if case.name.startswith(name)]
        if not matches:
            raise ValueError(f"no case {name!r}; there are {'; '.join(c.name for c in CASES)}")
        found += matches
    return tuple(found) or CASES


def run(
    cases: Sequence[Case],
    *,
    policy: str = "parrot",
    seeds: int = DEFAULT_SEEDS,
    share: float = 1.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[RobustnessFigure]:
    """The figures of each case under a policy and `BASELINE`.

    Args:
        cases: what to run.
        policy: of `PRESETS`.
        seeds: repetitions.
        share: of the usual number of applications.
        progress: called before each policy.
    """
    for case in cases:
        found: dict[str, list[Results]] = {}
        for name in (policy, BASELINE):
            progress(f"{case.name}: {name}")
            found[name] = [
                simulate(
                    case.workload(seed, share),
                    SimulationOptions(
                        engines=case.engines,
                        config=replace(PRESETS[name], seed=seed),
                        mode="graph" if case.knowledge is None else "plain",
                        knowledge=case.knowledge,
                        seed=seed,
                    ),
                )
                for seed in range(seeds)
            ]
        ours, theirs = found[policy], found[BASELINE]
        for figure in case.figures:
            yield RobustnessFigure(
                case=case.name,
                what=case.what,
                figure=figure.label,
                policy=fmean(map(figure.of, ours)),
                baseline=fmean(map(figure.of, theirs)),
                fairness=fmean(results.fairness for results in ours),
                baseline_fairness=fmean(results.fairness for results in theirs),
                failed=sum(results.total.failed for results in ours),
            )
