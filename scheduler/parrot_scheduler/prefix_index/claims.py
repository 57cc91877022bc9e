"""Prefix claims: the prompts of placed tasks as a tree of paths, with what each engine needs.

A prompt is a chain of block keys, and two chains agree up to where they part. A path of the tree is
the whole chain of one prompt from where it left its parent; others that leave it do so at some
depth, as paths of their own. So a prompt is found in as many steps as there are such partings, and
bisection finds each: neither each block nor each point where somebody else leaves is looked at.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence

# Shared by all paths that have none of their own.
_NO_LEVELS: dict[int, int] = {}
_NOTHING_LESSER: dict[int, list[int]] = {}


class ClaimPath:
    """Blocks of the chain `keys` from `start` on, and how far each row needs them.

    A row needs it up to the end of each of its claims that end here, and up to each child that the
    row needs. So a claim is counted where it ends, and where it meets what its row needs already.
    """

    __slots__ = (
        "children", "depth", "keys", "lesser", "levels", "name", "needs", "parent", "row", "start",
    )  # fmt: skip

    def __init__(
        self, keys: tuple[Hashable, ...], start: int, parent: ClaimPath | None, name: Hashable
    ) -> None:
        #: Of the longest prompt that was claimed here; its end may be needed no more.
        self.keys = keys
        self.start = start
        self.parent = parent
        #: Where its parent has it.
        self.name = name
        #: By their first key; see `child`. None: there were none.
        self.children: dict[Hashable, ClaimPath] | None = None
        # Most paths are the end of one prompt: this row alone (-1: none) needs it, to this depth.
        self.row = -1
        self.depth = 0
        # Or several did at a time: the depths that each row needs as its deepest, the same depths
        # with sets of rows, and further depths of rows that have some, the least first.
        self.needs: dict[int, int] | None = None
        self.levels: dict[int, int] = _NO_LEVELS
        self.lesser: dict[int, list[int]] = _NOTHING_LESSER

    @property
    def is_needed(self) -> bool:
        return self.row >= 0 or bool(self.needs)

    def child(self, depth: int, key: Hashable) -> ClaimPath | None:
        """The path that leaves this one at a depth with a key."""
        if self.children is None:
            return None
        found = self.children.get(key)
        # The same key twice is no chain; it is kept apart all the same.
        return found if found is None or found.start == depth else self.children.get((depth, key))

    def agrees_up_to(self, prefix: Sequence[Hashable]) -> int:
        """Depth up to which a prompt agrees with a path whose first key it has."""
        keys, low = self.keys, self.start + 1
        high = min(len(keys), len(prefix))
        if keys[high - 1] == prefix[high - 1]:
            return high
        high -= 1
        while low < high:
            middle = (low + high) // 2
            if keys[middle] == prefix[middle]:
                low = middle + 1
            else:
                high = middle
        return low

    def depth_on(self, row: int) -> int:
        """How far a row needs it; 0: not at all."""
        if self.needs is None:
            return self.depth if self.row == row else 0
        return self.needs.get(row, 0)

    def rows_by_depth(self) -> dict[int, int]:
        """Sets of rows by how far they need it."""
        if self.needs is None:
            return {self.depth: 1 << self.row} if self.row >= 0 else {}
        return self.levels

    def need(self, row: int, depth: int) -> int:
        """A row needs it up to a depth, once more; up to where it did before, 0: not at all."""
        needs = self.needs
        if needs is None:
            if self.row < 0:
                self.row, self.depth = row, depth
                return 0
            needs = self.needs = {self.row: self.depth}
            self.levels, self.lesser = {self.depth: 1 << self.row}, {}
            self.row = -1
        before = needs.get(row, 0)
        if not before:
            self._move(needs, row, 0, depth)
            return 0
        others = self.lesser.get(row)
        if others is None:
            others = self.lesser[row] = []
        if depth > before:
            others.append(before)
            self._move(needs, row, before, depth)
        else:
            insort(others, depth)
        return before

    def need_no_more(self, row: int, depth: int) -> int:
        """Takes one `need` back; up to where the row needs it then."""
        needs = self.needs
        if needs is None:
            self.row = -1
            return 0
        before, others = needs[row], self.lesser.get(row)
        if others is None:
            self._move(needs, row, before, 0)
            return 0
        after = before
        if depth == before:
            after = others.pop()
            if after != before:
                self._move(needs, row, before, after)
        else:
            del others[bisect_left(others, depth)]
        if not others:
            del self.lesser[row]
        return after

    def drop(self, row: int) -> None:
        """The row needs nothing of it any more."""
        if self.needs is None:
            self.row = -1
        else:
            self._move(self.needs, row, self.needs[row], 0)
            self.lesser.pop(row, None)

    def _move(self, needs: dict[int, int], row: int, before: int, after: int) -> None:
        """Change a row's depth; 0 is none."""
        bit, levels = 1 << row, self.levels
        if before:
            rest = levels[before] ^ bit
            if rest:
                levels[before] = rest
            else:
                del levels[before]
        if after:
            levels[after] = levels.get(after, 0) | bit
            needs[row] = after
        else:
            del needs[row]


