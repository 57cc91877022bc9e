"""What no schedule can beat: a lower bound of a mean time, from the engine model alone.

Three bounds, of which the largest counts. The *critical path* of an application is what it takes on
an engine of its own, with all that others compute as well found in its cache. The *work* of all
applications is divided over the engines as if these were one machine that is as many times as
fast, and that machine serves the shortest remaining work first. The *prompts* that applications
begin with are divided so too, and behind its last one each application still takes what it takes
alone. None of them looks at any schedule.

A step takes `weights + filled x a - hidden x min(weights, filled x a) + keys x b + sequences x c +
d`, and the smaller of two is at most `(1 - share)` of the one and `share` of the other, for each
share of 0 to 1: so the work of a call is a sum over its tokens, with its part of weights and
constant in a batch of the largest size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import ceil, inf

from parrot_simulator.metrics import Metric
from parrot_simulator.plan import ApplicationPlan, CallPlan, Segment
from parrot_simulator.profiles import SHARED_READ, EngineProfile

#: Shares of the weights' time that are tried.
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def lower_bound(
    plans: Sequence[ApplicationPlan],
    profile: EngineProfile,
    engines: int,
    metric: Metric,
    kind: str | None = None,
) -> float:
    """The least that the mean of a metric can be, in the metric's unit.

    Args:
        plans: all applications, of which none follows another one's end.
        profile: of each engine.
        engines: in number.
        metric: `job_s` of any applications; `call_s` of chains; `ms_per_token` of single calls.
        kind: of the applications that are measured; None: all.

    Raises:
        ValueError: the metric does not go with the applications.
    """
    prefixes = _Prefixes(plans, profile)
    measured = [plan for plan in plans if kind is None or plan.kind == kind]
    if not measured:
        raise ValueError(f"no application is of kind {kind!r}")
    weights = _weights(measured, metric)
    pauses = [0.0 if metric == "job_s" else _pauses(plan) for plan in measured]
    paths = [_critical_path_s(plan, prefixes, profile) for plan in measured]
    alone = sum(w * (path - pause) for w, path, pause in zip(weights, paths, pauses, strict=True))
    paused = sum(w * pause for w, pause in zip(weights, pauses, strict=True))
    together = max(
        _flow(
            [_work_s(plan, prefixes, profile, share) / engines for plan in measured],
            measured,
            weights,
        )
        for share in _SHARES
    )
    fill_s = profile.step_model.prefill_token_s / engines
    firsts = [[call for call in plan.calls if not call.after] for plan in measured]
    filled = [
        prefixes.filled_for(plan, first) * fill_s
        for plan, first in zip(measured, firsts, strict=True)
    ]
    tails = [_tail_s(plan, prefixes, profile) for plan in measured]
    behind = sum(w * tail for w, tail in zip(weights, tails, strict=True))
    return max(alone, together - paused, _flow(filled, measured, weights) + behind - paused)


def _flow(
    works: Sequence[float], plans: Sequence[ApplicationPlan], weights: Sequence[float]
) -> float:
    """The least weighted sum of times in the system of one machine with so many seconds each."""
    items = [
        _Work(plan.arrival_s, work, weight)
        for plan, work, weight in zip(plans, works, weights, strict=True)
    ]
    return max(_shortest_first(items), _mean_busy_times(items))


def _weights(plans: Sequence[ApplicationPlan], metric: Metric) -> list[float]:
    """How much a second of each application counts in the mean."""
    if metric == "job_s":
        return [1.0 / len(plans)] * len(plans)
    if metric == "call_s":
        if not all(call.after in ((), (call.index - 1,)) for p in plans for call in p.calls):
            raise ValueError("call_s has a bound for chains only")
        calls = sum(len(plan.calls) for plan in plans)
        return [1.0 / calls] * len(plans)
    if metric == "ms_per_token" and all(len(plan.calls) == 1 for plan in plans):
        return [1000.0 / (len(plans) * plan.calls[0].output_tokens) for plan in plans]
    raise ValueError(f"{metric} has no bound for these applications")


def _pauses(plan: ApplicationPlan) -> float:
    return sum(call.pause_s for call in plan.calls)


@dataclass(slots=True)
class _Node:
    """A run of tokens at one place of one prefix."""

    tokens: int
    #: By application, the calls whose prompts have it, as bits.
    users: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    #: Whether a call generates it.
    is_output: bool = False


class _Prefixes:
    """Which calls have which beginnings in common."""

    def __init__(self, plans: Sequence[ApplicationPlan], profile: EngineProfile) -> None:
        self._caching = profile.prefix_caching
        self._nodes: dict[tuple[int, object], tuple[int, _Node]] = {}
        self._of: dict[tuple[str, int], list[_Node]] = {}
        #: By application and call: the calls that come after it, and all that go before, as bits.
        self._behind: dict[tuple[str, int], int] = {}
        self._related: dict[tuple[str, int], int] = {}
        self._numbers = {plan.id: number for number, plan in enumerate(plans)}
        for plan in plans:
            self._relate(plan)
            for call in plan.calls:
                last, nodes = self._path(plan, call)
                for node in nodes:
                    node.users[self._numbers[plan.id]] |= 1 << call.index
                self._of[plan.id, call.index] = nodes
                if call.output_tokens:
                    output = Segment(("output", plan.id, call.index), call.output_tokens)
                    self._node(last, output)[1].is_output = True

    def _relate(self, plan: ApplicationPlan) -> None:
        before = [0] * len(plan.calls)
        behind = [0] * len(plan.calls)
        for call in plan.calls:
            for producer in call.after:
                before[call.index] |= before[producer] | 1 << producer
            for index in range(call.index):
                if before[call.index] >> index & 1:
                    behind[index] |= 1 << call.index
        for index in range(len(plan.calls)):
            self._behind[plan.id, index] = behind[index]
            self._related[plan.id, index] = behind[index] | before[index] | 1 << index

    def _path(self, plan: ApplicationPlan, call: CallPlan) -> tuple[int, list[_Node]]:
        last, nodes = self._node(0, Segment(("tenant", plan.tenant), 0))[0], []
        for segment in call.prompt:
            last, node = self._node(last, segment)
            nodes.append(node)
        return last, nodes

    def _node(self, parent: int, segment: Segment) -> tuple[int, _Node]:
        key = (parent, segment)
        found = self._nodes.get(key)
        if found is None:
            found = self._nodes[key] = (len(self._nodes) + 1, _Node(segment.tokens))
        return found

    def filled_by(self, plan: ApplicationPlan, call: CallPlan) -> int:
        """Prompt tokens that a call has to compute itself: all others that have them come later."""
        number = self._numbers[plan.id]
        later = self._behind[plan.id, call.index] | 1 << call.index
        return sum(
            node.tokens
            for node in self._of[plan.id, call.index]
            if not self._caching
            or (not node.is_output and len(node.users) == 1 and not node.users[number] & ~later)
        )

    def filled_for(self, plan: ApplicationPlan, calls: Sequence[CallPlan]) -> int:
        """Prompt tokens of some of its calls that no other application has, each once."""
        found: dict[int, int] = {}
        for call in calls:
            for node in self._of[plan.id, call.index]:
                if not self._caching:
                    found[len(found)] = node.tokens
                elif len(node.users) == 1 and not node.is_output:
                    found[id(node)] = node.tokens
        return sum(found.values())

    def alone(self, plan: ApplicationPlan, call: CallPlan) -> int:
        """Prompt tokens that no other call can read in the same step."""
        number, related = self._numbers[plan.id], self._related[plan.id, call.index]
        return (
            sum(
                node.tokens
                for node in self._of[plan.id, call.index]
                if len(node.users) == 1 and not node.users[number] & ~related
            )
            if self._caching
            else _prompt_tokens(call)
        )


def _prompt_tokens(call: CallPlan) -> int:
    return sum(segment.tokens for segment in call.prompt)


def _critical_path_s(plan: ApplicationPlan, prefixes: _Prefixes, profile: EngineProfile) -> float:
    """Seconds of an application on engines of its own, its pauses included."""
    ends: list[float] = []
    for call in plan.calls:
        start = max((ends[producer] for producer in call.after), default=0.0)
        filled = prefixes.filled_by(plan, call)
        ends.append(start + call.pause_s + _call_s(call, filled, profile))
    return max(ends)


def _tail_s(plan: ApplicationPlan, prefixes: _Prefixes, profile: EngineProfile) -> float:
    """Seconds from the last of its first calls' prompts to its end, pauses included, at least."""
    behind = [0.0] * len(plan.calls)
    least = inf
    for call in reversed(plan.calls):
        decode_s = _call_s(call, 0, profile) - _call_s(replace(call, output_tokens=0), 0, profile)
        if not call.after:
            least = min(least, behind[call.index] + decode_s)
        whole_s = call.pause_s + _call_s(call, prefixes.filled_by(plan, call), profile)
        for producer in call.after:
            behind[producer] = max(behind[producer], behind[call.index] + whole_s)
    return least


