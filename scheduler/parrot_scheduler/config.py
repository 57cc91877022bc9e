"""Settings of a scheduler, with all defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Policies by name or import path (see `policies.py`), their knobs, and every bound.

    Times are seconds on the clock of whoever calls `Scheduler.step`.
    """

    admission: str = "working-set"
    order: str = "fair"
    #: The placement policy.
    place: str = "parrot"
    #: The retention policy.
    keep: str = "hazard"
    #: Whether the rest of a task group is placed right behind its first task, before others.
    group_tasks: bool = False
    #: Whether output lengths are predicted by template; otherwise `max_tokens` counts.
    predict_lengths: bool = True

    #: Waiting tasks at most, held ones included; more are refused.
    max_queued: int = 100_000
    #: A task that waited longer is refused.
    max_wait_s: float = 600.0
    #: A task of a model without engines that waited longer for one is refused.
    no_engine_wait_s: float = 30.0
    #: An application that was held for longer is admitted.
    max_hold_s: float = 120.0
    #: Share of the engines' tokens of KV that admitted applications may fill.
    working_set_target: float = 0.85
    #: Paused applications, templates, tenants and block hashes that are remembered at most; the
    #: least recently used are forgotten first.
    max_applications: int = 100_000
    max_templates: int = 10_000
    max_tenants: int = 10_000
    max_blocks: int = 2_000_000
    #: A task that waited longer gets one of every four placements, oldest first, and an engine is
    #: drained for it where it fits nowhere else.
    starvation_s: float = 60.0
    #: Tasks without room that are passed over in search of one that fits.
    max_passed_over: int = 8
    #: Whether placements say what the task would have taken on other engines.
    explain: bool = False
    #: Seeds every random choice.
    seed: int = 0
