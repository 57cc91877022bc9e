"""What is known of a session's call, in the words of `placing.CallMetadata`."""

from __future__ import annotations

from parrot_scheduler.task import GroupRef

from parrot_gateway.generation.placement import CallMetadata
from parrot_gateway.semantic.execution.job import Job
from parrot_gateway.semantic.execution.objective_tracker import ObjectiveTracker
from parrot_gateway.semantic.graph.graph import Graph

#: Calls that are looked at to find out how much waits for one.
MAX_LOOKED_AT = 256


def metadata_of(job: Job, objectives: ObjectiveTracker, tenant: str) -> CallMetadata:
    """What a call that is about to run is for."""
    session = job.session.id
    groups = [
        # Its smallest member names a group; all members agree on that.
        GroupRef(f"{session}/{min(members)}", len(members), objective)
        for members, objective in objectives.groups_of(job)
    ]
    declared = objectives.declared_group_of(job)
    if declared is not None:
        name, size, objective = declared
        # NOTE: also while it is the only member: others that come go where it is.
        groups.insert(0, GroupRef(f"{session}/group {name}", size, objective))
    return CallMetadata(
        tenant=tenant,
        call=job.id,
        application=session,
        objective=job.call.objective,
        groups=tuple(groups),
        priority=job.spec.priority,
        successors=chain_behind(job.session.graph, job.id),
        prefers=job.preferred_engine,
    )


def chain_behind(graph: Graph, call_id: str) -> int:
    """Unfinished nodes on the longest way onward from a call, itself not included.

    Only the `MAX_LOOKED_AT` nearest nodes are looked at: beyond them it makes no difference.
    """
    lengths: dict[str, int] = {}
    stack, seen = [call_id], {call_id}
    while stack:
        node_id = stack[-1]
        fresh = [node.id for node in graph.consumers(node_id) if node.id not in seen]
        if fresh and len(seen) < MAX_LOOKED_AT:
            fresh = fresh[: MAX_LOOKED_AT - len(seen)]
            seen.update(fresh)
            stack.extend(fresh)
            continue
        stack.pop()
        behind = (lengths.get(node.id, -1) for node in graph.consumers(node_id))
        lengths[node_id] = max(behind, default=-1) + 1
    return lengths[call_id]