def _call_s(call: CallPlan, filled: int, profile: EngineProfile) -> float:
    """Seconds of a call alone on an engine that has to fill so many tokens of its prompt."""
    model = profile.step_model
    steps = max(1, ceil(filled / profile.max_batch_tokens)) if profile.chunked_prefill else 1
    fill_s, read_s = filled * model.prefill_token_s, steps * model.weights_s
    seconds = fill_s + read_s - profile.hidden * min(fill_s, read_s) + steps * model.overhead_s
    decodes = max(0, call.output_tokens - 1)
    keys = decodes * _prompt_tokens(call) + decodes * (decodes + 1) / 2
    step_s = model.weights_s + model.overhead_s + model.sequence_s
    return seconds + decodes * step_s + keys * model.context_token_s


def _work_s(
    plan: ApplicationPlan, prefixes: _Prefixes, profile: EngineProfile, share: float
) -> float:
    """Seconds of one engine that an application takes at least, however it is batched."""
    model = profile.step_model
    repeated = SHARED_READ if profile.shared_attention else profile.repeated_read
    hidden = profile.hidden
    part_s = (
        (1.0 - hidden * (1.0 - share)) * model.weights_s + model.overhead_s
    ) / profile.max_batch
    fill_s = prefixes.filled_for(plan, plan.calls) * model.prefill_token_s
    seconds = (1.0 - hidden * share) * fill_s
    for call in plan.calls:
        decodes = max(0, call.output_tokens - 1)
        alone = prefixes.alone(plan, call)
        keys = alone + repeated * (_prompt_tokens(call) - alone)
        read = decodes * keys + decodes * (decodes + 1) / 2
        seconds += decodes * (part_s + model.sequence_s) + read * model.context_token_s
    return seconds


