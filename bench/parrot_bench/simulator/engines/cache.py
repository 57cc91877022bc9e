"""A simulated engine's memory: KV of prefixes that can be found again.

Granularity is the segment (`Part`): a node holds the first `resident` of its blocks. Blocks that
running sequences use are pinned; of the rest, leaves go first, by retention (`drop`, `normal`,
`keep`), then least recently used, from the tail.
Tokens of running sequences that cannot be found (partial blocks, outputs, second copies) are
`private_tokens`: the engine counts them here, so that one place knows what is in use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from parrot_scheduler.actions import Retention
from parrot_scheduler.task import BlockHash

from parrot_bench.simulator.engines.prompts import Part, block_hashes

_RANKS: dict[Retention, int] = {"drop": 0, "normal": 1, "keep": 2}


@dataclass(slots=True, eq=False)
class CacheNode:
    """A part of a prefix on one engine. Compared by identity."""

    key: int
    blocks: int
    parent: CacheNode | None
    #: The only application that ever used it; None once there are two.
    owner: str | None
    resident: int = 0
    #: Sequences that use it.
    pins: int = 0
    #: Decoding sequences that read it.
    readers: int = 0
    #: Children with blocks, and children at all.
    leaves: int = 0
    links: int = 0
    rank: int = 1
    used_at: float = 0.0


class CacheMatch(NamedTuple):
    """The longest run of a prompt's blocks that is here."""

    nodes: list[CacheNode]
    blocks: int


