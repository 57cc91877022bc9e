"""Deduces each call's objective by walking back from the variables that are waited for.

For one awaited variable, take the unfinished calls that it needs. The height of each is the length
of the longest path from it to the variable; transforms count nothing.

- A call alone at its height is on the **critical chain**: everything after it waits for it.
- Calls that share a height can run side by side. Those that feed the same consumer directly below
  are a **task group**: they matter only when the last one ends, so they may be batched widely. The
  other calls of that height (each the only producer of its consumer, in parallel branches) form
  one more group, possibly of one.
- Waited for with `latency`, `ttft` or `tpot`: the chain gets latency and the awaited call itself
  the given objective; group members get throughput, and the group as a whole latency.
- With `deadline`: chain, members and groups all get it.
- With `throughput`: all get throughput, and there are no groups.

With several waits, and objectives that callers gave, the stronger one wins for each call and group
(`Objective.strength`). A call may be in any number of groups.

After Parrot (OSDI '24), section 5.2, with two differences: a later and stronger wait deduces again,
and a call shared by two consumers is in both groups.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

from parrot_scheduler.task import LATENCY, THROUGHPUT, Objective, stronger

from parrot_gateway.semantic.graph.graph import Graph
from parrot_gateway.semantic.graph.node import CallNode

#: Maximum calls visited in one deduction over all waits; the weakest waits are skipped beyond it.
MAX_STEPS = 200_000


@dataclass(frozen=True, slots=True)
class Deduction:
    """The result of `deduce`."""

    #: By id, objectives of calls that somebody waits for; all others are throughput.
    objectives: Mapping[str, Objective] = field(default_factory=dict)
    #: Task groups, as sets of call ids.
    groups: Mapping[frozenset[str], Objective] = field(default_factory=dict)

    def objective_of(self, call_id: str) -> Objective:
        return self.objectives.get(call_id, THROUGHPUT)

    def groups_of(self, call_id: str) -> list[frozenset[str]]:
        """Return the task groups of a call, smallest first."""
        return sorted((g for g in self.groups if call_id in g), key=lambda g: (len(g), sorted(g)))

    def restricted_to(self, calls: Collection[str]) -> Deduction:
        """Return a copy with these calls and their groups only."""
        return Deduction(
            {call: objective for call, objective in self.objectives.items() if call in calls},
            {group: it for group, it in self.groups.items() if not group.isdisjoint(calls)},
        )


def travels_as(objective: Objective) -> Objective:
    """Return the objective of a call's producers: latency for a call with `ttft` or `tpot`."""
    return LATENCY if objective.kind in ("ttft", "tpot") else objective


def deduce(
    graph: Graph,
    waited: Mapping[str, Objective],
    *,
    calls: Mapping[str, Objective] | None = None,
    start: Deduction | None = None,
) -> Deduction:
    """Deduce objectives and task groups.

    Args:
        graph: unknown and finished parts of it are skipped.
        waited: objectives of the waits, by variable id.
        calls: objectives of calls whose clients wait for the answer itself, or gave them, by call
            id.
        start: an earlier result to extend, which costs only the walk back from the new waits.
            Nothing of it is withdrawn, even for a call that is no longer alone at its height.
    """
    waits: list[tuple[Objective, str, bool]] = [(o, v, False) for v, o in waited.items()]
    waits += [(o, c, True) for c, o in (calls or {}).items()]
    waits.sort(key=lambda a: ((-a[0].strength[0], -a[0].strength[1]), a[1], a[2]))
    walker = _Walker(graph, start or Deduction())
    for objective, name, is_call in waits:
        if is_call:
            call = graph.get(name)
            if isinstance(call, CallNode) and not call.is_finished:
                walker.walk([call], objective, is_direct=True)
        else:
            producer = graph.producer_of(name)
            is_direct = isinstance(producer, CallNode)
            walker.walk(calls_behind(graph, [name]), objective, is_direct=is_direct)
    return walker.result()