@dataclass(frozen=True, slots=True)
class _Work:
    """Work for one machine: when it comes, its seconds, and what a second of delay counts."""

    arrival_s: float
    seconds: float
    weight: float


def _shortest_first(items: Sequence[_Work]) -> float:
    """The least sum of weighted times in the system, where all weights are equal; else 0."""
    if len({item.weight for item in items}) > 1:
        return 0.0
    total = sum(end for end in _served(items, lambda item, left: left).values())
    return items[0].weight * (total - sum(item.arrival_s for item in items))


def _mean_busy_times(items: Sequence[_Work]) -> float:
    """A bound of that sum for any weights: by the mean times at which work is done (Goemans)."""
    means: dict[int, float] = {}
    _served(items, lambda item, left: item.seconds / item.weight, means)
    return sum(
        item.weight * (means[number] + item.seconds / 2 - item.arrival_s)
        for number, item in enumerate(items)
    )


def _served(
    items: Sequence[_Work],
    rank: Callable[[_Work, float], float],
    means: dict[int, float] | None = None,
) -> dict[int, float]:
    """When each item ends on one machine that always runs the lowest rank, by item's number.

    `rank` gets an item and its seconds left; `means` receives the mean time at which each was run.
    """
    coming = sorted(range(len(items)), key=lambda number: -items[number].arrival_s)
    ready: list[tuple[float, int, float]] = []
    ends: dict[int, float] = {}
    busy = [0.0] * len(items)
    now = 0.0
    while coming or ready:
        if not ready:
            now = max(now, items[coming[-1]].arrival_s)
        while coming and items[coming[-1]].arrival_s <= now:
            number = coming.pop()
            seconds = items[number].seconds
            heappush(ready, (rank(items[number], seconds), number, seconds))
        _, number, left = heappop(ready)
        until = items[coming[-1]].arrival_s if coming else inf
        run = min(left, until - now)
        busy[number] += run * (now + run / 2)
        now += run
        left -= run
        if left > 0:
            heappush(ready, (rank(items[number], left), number, left))
            continue
        ends[number] = now
        if means is not None:
            seconds = items[number].seconds
            means[number] = busy[number] / seconds if seconds else now
    return ends