class Cache:
    """KV of one engine. All sizes are tokens, unless they are called blocks."""

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.block_tokens = block_tokens
        #: Tokens that can be found, pinned or not; those of them that are pinned.
        self.found_tokens = 0
        self.pinned_tokens = 0
        self.private_tokens = 0
        #: Until `take_changes`.
        self._changes: list[tuple[bool, tuple[BlockHash, ...]]] = []
        self._nodes: dict[int, CacheNode] = {}
        #: Unpinned leaves, those to go first first; entries may be out of date.
        self._leaves: list[tuple[int, float, int, CacheNode]] = []
        self._serial = 0
        #: The nodes of each application, in the order of their making.
        self._owned: defaultdict[str, dict[CacheNode, None]] = defaultdict(dict)

    @property
    def used_tokens(self) -> int:
        """Tokens in memory, mere cache included."""
        return self.found_tokens + self.private_tokens

    @property
    def free_tokens(self) -> int:
        """Free after evicting everything that no sequence uses."""
        return self.capacity_tokens - self.pinned_tokens - self.private_tokens

    def match(self, parts: Sequence[Part]) -> CacheMatch:
        nodes: list[CacheNode] = []
        blocks = 0
        for part in parts:
            node = self._nodes.get(part.key)
            if node is None or node.resident == 0:
                break
            nodes.append(node)
            blocks += node.resident
            if node.resident < node.blocks:
                break
        return CacheMatch(nodes, blocks)

    def take_private(self, tokens: int) -> None:
        """Give running sequences more tokens that cannot be found; negative: take some."""
        self.private_tokens += tokens

    def take_changes(self) -> list[tuple[bool, tuple[BlockHash, ...]]]:
        """Blocks that were stored (True) or evicted since the last call, in order."""
        changes = self._changes
        if not changes:
            return changes
        self._changes = []
        merged: list[tuple[bool, tuple[BlockHash, ...]]] = []
        is_stored, hashes = changes[0]
        for following, more in changes[1:]:
            if following == is_stored:
                hashes += more
            else:
                merged.append((is_stored, hashes))
                is_stored, hashes = following, more
        merged.append((is_stored, hashes))
        return merged

    def pin(self, node: CacheNode, owner: str) -> None:
        if node.pins == 0:
            self.pinned_tokens += node.resident * self.block_tokens
        node.pins += 1
        if node.owner is not None and node.owner != owner:
            self._disown(node)

    def unpin(
        self, nodes: Sequence[CacheNode], now: float, retention: Retention, owner: str
    ) -> None:
        """A sequence is done with its nodes, which are in order from the root."""
        rank = _RANKS[retention]
        for node in reversed(nodes):
            node.pins -= 1
            if node.pins:
                node.used_at = now
                continue
            self.pinned_tokens -= node.resident * self.block_tokens
            node.used_at = now
            # A node that others use as well is not this application's to drop.
            node.rank = rank if rank or node.owner == owner else 1
            self._offer(node)
            if not node.resident:
                self._clean(node)

    def node_of(self, part: Part, parent: CacheNode | None, owner: str) -> CacheNode:
        """The node of a part, made if there is none, pinned for one more sequence."""
        node = self._nodes.get(part.key)
        if node is None:
            node = self._nodes[part.key] = CacheNode(part.key, part.blocks, parent, owner)
            self._owned[owner][node] = None
            if parent is not None:
                parent.links += 1
        self.pin(node, owner)
        return node

    def store(self, node: CacheNode, part: Part, blocks: int) -> int:
        """A sequence that pins a part's node has (or is about to have) its first `blocks` blocks.

        Returns:
            Tokens of them that were not here: the sequence's private copy made public.
        """
        start = node.resident
        if blocks <= start:
            return 0
        tokens = (blocks - start) * self.block_tokens
        self.private_tokens -= tokens
        if start == 0 and node.parent is not None:
            node.parent.leaves += 1
        whole = start == 0 and blocks == part.blocks
        hashes = part.hashes if whole else block_hashes(node.key, start, blocks)
        self._changes.append((True, hashes))
        node.resident = blocks
        self.found_tokens += tokens
        self.pinned_tokens += tokens
        return tokens

    def make_room(self, tokens: int) -> bool:
        """Evict until that number of tokens is free; False when that cannot be."""
        excess = self.found_tokens + self.private_tokens + tokens - self.capacity_tokens
        size = self.block_tokens
        while excess > 0:
            if not self._leaves:
                return False
            entry = self._leaves[0]
            node = entry[3]
            if not self._is_current(entry):
                heappop(self._leaves)
                continue
            blocks = min(node.resident, -(-excess // size))
            self._shrink(node, blocks)
            excess -= blocks * size
            if node.resident == 0:
                heappop(self._leaves)
                parent = node.parent
                if parent is not None:
                    parent.leaves -= 1
                    self._offer(parent)
                self._clean(node)
        return True

    def forget(self, owner: str) -> None:
        """Let nodes that only this application used go first from now on."""
        for node in reversed(self._owned.get(owner, {})):
            if node.rank:
                node.rank = 0
                self._offer(node)

    def check(self) -> None:
        """Assert that all counts agree with the nodes; for tests."""
        nodes = self._nodes.values()
        size = self.block_tokens
        assert self.found_tokens == sum(n.resident for n in nodes) * size
        assert self.pinned_tokens == sum(n.resident for n in nodes if n.pins) * size
        assert self.private_tokens >= 0
        assert self.used_tokens <= self.capacity_tokens
        owned = {(owner, node) for owner, of in self._owned.items() for node in of}
        assert owned == {(node.owner, node) for node in nodes if node.owner is not None}
        offered = {id(entry[3]) for entry in self._leaves if self._is_current(entry)}
        for node in nodes:
            children = [n for n in nodes if n.parent is node]
            assert node.links == len(children)
            assert node.leaves == sum(1 for n in children if n.resident)
            assert 0 <= node.resident <= node.blocks
            evictable = node.resident > 0 and node.pins == 0 and node.leaves == 0
            assert evictable == (id(node) in offered)

    def _shrink(self, node: CacheNode, blocks: int) -> None:
        end = node.resident
        node.resident = end - blocks
        self.found_tokens -= blocks * self.block_tokens
        self._changes.append((False, block_hashes(node.key, node.resident, end)))

    def _offer(self, node: CacheNode) -> None:
        """Put a node among those that may go, if it may."""
        if node.resident and not node.pins and not node.leaves:
            self._serial += 1
            heappush(self._leaves, (node.rank, node.used_at, self._serial, node))
            if len(self._leaves) > 64 + 4 * len(self._nodes):
                self._leaves = [entry for entry in self._leaves if self._is_current(entry)]
                heapify(self._leaves)

    def _is_current(self, entry: tuple[int, float, int, CacheNode]) -> bool:
        rank, used_at, _, node = entry
        return (
            node.resident > 0
            and not node.pins
            and not node.leaves
            and node.rank == rank
            and node.used_at == used_at
        )

    def _disown(self, node: CacheNode) -> None:
        if node.owner is not None:
            del self._owned[node.owner][node]
            if not self._owned[node.owner]:
                del self._owned[node.owner]
            node.owner = None

    def _clean(self, node: CacheNode | None) -> None:
        """Forget nodes that hold nothing and lead nowhere, up to the root."""
        while node is not None and not node.resident and not node.pins and not node.links:
            if self._nodes.pop(node.key, None) is None:
                return
            self._disown(node)
            node = node.parent
            if node is not None:
                node.links -= 1
