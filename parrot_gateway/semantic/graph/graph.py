"""The graph of a session: which calls write and read each variable.

Bipartite and acyclic: calls and transforms (nodes) on one side, variables on the other. It grows
call by call, in any order: a reader may come before its producer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from graphlib import TopologicalSorter
from typing import Literal, NamedTuple

from parrot_gateway.exceptions import (
    CycleError,
    DoubleProducerError,
    SessionFullError,
    VariableNotFoundError,
)
from parrot_gateway.semantic.graph.node import CallNode, Node, NodeState
from parrot_gateway.semantic.variable import Failure, Variable


class GraphShape(NamedTuple):
    """Size of the kept part of a graph."""

    nodes: int
    #: Nodes on its longest path, and in its widest stage.
    depth: int
    width: int


@dataclass(eq=False)
class Graph:
    """The nodes of one session."""

    #: The session's name, for messages.
    session: str
    #: The session's variables by id; a kept node's variables must stay there.
    variables: Mapping[str, Variable]
    _: KW_ONLY
    #: Maximum waiting and running nodes; `add` refuses more.
    max_unfinished: int
    #: Maximum finished nodes; the oldest are dropped first.
    max_finished: int

    def __post_init__(self) -> None:
        #: Unfinished nodes in order of submission, finished ones in order of finishing.
        self._unfinished: dict[str, Node] = {}
        self._finished: dict[str, Node] = {}
        #: Unfinished calls by declared group.
        self._groups: dict[str, dict[str, CallNode]] = {}
        self._pruned = 0
        self._stages: dict[str, int] | None = {}
        #: Incremented by each change of its nodes or their states.
        self.version = 0

    def __len__(self) -> int:
        return len(self._unfinished) + len(self._finished)

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._unfinished or node_id in self._finished

    def __iter__(self) -> Iterator[Node]:
        yield from list(self._finished.values())
        yield from list(self._unfinished.values())

    def get(self, node_id: str) -> Node | None:
        return self._unfinished.get(node_id) or self._finished.get(node_id)

    @property
    def unfinished(self) -> tuple[Node, ...]:
        """Return the waiting and running nodes in order of submission."""
        return tuple(self._unfinished.values())

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    @property
    def num_pruned(self) -> int:
        """Return the number of dropped finished nodes."""
        return self._pruned

    def add(self, node: Node) -> None:
        """Add a waiting node as producer and reader of its variables.

        After an error the graph is as before.

        Raises:
            VariableNotFoundError: one of its variables does not exist.
            DoubleProducerError: its output has a producer or a value already.
            CycleError: it would need its own output.
            SessionFullError: too many nodes are unfinished.
            ValueError: its id is taken or it is not waiting.
        """
        if node.id in self or node.state != "waiting":
            raise ValueError(f"node {node.id} is there already or {node.state}")
        for variable_id in (*node.inputs, *([] if node.output is None else [node.output])):
            if variable_id not in self.variables:
                raise VariableNotFoundError(variable_id)
        if node.output is not None:
            self._check_output(node.output)
            self._check_cycle(node, node.output)
        if len(self._unfinished) >= self.max_unfinished:
            raise SessionFullError(
                self.session, f"{len(self._unfinished)} waiting or running calls", "max_calls"
            )
        self._unfinished[node.id] = node
        self.version += 1
        if isinstance(node, CallNode) and node.group is not None:
            self._groups.setdefault(node.group, {})[node.id] = node
        for variable_id in node.inputs:
            self.variables[variable_id].consumers.add(node.id)
        if node.output is not None:
            self.variables[node.output].producer = node.id
        if self._stages is not None:
            if self.consumers(node.id):
                self._stages = None
            else:
                before = (self._stages[each.id] + 1 for each in self.producers(node.id))
                self._stages[node.id] = max(before, default=0)

    def start(self, node_id: str, now: float) -> None:
        node = self._unfinished[node_id]
        self._move(node, "running")
        node.started = now

    def finish(
        self,
        node_id: str,
        state: Literal["done", "failed", "cancelled"],
        now: float,
        failure: Failure | None = None,
    ) -> None:
        """End a node; drop the oldest finished nodes if there are too many.

        Raises:
            ValueError: its output is not final, or the node cannot end this way.
        """
        node = self._unfinished[node_id]
        if node.output is not None and not self.variables[node.output].is_final:
            raise ValueError(f"node {node_id} cannot be {state}: set or fail its output before")
        self._move(node, state)
        node.finished = now
        node.failure = failure
        del self._unfinished[node_id]
        self._finished[node_id] = node
        if isinstance(node, CallNode) and node.group is not None:
            members = self._groups[node.group]
            del members[node_id]
            if not members:
                del self._groups[node.group]
        self._prune()

    def producer_of(self, variable_id: str) -> Node | None:
        variable = self.variables.get(variable_id)
        return self.get(variable.producer) if variable and variable.producer else None

    def consumers_of(self, variable_id: str) -> list[Node]:
        """Return the kept nodes that read a variable, by id."""
        variable = self.variables.get(variable_id)
        if variable is None:
            return []
        return [node for node in map(self.get, sorted(variable.consumers)) if node is not None]

    def producers(self, node_id: str) -> list[Node]:
        """Return the distinct kept nodes that a node reads from, in order of its inputs."""
        node = self.get(node_id)
        if node is None:
            return []
        found = (self.producer_of(variable_id) for variable_id in node.inputs)
        return list({n.id: n for n in found if n is not None}.values())

    def consumers(self, node_id: str) -> list[Node]:
        """Return the kept nodes that read a node's output, by id."""
        node = self.get(node_id)
        return [] if node is None or node.output is None else self.consumers_of(node.output)

    def members(self, group: str) -> Mapping[str, CallNode]:
        """Return the unfinished calls of a declared group by id, oldest first."""
        return self._groups.get(group, {})

    def stages(self) -> Mapping[str, int]:
        """Return the longest path length to every kept node: 0 without kept producers.

        Takes time linear in the graph if a producer came after its readers or was dropped before
        them; otherwise it is immediate.
        """
        if self._stages is None:
            self._stages = self._all_stages()
        return self._stages

    def shape(self) -> GraphShape:
        """Return its size; linear in the graph, see `stages`."""
        stages = Counter(self.stages().values())
        return GraphShape(len(self), len(stages), max(stages.values(), default=0))

    def _all_stages(self) -> dict[str, int]:
        producers = {node.id: [each.id for each in self.producers(node.id)] for node in self}
        stages: dict[str, int] = {}
        for node_id in TopologicalSorter(producers).static_order():
            stages[node_id] = max((stages[each] + 1 for each in producers[node_id]), default=0)
        return stages

    def forget(self, variable_id: str) -> bool:
        """Drop the nodes around a variable, so that it can be deleted.

        Returns:
            False, without a change, if one of them is unfinished.
        """
        variable = self.variables[variable_id]
        around = [variable.producer, *variable.consumers]
        if any(node_id in self._unfinished for node_id in around):
            return False
        for node_id in around:
            if node_id is not None and node_id in self._finished:
                self._let_go(node_id)
        return True

    def clear(self) -> None:
        self._unfinished.clear()
        self._groups.clear()
        self._finished.clear()
        self._stages = {}
        self.version += 1

    def check_integrity(self) -> None:
        """Assert the invariants; for tests."""
        assert self._stages is None or self._stages == self._all_stages()
        assert len(self._unfinished) <= self.max_unfinished
        assert len(self._finished) <= self.max_finished
        for node in self:
            assert node.is_finished == (node.id in self._finished)
            assert all(node.id in self.variables[v].consumers for v in node.inputs)
            assert node.output is None or self.variables[node.output].producer == node.id
        grouped = {n.id for n in self._unfinished.values() if isinstance(n, CallNode) and n.group}
        assert grouped == {n for members in self._groups.values() for n in members}
        assert all(self._groups.values())
        for variable in self.variables.values():
            for consumer in map(self.get, variable.consumers):
                assert consumer is not None
                assert variable.id in consumer.inputs

    def _check_output(self, variable_id: str) -> None:
        variable = self.variables[variable_id]
        if variable.producer is not None:
            producer = self.get(variable.producer)
            name = (producer.name if producer is not None else "") or variable.producer
            raise DoubleProducerError(variable.name, f"call '{name}'")
        if variable.state != "empty":
            raise DoubleProducerError(variable.name, "its user")

    def _check_cycle(self, node: Node, output: str) -> None:
        """Walk down from the output; usually nothing reads it yet."""
        inputs = set(node.inputs)
        came_from: dict[str, tuple[str, str]] = {}
        stack, seen = [output], {output}
        while stack:
            variable_id = stack.pop()
            if variable_id in inputs:
                raise CycleError(self._cycle_path(node, output, variable_id, came_from))
            for reader in self.consumers_of(variable_id):
                if reader.output is not None and reader.output not in seen:
                    seen.add(reader.output)
                    came_from[reader.output] = (variable_id, reader.id)
                    stack.append(reader.output)

    def _cycle_path(
        self, node: Node, output: str, last: str, came_from: Mapping[str, tuple[str, str]]
    ) -> list[str]:
        path = [self.variables[last].name]
        while last != output:
            last, reader_id = came_from[last]
            reader = self.get(reader_id)
            path += [(reader.name if reader else "") or reader_id, self.variables[last].name]
        return [node.name or node.id, *reversed(path)]

    def _move(self, node: Node, to: NodeState) -> None:
        if node.is_finished or to == node.state:
            raise ValueError(f"node {node.id} is {node.state} and cannot become {to}")
        node.state = to
        self.version += 1

    def _prune(self) -> None:
        while len(self._finished) > self.max_finished:
            self._let_go(next(iter(self._finished)))

    def _let_go(self, node_id: str) -> None:
        if self._stages is not None:
            if self.consumers(node_id):
                self._stages = None
            else:
                del self._stages[node_id]
        node = self._finished.pop(node_id)
        for variable_id in node.inputs:
            self.variables[variable_id].consumers.discard(node_id)
        self._pruned += 1
        self.version += 1
