"""Plans of described applications, with the objectives that the gateway deduces for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from parrot_scheduler.task import LATENCY, THROUGHPUT, GroupRef

from parrot_bench.applications.description import Application, Call, Output, Part, Passage
from parrot_bench.simulator.plan import ApplicationPlan, CallPlan, Segment
from parrot_gateway.semantic.graph.deduction import deduce
from parrot_gateway.semantic.graph.graph import Graph
from parrot_gateway.semantic.graph.node import CallNode
from parrot_gateway.semantic.variable import Variable

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


def deduced(calls: Sequence[CallPlan]) -> tuple[CallPlan, ...]:
    """The calls with `objective`, `groups` and `successors`, as the gateway deduces them.

    Somebody waits, with `latency`, for the calls that no other call reads. `calls` are in order of
    `index`, which is a topological order.
    """
    outputs = [f"output-{call.index}" for call in calls]
    variables = {name: Variable(name, name, "simulated", max_value_bytes=1) for name in outputs}
    graph = Graph("simulated", variables, max_unfinished=len(calls), max_finished=1)
    successors = [0] * len(calls)
    for call in calls:
        inputs = tuple(outputs[producer] for producer in call.after)
        node = CallNode(
            id=str(call.index), session_id="simulated", inputs=inputs, output=outputs[call.index]
        )
        graph.add(node)
    for call in reversed(calls):
        for producer in call.after:
            successors[producer] = max(successors[producer], successors[call.index] + 1)
    found = deduce(
        graph, {outputs[i]: LATENCY for i, number in enumerate(successors) if not number}
    )
    refs: list[list[GroupRef]] = [[] for _ in calls]
    for number, (members, objective) in enumerate(found.groups.items()):
        for member in members:
            refs[int(member)].append(GroupRef(f"group-{number}", len(members), objective))
    return tuple(
        replace(
            call,
            objective=found.objective_of(str(call.index)),
            groups=tuple(refs[call.index]),
            successors=successors[call.index],
        )
        for call in calls
    )
