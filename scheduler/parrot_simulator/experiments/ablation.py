"""Each policy switched off in turn: what does it give, on which workload?

One point of load for each workload, the same for all switches; engines as this project's own,
clients with the graph. A switch changes one field of the scheduler's configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from parrot_scheduler.config import PRESETS

from parrot_simulator.engines.profiles import DEFAULT_PROFILE, PROFILES
from parrot_simulator.experiments.experiments import OURS, RECORDED
from parrot_simulator.metrics import Results
from parrot_simulator.simulation import simulate
from parrot_simulator.workloads import build

#: What is switched off, by the name of the row.
SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "all on": {},
    "admission: open": {"admission": "open"},
    "order: fcfs": {"order": "fcfs"},
    "place: lmetric": {"place": "lmetric"},
    "place: least-loaded": {"place": "least-loaded"},
    "keep: none": {"keep": "none"},
    "groups off": {"group_tasks": False},
    "prediction off": {"predict_lengths": False},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A workload at one load."""

    workload: str
    parameters: Mapping[str, str | float]
    engines: int = 4
    #: Changes to the engine profile.
    engine: Mapping[str, object] = field(default_factory=dict)
    #: Kind of application whose times are shown; None: all.
    kind: str | None = None
    #: Whether calls count, not applications: their pauses are none of the scheduler's business.
    by_call: bool = False


CASES: tuple[Case, ...] = (
    Case(
        "agents",
        {"clients": 96, "count": 96, "turns_scale": 0.2, "spread": 30},
        engines=1,
        by_call=True,
    ),
    # Room for some 25 calls where twice as many would run.
    Case("backlog", {}, engines=1, engine={"capacity_tokens": 40_000}),
    Case("gpts", {"rate": 60, "count": 1200}),
    Case("mixed", {"rate": 60, "count": 900, "gap_scale": 0.125, "summaries": 33,
                   "same_paper": "false"}),
    Case("multi-agent", {"rate": 0.2, "count": 16}),
    # Engines with room for 40,000 tokens, so that the flood makes tasks wait.
    Case("tenants", {"duration_s": 40}, engines=1, engine={"capacity_tokens": 40_000},
         kind="tenant"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One switch on one workload: means over the seeds."""

    workload: str
    switch: str
    #: Seconds of applications, or of calls where the case says so.
    mean_s: float
    p99_s: float
    good_share: float
    hit_rate: float
    failed: int
    #: `mean_s` over that with all policies on.
    ratio: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; what is not a number is None."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in plain.items()
        }


def select(names: Iterable[str]) -> list[Case]:
    """Cases by workload; all without any.

    Raises:
        ValueError: there is none of that name; says which there are.
    """
    known = {case.workload: case for case in CASES}
    wanted = list(names)
    for name in wanted:
        if name not in known:
            raise ValueError(f"no ablation of {name!r}; there are {', '.join(known)}")
    return [known[name] for name in wanted] or list(CASES)


def run(
    case: Case, *, seeds: int = 1, progress: Callable[[str], None] = lambda text: None
) -> Iterator[Row]:
    """All switches, one after the other; the first has everything on."""
    base = math.nan
    for switch, changes in SWITCHES.items():
        progress(f"{case.workload}: {switch}")
        results = [_run_once(case, changes, seed) for seed in range(seeds)]
        row = _row(case, switch, results, base)
        if switch == "all on":
            base = row.mean_s
            row = replace(row, ratio=1.0)
        yield row


def _run_once(case: Case, changes: Mapping[str, Any], seed: int) -> Results:
    own = OURS.engine
    profile = PROFILES[DEFAULT_PROFILE].with_(**{**own, **case.engine})
    return simulate(
        build(case.workload, {**case.parameters, "seed": seed}),
        engines=[profile] * case.engines,
        config=replace(PRESETS["parrot"], seed=seed, **changes),
        mode="graph",
        network=RECORDED,
        seed=seed,
    )


def _row(case: Case, switch: str, results: Sequence[Results], base: float) -> Row:
    shown = [r.total if case.kind is None else r.kinds[case.kind] for r in results]
    times = [m.latency_s if case.by_call else m.job_s for m in shown]
    mean = fmean(t.mean for t in times)
    with_goal = sum(m.with_goal for m in shown)
    return Row(
        workload=case.workload,
        switch=switch,
        mean_s=mean,
        p99_s=fmean(t.quantile(0.99) for t in times),
        good_share=sum(m.good for m in shown) / with_goal if with_goal else math.nan,
        hit_rate=fmean(m.hit_rate for m in shown),
        failed=sum(m.failed for m in shown),
        ratio=mean / base,
    )
