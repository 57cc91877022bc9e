"""Prefix claims: the prompts of placed tasks as a tree, with each engine's needs.

A prompt is a chain of block keys, and two chains agree up to where they diverge. A path of the tree
is the chain of one prompt from the point where it left its parent; other chains that leave it
become its children. A look-up takes one step per divergence on its way, each found by bisection. It
visits neither every block nor every other branch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence

# Shared by all paths without their own.
_NO_LEVELS: dict[int, int] = {}
_NOTHING_LESSER: dict[int, list[int]] = {}


class ClaimPath:
    """Blocks of the chain `keys` from `start` on, and the depth to which each row needs them.

    A row needs a path up to the end of each of its claims on it, and up to each child that the row
    needs. A claim is counted where it ends, and where it joins a stretch that its row already
    needs.
    """

    __slots__ = (
        "children", "depth", "keys", "lesser", "levels", "name", "needs", "parent", "row", "start",
    )  # fmt: skip

    def __init__(
        self, keys: tuple[Hashable, ...], start: int, parent: ClaimPath | None, name: Hashable
    ) -> None:
        #: Keys of the longest prompt claimed here; its end may no longer be needed.
        self.keys = keys
        self.start = start
        self.parent = parent
        #: Its key in the parent's `children`.
        self.name = name
        #: By first key; see `child`. None until there is one.
        self.children: dict[Hashable, ClaimPath] | None = None
        # Most paths end one prompt: one row (-1: none) needs it, to this depth.
        self.row = -1
        self.depth = 0
        # With several claims: the deepest need of each row; the same depths mapped to sets of rows;
        # and the smaller needs of rows that have some, in ascending order.
        self.needs: dict[int, int] | None = None
        self.levels: dict[int, int] = _NO_LEVELS
        self.lesser: dict[int, list[int]] = _NOTHING_LESSER

    @property
    def is_needed(self) -> bool:
        return self.row >= 0 or bool(self.needs)

    def child(self, depth: int, key: Hashable) -> ClaimPath | None:
        """Return the path that leaves this one at a depth with a key."""
        if self.children is None:
            return None
        found = self.children.get(key)
        # A repeated key is no proper chain, but is kept separate all the same.
        return found if found is None or found.start == depth else self.children.get((depth, key))

    def agrees_up_to(self, prefix: Sequence[Hashable]) -> int:
        """Return the depth to which a prompt agrees with a path whose first key it shares."""
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
        """Return the depth to which a row needs the path; 0 if it does not."""
        if self.needs is None:
            return self.depth if self.row == row else 0
        return self.needs.get(row, 0)

    def rows_by_depth(self) -> dict[int, int]:
        """Return the sets of rows by needed depth."""
        if self.needs is None:
            return {self.depth: 1 << self.row} if self.row >= 0 else {}
        return self.levels

    def need(self, row: int, depth: int) -> int:
        """Add a row's need up to a depth; return its previous depth, 0 if it had none."""
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
        """Remove one `need`; return the row's remaining depth."""
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
        """Remove all needs of a row."""
        if self.needs is None:
            self.row = -1
        else:
            self._move(self.needs, row, self.needs[row], 0)
            self.lesser.pop(row, None)

    def _move(self, needs: dict[int, int], row: int, before: int, after: int) -> None:
        """Change a row's depth; 0 means none."""
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
        # Paths of the last chain looked up, and how far it agrees with each. A task is looked up
        # for each engine and again just before placement. Any change resets this.
        self._walked: Sequence[Hashable] | None = None
        self._paths: list[ClaimPath] = []
        self._agreed: list[int] = []

    def rows_with(self, prefix: Sequence[Hashable]) -> int:
        """Return the set of rows that need any leading block of a prompt."""
        self._walk(prefix)
        rows = 0
        if self._paths:
            for here in self._paths[0].rows_by_depth().values():
                rows |= here
        return rows

    def depth_on(self, row: int, prefix: Sequence[Hashable]) -> int:
        """Return the number of leading blocks of a prompt that a row needs."""
        self._walk(prefix)
        for at in range(len(self._paths) - 1, -1, -1):
            depth = self._paths[at].depth_on(row)
            if depth:
                return min(depth, self._agreed[at])
        return 0

    def deepest(self, rows: int, prefix: Sequence[Hashable]) -> tuple[int, int]:
        """Return the most leading blocks of a prompt that any row of a set needs, and the rows that
        need them.
        """
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
        """Add a claim; return the path where it ends and the number of blocks that the row needed
        already.
        """
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
        """Remove a claim of `end` blocks that ends on a path; return the number of blocks the row
        no longer needs.
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
        """Remove all claims of a row in one pass; they must not be removed again."""
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
