"""How a scheduler is set up: which policies, and every bound. All defaults are here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Policies by name (see the `POLICIES` of each folder) and limits. Times are in seconds."""

    admission: str = "working-set"
    order: str = "fair"
    place: str = "parrot"
    keep: str = "hazard"
    #: Whether task groups are placed together.
    group_tasks: bool = True
    #: Whether output lengths are predicted by template; otherwise `max_tokens` counts.
    predict_lengths: bool = True

    #: Tasks that wait, held ones included; more are refused.
    max_queued: int = 100_000
    #: A task that waited longer is refused.
    max_wait_s: float = 600.0
    #: Tasks of a model without engines wait this long for one.
    no_engine_wait_s: float = 30.0
    #: An application is held no longer than this.
    max_hold_s: float = 120.0
    #: Share of an engine's KV that admitted applications may fill: hit rates collapse past it.
    working_set_target: float = 0.85
    #: Applications, templates, tenants and block hashes that are remembered; oldest out first.
    max_applications: int = 100_000
    max_templates: int = 10_000
    max_tenants: int = 10_000
    max_blocks: int = 2_000_000
    #: A task that waited longer than this gets one of every four placements, oldest first, and
    #: an engine is drained for it when it fits nowhere else.
    starvation_s: float = 60.0
    #: Tasks without room that are passed over in search of one that fits.
    max_passed_over: int = 8
    #: A task that nobody waits for gives way to those that somebody waits for, as long as it ends
    #: within so many times what it would take where it ends soonest; 1: it does not give way.
    yield_slack: float = 2.0
    #: Seeds every random choice.
    seed: int = 0


#: Whole set-ups by the name that `--policy` takes.
PRESETS: dict[str, SchedulerConfig] = {
    "parrot": SchedulerConfig(),
    "paper": SchedulerConfig(
        admission="open",
        order="application-fifo",
        place="paper",
        keep="none",
        predict_lengths=False,
    ),
    **{
        name: SchedulerConfig(
            admission="open",
            order="fcfs",
            place=name,
            keep="none",
            group_tasks=False,
            predict_lengths=False,
        )
        for name in (
            "round-robin",
            "least-loaded",
            "session-affinity",
            "prefix-linear",
            "lmetric",
        )
    },
}
