"""Tasks, engines and objectives, as the scheduler's caller describes them.

Plain immutable values. Times are seconds on the clock of whoever calls `Scheduler.step`; sizes are
tokens. Ids come from the caller, and are not reused while they live.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

TaskId: TypeAlias = int
EngineId: TypeAlias = str
ApplicationId: TypeAlias = str
TenantId: TypeAlias = str
#: 64-bit hash of all tokens from the beginning to the end of one block. Two prompts share a block
#: if their hashes at its index agree.
BlockHash: TypeAlias = int

ObjectiveKind: TypeAlias = Literal["throughput", "deadline", "tpot", "ttft", "latency"]

#: Weakest first; a stronger one leaves the scheduler less freedom. `throughput` leaves all of it;
#: `deadline` leaves the time within a span; `tpot` (time per output token) leaves the start; `ttft`
#: (time to first token) fixes the start; `latency` leaves none.
OBJECTIVE_KINDS: tuple[ObjectiveKind, ...] = ("throughput", "deadline", "tpot", "ttft", "latency")

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_TIMED = re.compile(r"(deadline|tpot|ttft)\s*=\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(us|ms|s|min|h)")
_LONGEST_S = 24 * 3600.0
_MAX_SHOWN = 60


class Objective(NamedTuple):
    """The purpose of a task; `seconds` belongs to the timed kinds only.

    The scheduler accepts any combination and treats a timed kind without a positive time as
    unbounded; `of` and `parse` refuse it.
    """

    kind: ObjectiveKind = "throughput"
    #: `deadline`: counted from the task's arrival; `ttft`, `tpot`: the time itself.
    seconds: float | None = None

    @classmethod
    def of(cls, kind: ObjectiveKind, seconds: float | None = None) -> Objective:
        """Build an objective and check that its time fits its kind.

        Raises:
            ValueError: A timed kind without a positive time, or another kind with one.
        """
        timed = kind in ("deadline", "tpot", "ttft")
        if timed != (seconds is not None) or (seconds is not None and seconds <= 0):
            raise ValueError(f"an objective {kind} cannot have the time {seconds}")
        return cls(kind, seconds)

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Read `latency`, `throughput`, `ttft=200ms`, `tpot=50ms` or `deadline=2s`.

        Units are us, ms, s, min and h; a number needs one. Case and surrounding blanks are ignored.

        Raises:
            ValueError: Anything else, a missing time, or more than a day.
        """
        plain = text.strip().lower()
        if plain == "latency":
            return LATENCY
        if plain == "throughput":
            return THROUGHPUT
        found = _TIMED.fullmatch(plain)
        if found is None:
            shown = text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
            raise ValueError(
                f"'{shown}' is no objective. Give latency, throughput, or a time with its unit: "
                "ttft=200ms, tpot=50ms, deadline=2s."
            )
        kind = next(kind for kind in OBJECTIVE_KINDS if kind == found[1])
        seconds = float(found[2]) * _UNITS[found[3]]
        if not 0 < seconds <= _LONGEST_S:
            raise ValueError(f"The time of '{plain}' must be more than nothing and at most a day.")
        return cls.of(kind, seconds)

    @property
    def is_latency(self) -> bool:
        """Return true if a user waits for it: such tasks bound an engine's step time."""
        return self.kind in ("latency", "ttft", "tpot")

    @property
    def strength(self) -> tuple[int, float]:
        """Return a sort key: larger is stronger; within a kind the shorter time is stronger."""
        return OBJECTIVE_KINDS.index(self.kind), -(self.seconds or 0.0)

    def __str__(self) -> str:
        """Format it as `parse` reads it, in the largest unit that gives a short number."""
        if self.seconds is None:
            return self.kind
        for unit in ("h", "min", "s", "ms", "us"):
            number = f"{self.seconds / _UNITS[unit]:.9f}".rstrip("0").rstrip(".")
            if float(number) * _UNITS[unit] == self.seconds and self.seconds >= _UNITS[unit]:
                return f"{self.kind}={number}{unit}"
        return f"{self.kind}={self.seconds:.9f}".rstrip("0").rstrip(".") + "s"