def calls_behind(graph: Graph, variable_ids: Iterable[str]) -> list[CallNode]:
    """Return the unfinished calls that write variables, through any number of transforms."""
    found: dict[str, CallNode] = {}
    stack, seen = list(variable_ids), set[str]()
    while stack:
        node = graph.producer_of(stack.pop())
        if node is None or node.is_finished or node.id in seen:
            continue
        seen.add(node.id)
        if isinstance(node, CallNode):
            found[node.id] = node
        else:
            stack.extend(node.inputs)
    return list(found.values())


class _Walker:
    """State of one deduction."""

    def __init__(self, graph: Graph, start: Deduction) -> None:
        self._graph = graph
        self._objectives = dict(start.objectives)
        self._groups = dict(start.groups)
        self._producers: dict[str, list[CallNode]] = {}
        self._steps = 0

    def result(self) -> Deduction:
        return Deduction(self._objectives, self._groups)

    def walk(self, roots: Sequence[CallNode], objective: Objective, *, is_direct: bool) -> None:
        """Walk back from one wait. `is_direct`: the only root writes the awaited variable."""
        behind = travels_as(objective)
        if self._steps > MAX_STEPS:
            for root in roots:
                self._raise_to(root.id, objective if is_direct else behind)
            return
        if objective == THROUGHPUT:
            self._walk_throughput(roots)
            return
        heights = self._heights(roots)
        alone = Counter(heights.values())
        for call_id, height in heights.items():
            if alone[height] == 1:
                self._raise_to(call_id, objective if is_direct and height == 0 else behind)
            else:
                self._raise_to(call_id, THROUGHPUT if behind == LATENCY else behind)
        self._form_groups(roots, heights, {h for h, n in alone.items() if n > 1}, behind)

    def _walk_throughput(self, roots: Sequence[CallNode]) -> None:
        stack = list(roots)
        while stack:
            call = stack.pop()
            self._steps += 1
            if call.id not in self._objectives:
                self._objectives[call.id] = THROUGHPUT
                stack.extend(self._producers_of(call))

    def _heights(self, roots: Sequence[CallNode]) -> dict[str, int]:
        """Return heights by call id; a root that feeds another root is above it."""
        needed = {root.id: root for root in roots}
        sorter: TopologicalSorter[str] = TopologicalSorter()
        stack = list(roots)
        while stack:
            call = stack.pop()
            self._steps += 1
            producers = self._producers_of(call)
            sorter.add(call.id, *(producer.id for producer in producers))
            stack += [producer for producer in producers if producer.id not in needed]
            needed |= {producer.id: producer for producer in producers}
        heights = dict.fromkeys((root.id for root in roots), 0)
        for call_id in reversed([*sorter.static_order()]):
            for producer in self._producers[call_id]:
                heights[producer.id] = max(heights.get(producer.id, 0), heights[call_id] + 1)
        return heights

    def _form_groups(
        self,
        roots: Sequence[CallNode],
        heights: Mapping[str, int],
        shared: set[int],
        objective: Objective,
    ) -> None:
        """Form groups by consumer, then groups of the remaining calls by height.

        Only producers directly above their consumer count. Calls of one height do not need each
        other, so all members of a group can run at once.
        """
        placed: set[str] = set()
        consumers = [(height, self._producers[call_id]) for call_id, height in heights.items()]
        for height, producers in [(-1, list(roots)), *consumers]:
            if height + 1 in shared:
                members = frozenset(p.id for p in producers if heights[p.id] == height + 1)
                if len(members) > 1:
                    self._group(members, objective)
                    placed |= members
        left: defaultdict[int, set[str]] = defaultdict(set)
        for call_id, height in heights.items():
            if height in shared and call_id not in placed:
                left[height].add(call_id)
        for rest in left.values():
            self._group(frozenset(rest), objective)

    def _producers_of(self, call: CallNode) -> list[CallNode]:
        if call.id not in self._producers:
            self._producers[call.id] = calls_behind(self._graph, call.inputs)
        return self._producers[call.id]

    def _raise_to(self, call_id: str, objective: Objective) -> None:
        self._objectives[call_id] = stronger(self._objectives.get(call_id, THROUGHPUT), objective)

    def _group(self, members: frozenset[str], objective: Objective) -> None:
        self._groups[members] = stronger(self._groups.get(members, THROUGHPUT), objective)
