"""Why a call ran when and where it did: kept for the latest calls, told in a sentence.

Figures of other engines are those of the moment at which the call was placed, by the step times
that were known then; they were not used to decide.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parrot_scheduler.actions import Alternative, Reasons
from parrot_scheduler.task import ApplicationId, EngineId, Task

#: Calls that are remembered; the oldest is forgotten first.
MAX_CALLS = 4096
#: A wait that is not worth a word.
_SHORT_S = 0.001

#: By what decided, why it is this engine, in words that follow "there".
_DECIDED_BY = {
    "only": "it was the only engine that could take it",
    "bound": "what it goes on from is there",
    "failover": "another server had failed before",
    "session": "its session runs there",
    "group": "its task group is kept together there",
    "preferred": "what it reads was written or filled there, or of equals it had computed least",
    "replicate": "engines that have more of its prompt were too busy",
    "starved": "it had waited so long that an engine was kept free for it",
    "turn": "it was that engine's turn",
}


@dataclass(slots=True, eq=False)
class Placed:
    """One call that was submitted to the scheduler, and what became of it."""

    application: str
    model: str
    prompt_tokens: int
    objective: str
    #: Members of its largest task group; 1 without one.
    group_size: int
    submitted_at: float
    #: Names of engines that ran it before and were lost.
    lost: tuple[str, ...] = ()
    #: Once it has a place: the engine's name, why, and names of the others.
    engine: str = ""
    reasons: Reasons | None = None
    names: dict[EngineId, str] | None = None
    placed_at: float = 0.0
    #: Once it has ended.
    ended_at: float | None = None
    cached_tokens: int = 0
    succeeded: bool = False


class Explanations:
    """Remembers placements by tenant and call.

    Args:
        name_of: the name of an engine.
        clock: seconds, never going backwards.
        is_drained: whether the operator has drained all engines of a model.
    """

    def __init__(
        self,
        name_of: Callable[[EngineId], str],
        clock: Callable[[], float] = time.monotonic,
        is_drained: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._name_of = name_of
        self._is_drained = is_drained
        self._clock = clock
        self._calls: OrderedDict[tuple[str, str], Placed] = OrderedDict()
        #: Why applications wait for admission.
        self._held: dict[ApplicationId, str] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def held(self, application: ApplicationId, reason: str) -> None:
        """The calls of an application wait for admission."""
        self._held[application] = reason
        if len(self._held) > MAX_CALLS:
            del self._held[next(iter(self._held))]

    def released(self, application: ApplicationId) -> None:
        """They wait no more."""
        self._held.pop(application, None)

    def submitted(self, key: tuple[str, str], task: Task, lost: tuple[str, ...] = ()) -> None:
        """A call waits for an engine, for the first time or again.

        Args:
            key: its tenant and its id.
            task: as the scheduler has it.
            lost: names of engines that ran it before.
        """
        size = max((group.size for group in task.groups), default=1)
        self._calls[key] = Placed(
            task.application,
            task.model,
            task.prompt_tokens,
            str(task.objective),
            size,
            self._clock(),
            lost,
        )
        self._calls.move_to_end(key)
        if len(self._calls) > MAX_CALLS:
            self._calls.popitem(last=False)

    def placed(self, key: tuple[str, str], engine_id: EngineId, reasons: Reasons) -> None:
        """It has an engine. What was not submitted, or is forgotten, is passed over."""
        call = self._calls.get(key)
        if call is not None and call.reasons is None:
            call.engine, call.reasons = self._name_of(engine_id), reasons
            call.names = {
                each.engine_id: self._name_of(each.engine_id) for each in reasons.alternatives
            }
            call.placed_at = self._clock()

    def ended(self, key: tuple[str, str], cached_tokens: int, *, succeeded: bool) -> None:
        """It has ended, with or without a place."""
        call = self._calls.get(key)
        if call is not None:
            call.ended_at = self._clock()
            call.cached_tokens, call.succeeded = cached_tokens, succeeded

    def of(self, tenant: str, call_id: str) -> dict[str, Any] | None:
        """A call as plain values, `text` in words; None for one that is not remembered."""
        call = self._calls.get((tenant, call_id))
        if call is None:
            return None
        reasons, now = call.reasons, self._clock()
        if reasons is None:
            until = now if call.ended_at is None else call.ended_at
            return {
                "text": self._waiting(call, until),
                "engine": None,
                "lost_engines": list(call.lost),
                "decided_by": None,
                "waited_s": round(until - call.submitted_at, 6),
                "held_s": None,
                "objective": call.objective,
                "alternatives": [],
            }
        return {
            "text": _sentence(call, reasons),
            "engine": call.engine,
            "lost_engines": list(call.lost),
            "decided_by": reasons.decided_by,
            "waited_s": round(reasons.waited_s, 6),
            "held_s": round(reasons.held_s, 6),
            "objective": call.objective,
            "alternatives": [_describe(each, call) for each in reasons.alternatives],
        }

    def _waiting(self, call: Placed, until: float) -> str:
        waited = seconds_text(until - call.submitted_at)
        if call.ended_at is not None:
            return f"Ended after {waited} without a place on an engine."
        why = self._held.get(call.application)
        if why is not None:
            return f"Held for {waited} so far, with its whole application: {why}."
        if self._is_drained(call.model):
            return f"Waits for {waited} so far: all engines of '{call.model}' are drained."
        return f"Waits for an engine with room, for {waited} so far."


def seconds_text(seconds: float) -> str:
    """A time as people say it: two digits that matter, at least."""
    if seconds < 0.1:
        return f"{max(seconds, 0.0) * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def _describe(each: Alternative, call: Placed) -> dict[str, Any]:
    return {
        "engine": (call.names or {}).get(each.engine_id, each.engine_id),
        "cached_tokens": each.cached_tokens,
        "running": each.batch,
        "predicted_s": round(each.finish_s, 6),
        "has_room": each.has_room,
    }


def _sentence(call: Placed, reasons: Reasons) -> str:
    """When and where it ran, why, and what it would have taken elsewhere."""
    parts = [f"Ran on {call.engine} {_when(reasons)}"]
    why = _DECIDED_BY.get(reasons.decided_by)
    if reasons.decided_by == "group" and call.group_size > 1:
        why = f"its task group of {call.group_size} is kept together there"
    cached = reasons.expected_cached_tokens
    found = (
        f"{cached:,} of its {call.prompt_tokens:,} prompt tokens were cached there"
        if cached
        else f"none of its {call.prompt_tokens:,} prompt tokens were cached there"
    )
    parts.append(f": {why}, {found}" if why else f": {found}")
    chosen, *others = reasons.alternatives or (None,)
    if chosen is not None:
        expected = [f"{seconds_text(chosen.finish_s)} to the end expected"]
        expected += [_elsewhere(each, call) for each in others[:2]]
        parts.append(f" ({'; '.join(expected)})")
    if call.ended_at is not None and call.succeeded:
        parts.append(f". It took {seconds_text(call.ended_at - call.placed_at)}")
    if call.lost:
        parts.append(f". Before that it ran on {', then '.join(call.lost)}, lost meanwhile")
    return "".join(parts) + "."


def _when(reasons: Reasons) -> str:
    """How long it waited, and for what."""
    queued_s = max(reasons.waited_s - reasons.held_s, 0.0)
    words = []
    if reasons.held_s >= _SHORT_S:
        words.append(
            f"{seconds_text(reasons.held_s)} held with its application, until there was room"
        )
    if queued_s >= _SHORT_S:
        words.append(f"{seconds_text(queued_s)} in the queue")
    return f"after {' and '.join(words)}" if words else "at once"


def _elsewhere(each: Alternative, call: Placed) -> str:
    """Tell the time that it would have taken on another engine."""
    name = (call.names or {}).get(each.engine_id, each.engine_id)
    if not each.has_room:
        state = "without room"
    elif each.batch:
        state = f"running {each.batch}"
    else:
        state = "idle"
    known = f", with {each.cached_tokens:,} cached" if each.cached_tokens else ""
    return f"{name}, {state}{known}, would have taken {seconds_text(each.finish_s)}"
