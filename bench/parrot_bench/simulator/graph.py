"""Plans of described applications, with the objectives that a gateway deduces from their graph.

The deduction of objectives, task groups and successors follows the rules that the docstring of
`parrot_gateway.semantic.graph.deduction` states (Parrot, OSDI '24, section 5.2), for one wait with
the objective `latency` on each of some calls. The gateway's own code is not used, since this
package imports nothing of it; a test compares the two.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

from parrot_scheduler.task import LATENCY, THROUGHPUT, GroupRef

from parrot_bench.applications.description import Application, Call, Output, Part, Passage
from parrot_bench.simulator.plan import ApplicationPlan, CallPlan, Segment

#: Characters of instructions that make a token.
CHARACTERS_PER_TOKEN = 4
_OBJECTIVES = {"latency": LATENCY, "throughput": THROUGHPUT, "": THROUGHPUT}


def plan_of(
    application: Application,
    arrival_s: float,
    *,
    deduce: bool = False,
    max_tokens: int = 0,
    tenant: str = "default",
) -> ApplicationPlan:
    """The plan of a described application.

    Args:
        application: the description.
        arrival_s: when it arrives.
        deduce: objectives, groups and successors follow from the graph; otherwise calls keep the
            objectives that they have.
        max_tokens: calls ask for at least that many.
        tenant: of the plan.
    """
    calls = {call.name: index for index, call in enumerate(application.calls)}
    plans = [
        CallPlan(
            index=index,
            prompt=tuple(
                _segment(part, application, calls)
                for message in call.chat
                for part in message.content
            ),
            output_tokens=call.tokens,
            max_tokens=max(max_tokens, call.tokens),
            after=_after(call, calls),
            pause_s=call.pause_s,
            template=call.role,
            objective=_OBJECTIVES[call.objective],
        )
        for index, call in enumerate(application.calls)
    ]
    found = deduced(plans) if deduce else tuple(plans)
    return ApplicationPlan(application.name, arrival_s, found, tenant, application.kind)


def _segment(part: Part, application: Application, calls: Mapping[str, int]) -> Segment:
    if isinstance(part, Passage):
        return Segment(("text", part.source, part.number), part.tokens)
    if isinstance(part, Output):
        index = calls[part.call]
        return Segment(("output", application.name, index), application.calls[index].tokens)
    return _words(part)


@lru_cache(maxsize=1024)
def _words(text: str) -> Segment:
    return Segment(text, max(1, len(text) // CHARACTERS_PER_TOKEN))


def _after(call: Call, calls: Mapping[str, int]) -> tuple[int, ...]:
    """The calls that a call waits for: of those in its history, the last one alone."""
    reads = [part.call for part in call.prompt if isinstance(part, Output)]
    for message in reversed(call.history):
        said = [part.call for part in message.content if isinstance(part, Output)]
        if said:
            reads.append(said[-1])
            break
    return tuple(sorted({calls[name] for name in reads}))


def deduced(calls: Sequence[CallPlan], *waited: int) -> tuple[CallPlan, ...]:
    """The calls with `objective`, `groups` and `successors` set.

    `calls` are in order of `index`, which is a topological order. `waited` are the indices of the
    calls whose outputs somebody waits for; without any, those that no other call reads.
    """
    readers: list[list[int]] = [[] for _ in calls]
    for call in calls:
        for producer in call.after:
            readers[producer].append(call.index)
    successors = [0] * len(calls)
    for call in reversed(calls):
        successors[call.index] = max((successors[r] + 1 for r in readers[call.index]), default=0)

    critical: set[int] = set()
    groups: dict[frozenset[int], None] = {}
    # One walk for each wait: a call that is alone on its height in one of them is critical.
    for root in waited or tuple(c.index for c in calls if not readers[c.index]):
        heights = _heights(calls, root)
        sharing = Counter(heights.values())
        critical |= {index for index, height in heights.items() if sharing[height] == 1}
        shared = {height for height, number in sharing.items() if number > 1}
        groups.update(_groups(calls, heights, shared))
    refs: defaultdict[int, list[GroupRef]] = defaultdict(list)
    for number, members in enumerate(groups):
        ref = GroupRef(f"group-{number}", len(members), LATENCY)
        for member in members:
            refs[member].append(ref)
    # By position, which takes a third of the time of `dataclasses.replace`.
    return tuple(
        CallPlan(
            call.index,
            call.prompt,
            call.output_tokens,
            call.max_tokens,
            call.after,
            call.pause_s,
            call.template,
            LATENCY if call.index in critical else THROUGHPUT,
            tuple(refs[call.index]),
            successors[call.index],
        )
        for call in calls
    )


def _heights(calls: Sequence[CallPlan], root: int) -> dict[int, int]:
    """Longest way down from each needed call to the wait."""
    heights = {root: 0}
    for call in reversed(calls):
        height = heights.get(call.index)
        if height is not None:
            for producer in call.after:
                heights[producer] = max(heights.get(producer, 0), height + 1)
    return heights


def _groups(
    calls: Sequence[CallPlan], heights: dict[int, int], shared: set[int]
) -> dict[frozenset[int], None]:
    """Group calls of one height that feed one consumer right below; the others by height."""
    found: dict[frozenset[int], None] = {}
    for index, height in heights.items():
        if height + 1 in shared:
            members = frozenset(p for p in calls[index].after if heights[p] == height + 1)
            if len(members) > 1:
                found[members] = None
    placed = {member for members in found for member in members}
    rest: defaultdict[int, set[int]] = defaultdict(set)
    for index, height in heights.items():
        if height in shared and index not in placed:
            rest[height].add(index)
    found.update(dict.fromkeys(map(frozenset, rest.values())))
    return found
