"""Prefix claims: the prompts of placed tasks as a radix tree with references counted by engine.

A prompt is a chain of block keys, and two chains agree up to where they part. A node of the tree
is a stretch of blocks without a branch, however long: placing a task touches the few nodes on its
path, not each of its blocks, and bisection finds where it parts from others.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from parrot_scheduler.prefix_index.holders import PrefixHolders


class RadixNode:
    """Blocks `start` to `end` of the chain `keys`, within which no claim parts from another.

    A row refers to a node once for each of its claims that end there, and once for each child that
    the row refers to. So a new claim is counted at the node where it ends, or where it meets what
    its row refers to already, and nowhere above.
    """

    __slots__ = ("children", "end", "extra_references", "keys", "last", "parent", "rows", "start")

    def __init__(
        self, keys: tuple[Hashable, ...], start: int, end: int, parent: RadixNode | None
    ) -> None:
        self.keys = keys
        self.start = start
        self.end = end
        #: Its last key: a chain that has it agrees with all of the node.
        self.last = keys[end - 1] if end else None
        self.parent = parent
        #: By their first key.
        self.children: dict[Hashable, RadixNode] = {}
        #: Rows that refer to it, bit r for row r.
        self.rows = 0
        #: By row, references beyond the first; rows with one reference are left out. None: no row
        #: has more, as mostly.
        self.extra_references: dict[int, int] | None = None


class ClaimTree:
    """The radix tree of all claims. A row is an engine's place in its table."""

    def __init__(self) -> None:
        self._root = RadixNode((), 0, 0, None)
        # Where the last chain looked up leaves the tree, for `add`: a task is looked up just before
        # it is placed. Reset by any change.
        self._walked: Sequence[Hashable] | None = None
        self._deepest = self._root
        self._depth = 0

    def holders(self, prefix: Sequence[Hashable]) -> PrefixHolders:
        """Rows that need a prompt's leading blocks, and how many of them."""
        found: PrefixHolders = []
        deepest, depth, length = self._root, 0, len(prefix)
        rows, children = 0, deepest.children
        while depth < length:
            node = children.get(prefix[depth])
            if node is None:
                break
            here = node.rows
            # Nodes that the same rows refer to are one step.
            if here != rows:
                if depth:
                    found.append((rows, depth))
                rows = here
            deepest, end = node, node.end
            depth += 1
            # More than its first block: the usual end of a node first, where all of it agrees.
            if depth < end:
                if end > length or node.last != prefix[end - 1]:
                    depth = _agrees_up_to(node, prefix)
                    break
                depth = end
            children = node.children
        if depth:
            found.append((rows, depth))
        self._walked, self._deepest, self._depth = prefix, deepest, depth
        return found

    def add(self, row: int, keys: tuple[Hashable, ...]) -> tuple[RadixNode, int]:
        """Add a claim: the node where it ends, and how many of its blocks the row needed."""
        if self._walked is not keys:
            self.holders(keys)
        last, depth, length = self._deepest, self._depth, len(keys)
        self._walked = None
        if depth < last.end:
            last = _split(last, depth)
        if depth < length:
            above, last = last, RadixNode(keys, depth, length, last)
            above.children[keys[depth]] = last
        bit = 1 << row
        node, parent = last, last.parent
        # Up to what the row needs already.
        while parent is not None and not node.rows & bit:
            node.rows |= bit
            node = parent
            parent = node.parent
        if parent is not None:
            extra = node.extra_references
            if extra is None:
                node.extra_references = {row: 1}
            else:
                extra[row] = extra.get(row, 0) + 1
        return last, node.end

    def remove(self, row: int, last: RadixNode) -> int:
        """Remove a claim that ends at this node: how many blocks the row needs no more."""
        self._walked = None
        bit, end = 1 << row, last.end
        node, parent = last, last.parent
        while parent is not None:
            extra = node.extra_references
            if extra is not None and (count := extra.get(row, 0)):
                if count > 1:
                    extra[row] = count - 1
                else:
                    del extra[row]
                    if not extra:
                        node.extra_references = None
                if len(node.children) == 1:
                    _merge(node, parent)
                break
            rows = node.rows = node.rows ^ bit
            if not rows:
                del parent.children[node.keys[node.start]]
            elif len(node.children) == 1:
                _merge(node, parent)
            node = parent
            parent = node.parent
        return end - node.end

    def drop_row(self, row: int) -> None:
        """Remove all claims of a row in one pass over its nodes; not to be removed again."""
        self._walked = None
        bit, nodes = 1 << row, [self._root]
        while nodes:
            node = nodes.pop()
            nodes += [child for child in node.children.values() if child.rows & bit]
            parent = node.parent
            if parent is not None:
                if node.extra_references is not None:
                    node.extra_references.pop(row, None)
                    node.extra_references = node.extra_references or None
                node.rows ^= bit
                if not node.rows:
                    del parent.children[node.keys[node.start]]


def _agrees_up_to(node: RadixNode, prefix: Sequence[Hashable]) -> int:
    """Depth up to which a prompt agrees with a node whose first key it has."""
    keys, high = node.keys, min(node.end, len(prefix))
    if keys[high - 1] == prefix[high - 1]:
        return high
    low = node.start + 1
    high -= 1
    while low < high:
        middle = (low + high) // 2
        if keys[middle] == prefix[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _split(node: RadixNode, at: int) -> RadixNode:
    """A node of its own for what comes before a block; the rest keeps its identity."""
    parent = node.parent
    assert parent is not None
    upper = RadixNode(node.keys, node.start, at, parent)
    upper.rows = node.rows
    upper.children[node.keys[at]] = node
    parent.children[node.keys[node.start]] = upper
    node.start = at
    node.parent = upper
    return upper


def _merge(node: RadixNode, parent: RadixNode) -> None:
    """Merge a node with one child into that, where the same rows refer to both."""
    if node.extra_references is not None:
        return
    (child,) = node.children.values()
    if child.rows == node.rows:
        child.start = node.start
        child.parent = parent
        parent.children[node.keys[node.start]] = child
