"""Simulated prompts: runs of tokens with an identity, and the hashes of their blocks.

Equal prefixes have equal hashes, in every process and on every machine: nothing here depends on
Python's own `hash`. Segments that fill no block of their own vanish from the path, but count in
the identity of everything behind them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import chain

import numpy as np
from parrot_scheduler.task import BlockHash

from parrot_bench.simulator.plan import Segment

_MASK = 2**64 - 1
_MOVE = 0x9E3779B97F4A7C15


def stable_hash(text: str) -> int:
    """64 bits of a text, the same everywhere."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def block_hashes(key: int, start: int, end: int) -> tuple[BlockHash, ...]:
    """Hashes of blocks `start` to `end` of a part: its key, moved on by a constant for each."""
    if end - start <= 64:
        # Few are done faster without numpy.
        return tuple([(key + i * _MOVE) & _MASK for i in range(start + 1, end + 1)])
    numbers = np.arange(start + 1, end + 1, dtype=np.uint64)
    return tuple((numbers * np.uint64(_MOVE) + np.uint64(key)).tolist())


class Part:
    """One segment at one place of one prefix: the blocks that end within it."""

    __slots__ = ("_hashes", "blocks", "end_block", "end_tokens", "first_block", "key")

    def __init__(self, key: int, first_block: int, end_block: int, end_tokens: int) -> None:
        #: Identity of everything from the prompt's beginning to this segment's end.
        self.key = key
        self.first_block = first_block
        self.end_block = end_block
        self.blocks = end_block - first_block
        self.end_tokens = end_tokens
        self._hashes: tuple[BlockHash, ...] | None = None

    @property
    def hashes(self) -> tuple[BlockHash, ...]:
        if self._hashes is None:
            self._hashes = block_hashes(self.key, 0, self.blocks)
        return self._hashes


class HashedPrompt:
    __slots__ = ("last_key", "parts", "tokens")

    def __init__(self, parts: Sequence[Part], tokens: int, last_key: int) -> None:
        #: Those with at least one block.
        self.parts = parts
        self.tokens = tokens
        #: Identity of the whole, its last partial block included.
        self.last_key = last_key

    def hashes(self) -> tuple[BlockHash, ...]:
        if len(self.parts) == 1:
            return self.parts[0].hashes
        return tuple(chain.from_iterable(part.hashes for part in self.parts))


class PromptMaker:
    """Makes prompts out of segments, remembering the parts that it made."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._parts: dict[tuple[int, object, int], Part] = {}
        self._roots: dict[str, int] = {}

    def make(self, salt: str, segments: Iterable[Segment]) -> HashedPrompt:
        """The prompt of some segments; prompts of different salts share nothing."""
        key = self._roots.get(salt)
        if key is None:
            key = self._roots[salt] = stable_hash(f"root {salt}")
        tokens = 0
        parts = []
        for segment in segments:
            part = self._part(key, tokens, segment)
            key = part.key
            tokens = part.end_tokens
            if part.blocks:
                parts.append(part)
        return HashedPrompt(parts, tokens, key)

    def behind(self, prompt: HashedPrompt, segment: Segment) -> Part:
        """The part that a segment makes at a prompt's end."""
        return self._part(prompt.last_key, prompt.tokens, segment)

    def _part(self, key: int, start: int, segment: Segment) -> Part:
        name = (key, segment.content, segment.tokens)
        part = self._parts.get(name)
        if part is None:
            end = start + segment.tokens
            size = self.block_tokens
            part = Part(
                stable_hash(f"{key} {segment.content!r} {segment.tokens}"),
                start // size,
                end // size,
                end,
            )
            self._parts[name] = part
        return part