#: No user waits.
THROUGHPUT = Objective()
#: A user waits for the whole output.
LATENCY = Objective("latency")


def stronger(one: Objective, other: Objective) -> Objective:
    """Return the stronger of two objectives; the first if they are equal."""
    return other if other.strength > one.strength else one


class GroupRef(NamedTuple):
    """A task group of a task: its members matter only when the last one ends."""

    id: str
    #: Known members, this one included; they may be submitted at different times.
    size: int
    #: Objective of the whole group.
    objective: Objective = LATENCY


@dataclass(slots=True, unsafe_hash=True)
class Task:
    """One schedulable unit, `Fill* -> Generate`, of one application.

    Treat it as immutable; `events` explains why it is not frozen.
    """

    id: TaskId
    model: str
    tenant: TenantId
    application: ApplicationId
    #: Tokens of the whole prompt, cached or not.
    prompt_tokens: int
    #: Upper bound of the output; 0 means a Fill alone, ahead of its call.
    max_tokens: int
    #: Hashes of the prompt's full blocks, in order; empty if unknown.
    prefix: tuple[BlockHash, ...] = ()
    #: Key for predictions, common to calls of one kind: the hash of a prompt's constant beginning,
    #: or an agent's role. Empty if unknown.
    template: str = ""
    #: Tokens of that constant beginning, 0 if unknown.
    template_tokens: int = 0
    objective: Objective = THROUGHPUT
    #: All groups of the task; several if it feeds several consumers.
    groups: tuple[GroupRef, ...] = ()
    #: Within the tenant, smaller goes first.
    priority: int = 0
    #: Calls on the longest chain that waits for this one, itself excluded.
    successors: int = 0
    #: Probability that a later call of its application extends its prompt.
    returns: float = 0.0
    #: Sequences generated from the prompt (`n`, `best_of`).
    num_sequences: int = 1
    #: The only engine that can run it (it holds its context); None: any engine of the model.
    bound_to: EngineId | None = None
    #: Engine that already has part of it: its producer's tokens, or a Fill ahead.
    prefers: EngineId | None = None
    #: Tokens at the prompt's beginning that any application may share; the rest is useful only to
    #: its own calls. None if unknown.
    common_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class StepModel:
    """Time of one step of an engine, in seconds.

    `step = weights_s + prefill_tokens x prefill_token_s + context_tokens x context_token_s +
    sequences x sequence_s + overhead_s`, where `context_tokens` counts all keys that the step's
    decodes read. The first two terms may overlap, up to the whole of the shorter one.
    """

    #: Reading the weights once.
    weights_s: float
    #: Reading one token's keys and values.
    context_token_s: float
    #: Arithmetic of one prefilled token.
    prefill_token_s: float
    #: Fixed cost of a step.
    overhead_s: float = 0.0
    #: Cost of each decoding sequence besides reading its keys.
    sequence_s: float = 0.0


#: An 8B model in bf16 on one H200, fitted to measured steps; the simulator's tests in `bench/`
#: check it against them.
DEFAULT_STEP_MODEL = StepModel(
    weights_s=3.75e-3,
    context_token_s=3.25e-8,
    prefill_token_s=2.68e-5,
    overhead_s=0.5e-3,
    sequence_s=13.5e-6,
)


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """Properties of an engine; constant for its life."""

    id: EngineId
    model: str
    #: KV tokens that fit.
    capacity_tokens: int
    #: Maximum sequences per step.
    max_batch: int
    #: Maximum tokens per step, decodes and prefill together.
    max_batch_tokens: int
    #: Tokens per block, the unit of `Task.prefix`; 0 if the engine's cache is invisible.
    block_tokens: int = 0
    #: KV tokens that fit into its host tier.
    host_tokens: int = 0
    #: True if `BlocksStored` and `BlocksEvicted` report its cache. Otherwise the scheduler assumes
    #: that it still caches what was placed there lately.
    reports_blocks: bool = False
    #: KV tokens assumed cached in that case; 0 means `capacity_tokens`.
    assumed_tokens: int = 0
    step_model: StepModel = field(default=DEFAULT_STEP_MODEL)