class ClaimTree:
    """The tree of all claims. A row is an engine's place in its table."""

    def __init__(self) -> None:
        self._root = ClaimPath((), 0, None, None)
        # The paths of the last chain looked up, and up to where it agrees with each: a task is
        # looked up for each engine, and just before it is placed. Reset by any change.
        self._walked: Sequence[Hashable] | None = None
        self._paths: list[ClaimPath] = []
        self._agreed: list[int] = []

    def rows_with(self, prefix: Sequence[Hashable]) -> int:
        """The set of rows that need any leading block of a prompt."""
        self._walk(prefix)
        rows = 0
        if self._paths:
            for here in self._paths[0].rows_by_depth().values():
                rows |= here
        return rows

    def depth_on(self, row: int, prefix: Sequence[Hashable]) -> int:
        """Leading blocks of a prompt that one row needs."""
        self._walk(prefix)
        for at in range(len(self._paths) - 1, -1, -1):
            depth = self._paths[at].depth_on(row)
            if depth:
                return min(depth, self._agreed[at])
        return 0

    def deepest(self, rows: int, prefix: Sequence[Hashable]) -> tuple[int, int]:
        """Leading blocks of a prompt that rows of a set need at most, and which rows need them."""
        self._walk(prefix)
        for at in range(len(self._paths) - 1, -1, -1):
            agreed, depth, found = self._agreed[at], 0, 0
            for level, here in self._paths[at].rows_by_depth().items():
                here &= rows
                if here:
                    level = min(level, agreed)
                    if level > depth:
                        depth, found = level, here
                    elif level == depth:
                        found |= here
            if found:
                return depth, found
        return 0, 0

    def add(self, row: int, keys: tuple[Hashable, ...]) -> tuple[ClaimPath, int]:
        """Add a claim: the path where it ends, and how many of its blocks the row needed."""
        self._walk(keys)
        self._walked = None
        path, agreed, length = self._root, 0, len(keys)
        if self._paths:
            path, agreed = self._paths[-1], self._agreed[-1]
        if agreed < length:
            if 0 < agreed == len(path.keys):
                path.keys = keys
            else:
                children, name = path.children, keys[agreed]
                if children is None:
                    children = path.children = {}
                if name in children:
                    name = (agreed, name)
                path = children[name] = ClaimPath(keys, agreed, path, name)
        last, depth, parent = path, length, path.parent
        while parent is not None:
            before = path.need(row, depth)
            if before:
                return last, min(before, depth)
            path, depth = parent, path.start
            parent = path.parent
        return last, 0

    def remove(self, row: int, last: ClaimPath, end: int) -> int:
        """Remove a claim of `end` blocks that ends on a path; return how many of them the row
        needs no more.
        """
        self._walked = None
        path, depth, parent = last, end, last.parent
        while parent is not None:
            still = path.need_no_more(row, depth)
            if still:
                return end - min(still, depth)
            if not path.is_needed:
                _leave(path, parent)
            path, depth = parent, path.start
            parent = path.parent
        return end

    def drop_row(self, row: int) -> None:
        """Remove all claims of a row in one pass over its paths; not to be removed again."""
        self._walked = None
        paths = [self._root]
        while paths:
            path = paths.pop()
            if path.children is not None:
                paths += [child for child in path.children.values() if child.depth_on(row)]
            if path.parent is not None:
                path.drop(row)
                if not path.is_needed:
                    _leave(path, path.parent)

    def _walk(self, prefix: Sequence[Hashable]) -> None:
        if self._walked is prefix:
            return
        paths: list[ClaimPath] = []
        ends: list[int] = []
        path, depth, length = self._root, 0, len(prefix)
        while depth < length:
            child = path.child(depth, prefix[depth])
            if child is None:
                break
            path, depth = child, child.agrees_up_to(prefix)
            paths.append(path)
            ends.append(depth)
        self._walked, self._paths, self._agreed = prefix, paths, ends


def _leave(path: ClaimPath, parent: ClaimPath) -> None:
    assert parent.children is not None
    del parent.children[path.name]
