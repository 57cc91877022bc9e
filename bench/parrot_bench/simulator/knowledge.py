"""What a server knows of calls besides their prompts: declared by clients, inferred, or neither.

Declared knowledge is exact and there from the first call. Inferred knowledge is what the gateway's
linking makes of plain calls: the session of a call that goes on from another one, and what calls of
a template usually do, once there have been some; with errors, and published now and then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from parrot_scheduler.foretold import UNKNOWN_RETURNS, ForetoldGroups, expected_returns, feeds_group
from parrot_scheduler.task import LATENCY, THROUGHPUT, BlockHash, GroupRef

from parrot_bench.simulator.clients import RunningCall
from parrot_bench.simulator.engines.prompts import uniform
from parrot_bench.simulator.plan import ApplicationPlan, CallPlan, Knowledge, Segment

#: As the gateway has it: `parrot_gateway.linking`.
_GROUP_GAP_S = 1.0
_PUBLISHED_EVERY_S = 1.0
_UNUSED_S = 300.0
#: Calls of a template before it is known as one.
_LEARNED = 3
#: Blocks that stand for a template where none is known.
_TEMPLATE_BLOCKS = 4
#: Sessions among which a wrong link is drawn.
_RECENT = 100


@dataclass(slots=True)
class _Profile:
    """What calls of one template did so far; `calls` counts those whose fate is known."""

    seen: int = 0
    calls: int = 0
    returned: int = 0
    in_fan_in: int = 0
    siblings: int = 0
    #: What prompts of several applications begin with, and the last application that was looked at.
    common: tuple[Segment, ...] | None = None
    application: str = ""


@dataclass(slots=True)
class _Forecast:
    common_tokens: int
    settled: int
    fan_in: float
    siblings: float
    returns: float


@dataclass(slots=True, eq=False)
class _Seen:
    """A call that later ones may be linked to."""

    template: str
    started: float
    session: str
    ended: float | None = None
    is_settled: bool = False


@dataclass(slots=True)
class Informant:
    """Tells what is known of each call that comes.

    Args:
        knowledge: which pieces, and how they are known.
        seed: of its errors.
    """

    knowledge: Knowledge
    seed: int
    _profiles: dict[str, _Profile] = field(default_factory=dict)
    _published: dict[str, _Forecast] = field(default_factory=dict)
    _publish_at: float = 0.0
    _seen: dict[str, dict[int, _Seen]] = field(default_factory=dict)
    #: Ended calls that nothing has used yet, in that order.
    _unused: deque[_Seen] = field(default_factory=deque)
    _recent: deque[str] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _groups: ForetoldGroups = field(default_factory=lambda: ForetoldGroups(_GROUP_GAP_S))

    def of(
        self, call: RunningCall, prefix: tuple[BlockHash, ...], beginning: str
    ) -> dict[str, Any]:
        """Fields of the task of a call that has reached the server.

        Args:
            prefix: hashes of its prompt's blocks.
            beginning: names the first segment of its prompt.
        """
        plan = call.plan
        unknown = f"{prefix[min(_TEMPLATE_BLOCKS, len(prefix)) - 1]:016x}" if prefix else ""
        fields = {
            "application": f"{call.run.plan.id}/{plan.index}/call",
            "objective": LATENCY,
            "template": unknown,
        }
        template = plan.template or beginning
        if self.knowledge.inferred:
            return fields | self._inferred(call, template)
        return fields | self._declared(call.run.plan, plan, template)

    def ended(self, call: RunningCall, now: float) -> None:
        """A call has all of its output."""
        seen = self._seen.get(call.run.plan.id, {}).get(call.plan.index)
        if seen is not None and seen.ended is None:
            seen.ended = now
            self._unused.append(seen)
            if call.plan.index == len(call.run.plan.calls) - 1:
                del self._seen[call.run.plan.id]

    def _declared(
        self, application: ApplicationPlan, plan: CallPlan, template: str
    ) -> dict[str, Any]:
        known, fields = self.knowledge, dict[str, Any]()
        if known.sessions:
            fields["application"] = application.id
        if known.lengths:
            fields["template"] = template
        if known.groups:
            fields["objective"] = plan.objective
            fields["groups"] = tuple(
                GroupRef(f"{application.id}/{group.id}", group.size, group.objective)
                for group in plan.groups
            )
        if known.successors:
            fields["successors"] = plan.successors
        return fields

    # Inferred

    def _inferred(self, call: RunningCall, template: str) -> dict[str, Any]:
        known, now, name = self.knowledge, call.submitted_s, call.run.plan.id
        self._publish(now)
        profile = self._profiles.setdefault(template, _Profile())
        profile.seen += 1
        if profile.application != name:
            profile.application = name
            profile.common = _common(profile.common, call.plan.prompt)
        seen = _Seen(template, now, f"{name}/{call.plan.index}")
        self._link(call, seen)
        self._seen.setdefault(name, {})[call.plan.index] = seen
        fields: dict[str, Any] = {}
        forecast = self._published.get(template)
        if forecast is not None:
            if known.lengths:
                fields["template"] = template
            if known.prefixes:
                fields["common_tokens"] = forecast.common_tokens
            if known.groups and feeds_group(forecast.fan_in, forecast.settled, forecast.siblings):
                fields["objective"] = THROUGHPUT
                fields["groups"] = (self._groups.join(template, forecast.siblings, now),)
        if known.sessions:
            returns = UNKNOWN_RETURNS
            if forecast is not None:
                returns = expected_returns(forecast.returns, forecast.settled)
            fields["returns"] = returns
            if self._goes_on(call) or (not call.plan.after and returns >= UNKNOWN_RETURNS):
                fields["application"] = seen.session
        return fields

    def _goes_on(self, call: RunningCall) -> bool:
        """Whether its prompt begins with an earlier one of its application."""
        if not call.plan.after:
            return False
        before = call.run.plan.calls[call.plan.after[-1]].prompt
        return call.plan.prompt[: len(before)] == before

    def _link(self, call: RunningCall, seen: _Seen) -> None:
        """Link a call to those whose outputs it reads, as far as that is found."""
        name, index = call.run.plan.id, call.plan.index
        others = self._seen.get(name, {})
        found = [
            others[producer]
            for producer in call.plan.after
            if producer in others
            and uniform(self.seed, name, index, producer) < self.knowledge.recall
        ]
        if found:
            seen.session = found[0].session
        if self._recent and uniform(self.seed, name, index) >= self.knowledge.precision:
            at = int(uniform(self.seed, name, index, "other") * len(self._recent))
            seen.session = self._recent[at]
        elif not found:
            self._recent.append(seen.session)
        last = max((each.started for each in found), default=0.0)
        together = [each for each in found if each.ended is None or each.ended > last]
        goes_on = self._goes_on(call)
        for each in found:
            profile = self._profiles[each.template]
            if each.is_settled:
                continue
            each.is_settled = True
            profile.calls += 1
            profile.returned += goes_on
            if len(together) > 1 and each in together:
                profile.in_fan_in += 1
                profile.siblings += sum(other.template == each.template for other in together)

    def _publish(self, now: float) -> None:
        while self._unused and (self._unused[0].ended or 0.0) < now - _UNUSED_S:
            old = self._unused.popleft()
            if not old.is_settled:
                old.is_settled = True
                self._profiles[old.template].calls += 1
        if now < self._publish_at:
            return
        self._publish_at = now + _PUBLISHED_EVERY_S
        for template, profile in self._profiles.items():
            if profile.seen >= _LEARNED:
                calls, members = max(profile.calls, 1), max(profile.in_fan_in, 1)
                self._published[template] = _Forecast(
                    sum(segment.tokens for segment in profile.common or ()),
                    profile.calls,
                    profile.in_fan_in / calls,
                    profile.siblings / members,
                    profile.returned / calls,
                )


def _common(known: tuple[Segment, ...] | None, prompt: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """What a prompt begins with of what is known; all of it where nothing is."""
    if known is None:
        return prompt
    pairs = zip(known, prompt, strict=False)
    return tuple(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
