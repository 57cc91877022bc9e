"""Settings of a scheduler, with all defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Policies by name or import path (see `policies.py`), their parameters, and all limits.

    Times are seconds on the clock of whoever calls `Scheduler.step`.
    """

    admission: str = "working-set"
    order: str = "fair"
    #: The placement policy.
    place: str = "parrot"
    #: The retention policy.
    keep: str = "hazard"
    #: True: the rest of a task group is placed right after its first task, before other tasks.
    group_tasks: bool = False
    #: True: output lengths are predicted by template. False: `max_tokens` counts.
    predict_lengths: bool = True

    #: Maximum number of waiting tasks, held ones included; more are refused.
    max_queued: int = 100_000
    #: Longest wait of a task; then it is refused.
    max_wait_s: float = 600.0
    #: Longest wait of a task whose model has no engine; then it is refused.
    no_engine_wait_s: float = 30.0
    #: Longest time an application is held; then it is admitted.
    max_hold_s: float = 120.0
    #: Share of the engines' tokens of KV that admitted applications may fill.
    working_set_target: float = 0.85
    #: Maximum number each of paused applications, templates, tenants and block hashes that are
    #: remembered; the least recently used are forgotten first.
    max_applications: int = 100_000
    max_templates: int = 10_000
    max_tenants: int = 10_000
    max_blocks: int = 2_000_000
    #: A task that has waited longer gets one of every four placements, oldest first. An engine is
    #: drained for it if it fits nowhere else.
    starvation_s: float = 60.0
    #: Tasks without room that a search passes over before it gives up.
    max_passed_over: int = 8
    #: True: placements list what the task would have taken on other engines.
    explain: bool = False
    #: Seed of every random choice.
    seed: int = 0
