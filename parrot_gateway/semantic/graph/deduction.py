"""What each call is for, deduced by walking back from what somebody waits for.

For one waited variable, take the unfinished calls that it needs, and the height of each: the
longest way down from it to the waited variable. Transforms take no time and are looked through.

- A call alone on its height is on the **critical chain**: everything behind it waits for it.
- Calls that share a height can run side by side. Those that feed one consumer directly below are
  a **task group**: they matter only together, when the last one ends, so they may be batched
  large. Calls of one height that have no such fellows (each the only producer of its consumer, in
  parallel branches) form one more group, possibly of one.
- Waited for with `latency`, `ttft` or `tpot`: the chain gets latency, the waited call itself what
  was asked; group members get throughput, and the group as a whole latency.
- With `deadline`: all of them must be done by then, so chain, members and groups carry it.
- With `throughput`: all get throughput, and there are no groups.

Several waits, and objectives that callers gave their calls: the stronger wins, for each call and
each group; a call may be in any number of groups (`parrot_gateway.semantic.graph.objective` has the
order).

After Parrot (OSDI '24), section 5.2; unlike there, a later and stronger wait deduces anew, and a
call shared by two consumers is in both groups. Placing calls is the scheduler's business.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from parrot_scheduler.task import LATENCY, THROUGHPUT, Objective, stronger

from parrot_gateway.semantic.graph.graph import Graph
from parrot_gateway.semantic.graph.node import CallNode

#: Calls visited in one deduction, over all waits; weaker waits beyond it do not travel.
MAX_STEPS = 200_000


@dataclass(frozen=True, slots=True)
class Deduction:
    """What was deduced; never changed afterwards."""

    #: By id of the calls that somebody waits for; all others are throughput.
    objectives: Mapping[str, Objective] = field(default_factory=dict)
    #: Sets of ids that matter together, and what for.
    groups: Mapping[frozenset[str], Objective] = field(default_factory=dict)
    #: Ids of calls on the critical chain of some wait.
    critical: frozenset[str] = frozenset()
    #: Waits that did not travel, because the graph is too large for that many.
    truncated: int = 0

    def objective_of(self, call_id: str) -> Objective:
        """What a call is for."""
        return self.objectives.get(call_id, THROUGHPUT)

    def groups_of(self, call_id: str) -> list[frozenset[str]]:
        """The task groups of a call, smallest first."""
        return sorted((g for g in self.groups if call_id in g), key=lambda g: (len(g), sorted(g)))


def travels_as(objective: Objective) -> Objective:
    """What the producers of a call are for, when that is what the call is for.

    A first token, or a steady stream, is waited for by somebody who sits there now.
    """
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
        graph: unknown and finished parts of it are passed over.
        waited: by variable id, what it is waited for.
        calls: by call id, what was asked of a call that nobody waits for by a variable (its client
            waits for the answer itself). Without `start`, what callers gave (`given_objective`)
            counts as well.
        start: add to what was deduced before: costs only the walk back from the new waits. As the
            graph grows, a call that was alone may get company; only a deduction without `start`
            takes back what was deduced.
    """
    asked: list[tuple[Objective, str, bool]] = [(o, v, False) for v, o in waited.items()]
    asked += [(o, c, True) for c, o in (calls or {}).items()]
    if start is None:
        for node in graph.unfinished:
            if isinstance(node, CallNode) and node.given_objective is not None:
                asked.append((node.given_objective, node.id, True))
    asked.sort(key=lambda a: ((-a[0].strength[0], -a[0].strength[1]), a[1], a[2]))
    walker = _Walker(graph, start or Deduction())
    for objective, name, is_call in asked:
        if is_call:
            call = graph.get(name)
            if isinstance(call, CallNode) and not call.is_finished:
                walker.walk([call], objective, is_direct=True)
        else:
            producer = graph.producer_of(name)
            walker.walk(
                walker.calls_behind([name]), objective, is_direct=isinstance(producer, CallNode)
            )
    return walker.result()


class _Walker:
    """One deduction in the making."""

    def __init__(self, graph: Graph, start: Deduction) -> None:
        self._graph = graph
        self._objectives = dict(start.objectives)
        self._groups = dict(start.groups)
        self._critical = set(start.critical)
        self._truncated = start.truncated
        self._producers: dict[str, list[CallNode]] = {}
        self._steps = 0

    def result(self) -> Deduction:
        return Deduction(self._objectives, self._groups, frozenset(self._critical), self._truncated)

    def calls_behind(self, variable_ids: Iterable[str]) -> list[CallNode]:
        """The unfinished calls that write variables, through any number of transforms."""
        found: dict[str, CallNode] = {}
        stack, seen = list(variable_ids), set[str]()
        while stack:
            node = self._graph.producer_of(stack.pop())
            if node is None or node.is_finished or node.id in seen:
                continue
            seen.add(node.id)
            if isinstance(node, CallNode):
                found[node.id] = node
            else:
                stack.extend(node.inputs)
        return list(found.values())

    def walk(self, roots: Sequence[CallNode], objective: Objective, *, is_direct: bool) -> None:
        """Follow one wait back. `is_direct`: the text of the one root is what is waited for."""
        behind = travels_as(objective)
        if self._steps > MAX_STEPS:
            self._truncated += 1
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
                self._critical.add(call_id)
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
        """Longest way from each needed call down to the wait; a root that feeds another is up."""
        needed = {root.id: root for root in roots}
        readers: Counter[str] = Counter()
        stack = list(roots)
        while stack:
            call = stack.pop()
            self._steps += 1
            for producer in self._producers_of(call):
                readers[producer.id] += 1
                if producer.id not in needed:
                    needed[producer.id] = producer
                    stack.append(producer)
        heights = dict.fromkeys((root.id for root in roots), 0)
        order = [call for call in needed.values() if readers[call.id] == 0]
        for call in order:
            for producer in self._producers_of(call):
                heights[producer.id] = max(heights.get(producer.id, 0), heights[call.id] + 1)
                readers[producer.id] -= 1
                if readers[producer.id] == 0:
                    order.append(producer)
        return heights

    def _form_groups(
        self,
        roots: Sequence[CallNode],
        heights: Mapping[str, int],
        shared: set[int],
        objective: Objective,
    ) -> None:
        """Groups by consumer, and of what is left by height.

        Only producers on the height right above their consumer count: of two calls of one height
        neither needs the other, so that all members of a group can run at once.
        """
        placed: set[str] = set()
        consumers: list[tuple[int, Sequence[CallNode]]] = [(-1, roots)]
        for call_id, height in heights.items():
            consumers.append((height, self._producers[call_id]))
        for height, producers in consumers:
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
        found = self._producers.get(call.id)
        if found is None:
            found = self._producers[call.id] = self.calls_behind(call.inputs)
        return found

    def _raise_to(self, call_id: str, objective: Objective) -> None:
        self._objectives[call_id] = stronger(self._objectives.get(call_id, THROUGHPUT), objective)

    def _group(self, members: frozenset[str], objective: Objective) -> None:
        self._groups[members] = stronger(self._groups.get(members, THROUGHPUT), objective)
