"""Tasks, engines and objectives, as the scheduler's caller describes them.

Plain frozen values. Times are seconds on the clock of whoever calls `Scheduler.step`; sizes are
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
#: Hash of all tokens from the beginning up to the end of one block, 64 bits. Two prompts share a
#: block where their hashes at its index agree.
BlockHash: TypeAlias = int

ObjectiveKind: TypeAlias = Literal["throughput", "deadline", "tpot", "ttft", "latency"]

#: Weakest first: the stronger of two leaves the scheduler less freedom. `throughput` leaves all of
#: it; `deadline` leaves when, within a span; `tpot` (time per output token) leaves the beginning;
#: `ttft` (time to first token) fixes the beginning; `latency` leaves nothing.
OBJECTIVE_KINDS: tuple[ObjectiveKind, ...] = ("throughput", "deadline", "tpot", "ttft", "latency")

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_TIMED = re.compile(r"(deadline|tpot|ttft)\s*=\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(us|ms|s|min|h)")
_LONGEST_S = 24 * 3600.0
_MAX_SHOWN = 60


class Objective(NamedTuple):
    """The purpose of a task; `seconds` goes with the timed kinds only.

    The scheduler takes any combination, and treats a timed kind without a positive time as one
    without a bound; `of` and `parse` refuse it.
    """

    kind: ObjectiveKind = "throughput"
    #: `deadline`: from the task's arrival on; `ttft`, `tpot`: the time itself.
    seconds: float | None = None

    @classmethod
    def of(cls, kind: ObjectiveKind, seconds: float | None = None) -> Objective:
        """An objective whose time goes with its kind.

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

        Units are us, ms, s, min and h; a number needs one. Case and blanks around do not matter.

        Raises:
            ValueError: Anything else, no time at all, or more than a day.
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
        """True if a user waits for it: such tasks bound an engine's step time."""
        return self.kind in ("latency", "ttft", "tpot")

    @property
    def strength(self) -> tuple[int, float]:
        """Larger is stronger; of two of one kind the shorter time is the stronger."""
        return OBJECTIVE_KINDS.index(self.kind), -(self.seconds or 0.0)

    def __str__(self) -> str:
        """Write it as `parse` reads it, in the largest unit that gives a short number."""
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
    """The stronger of two; the first when they are equal."""
    return other if other.strength > one.strength else one


class GroupRef(NamedTuple):
    """A task group that a task belongs to: its members matter only when the last one ends."""

    id: str
    #: Members that are known of, this one included; they may be submitted at different times.
    size: int
    #: What the group as a whole is for.
    objective: Objective = LATENCY


@dataclass(slots=True, unsafe_hash=True)
class Task:
    """One schedulable unit, `Fill* -> Generate`, of one application.

    Not to be changed; see `events` for why it is not frozen.
    """

    id: TaskId
    model: str
    tenant: TenantId
    application: ApplicationId
    #: Tokens of the whole prompt, cached or not.
    prompt_tokens: int
    #: Upper bound of the output; 0 is a Fill alone, done ahead of its call.
    max_tokens: int
    #: Hashes of the prompt's full blocks, in order; empty when they are not known.
    prefix: tuple[BlockHash, ...] = ()
    #: What calls of one kind have in common, for predictions: the hash of a prompt's constant
    #: beginning, an agent's role. Empty: nothing is known.
    template: str = ""
    #: Tokens of that constant beginning, 0 where they are not known.
    template_tokens: int = 0
    objective: Objective = THROUGHPUT
    #: Every group that the task is in; several where it feeds several consumers.
    groups: tuple[GroupRef, ...] = ()
    #: Smaller first, within the tenant.
    priority: int = 0
    #: Calls on the longest chain that waits for this one, this one not included.
    successors: int = 0
    #: Chance that a later call of its application extends its prompt: a session goes on.
    returns: float = 0.0
    #: Sequences that are generated from the prompt (`n`, `best_of`).
    num_sequences: int = 1
    #: The one engine that can run it (its context lives there); None: any of the model.
    bound_to: EngineId | None = None
    #: Where something of it is already: its producer's tokens, what was filled ahead.
    prefers: EngineId | None = None
    #: Tokens of the prompt's beginning that any applications may share; the rest of the prompt is
    #: of use to few calls, those of its own. None: not known.
    common_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class StepModel:
    """How long one step of an engine takes, all in seconds.

    `step = weights_s + prefill_tokens x prefill_token_s + context_tokens x context_token_s +
    sequences x sequence_s + overhead_s`, where `context_tokens` are all keys that the step's
    decodes read. Up to the whole of the shorter of the first two may be hidden behind the other.
    """

    #: Reading the weights once.
    weights_s: float
    #: Reading one token's keys and values.
    context_token_s: float
    #: Arithmetic of one prefilled token.
    prefill_token_s: float
    #: What a step costs besides.
    overhead_s: float = 0.0
    #: Each sequence that decodes, besides reading its keys.
    sequence_s: float = 0.0


#: An 8B model in bf16 on one H200, fitted to measured steps; the tests of
#: the simulator in `bench/` holds it to them.
DEFAULT_STEP_MODEL = StepModel(
    weights_s=3.75e-3,
    context_token_s=3.25e-8,
    prefill_token_s=2.68e-5,
    overhead_s=0.5e-3,
    sequence_s=13.5e-6,
)


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """The abilities of an engine; constant for its life."""

    id: EngineId
    model: str
    #: Tokens of KV that fit.
    capacity_tokens: int
    #: Sequences of one step.
    max_batch: int
    #: Tokens of one step, decodes and prefill together.
    max_batch_tokens: int
    #: Tokens of a block, the unit of `Task.prefix`; 0: the engine's cache cannot be seen.
    block_tokens: int = 0
    #: Tokens of KV that fit into its host tier.
    host_tokens: int = 0
    #: Whether `BlocksStored` and `BlocksEvicted` report what it caches. Otherwise the scheduler
    #: assumes that what was placed there lately is still there.
    reports_blocks: bool = False
    #: So many tokens of that; 0: `capacity_tokens`.
    assumed_tokens: int = 0
    step_model: StepModel = field(default=DEFAULT_STEP_MODEL)
