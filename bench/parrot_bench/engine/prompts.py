"""Prompts of random token ids for `parrot-gateway bench engine`, and how large they are.

The same seed, name and number give the same prompts, for every engine that is measured.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from parrot_bench.engine.device import Segment


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the cases are; the defaults are those that figures are quoted for."""

    #: Of independent prompts that decode together.
    batches: tuple[int, ...] = (1, 8, 64, 256)
    #: Of those that are drawn from, with a temperature and top-p.
    drawn_batches: tuple[int, ...] = (64, 256)
    prompt: int = 512
    tokens: int = 128
    #: Requests that share a prefix, its length, and what each has of its own.
    sharers: int = 64
    shared: int = 6144
    own: int = 128
    shared_tokens: int = 256
    #: Prefixes of the case of several.
    families: int = 2
    #: Of the tree: what all share, how many groups share how much more.
    root: int = 4096
    groups: int = 4
    branch: int = 2048
    #: Prompts that are filled together, and their length.
    prefills: int = 8
    prefill: int = 8192
    #: One long prompt, and what is generated behind it.
    long: int = 100_000
    long_tokens: int = 64
    #: Mixed requests: how many, and from what to what they read and write.
    requests: int = 512
    reads: tuple[int, int] = (64, 1024)
    writes: tuple[int, int] = (16, 512)
    #: Shares of the capacity at which requests arrive, and for how long.
    loads: tuple[float, ...] = (0.3, 0.6, 0.9)
    load_s: float = 8.0


#: For trying out, and for small models on a CPU.
QUICK = Sizes(
    batches=(1, 4),
    drawn_batches=(4,),
    prompt=48,
    tokens=12,
    sharers=8,
    shared=192,
    own=16,
    shared_tokens=12,
    root=128,
    groups=2,
    branch=64,
    prefills=2,
    prefill=256,
    long=512,
    long_tokens=4,
    requests=12,
    reads=(8, 64),
    writes=(2, 16),
    loads=(0.5,),
    load_s=2.0,
)


class Prompts(NamedTuple):
    """Prompts of one run, and the parts of them that are computed once."""

    token_ids: list[list[int]]
    #: Tokens to generate of each.
    max_tokens: list[int]
    segments: list[Segment]
    #: 0: greedy.
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, shared ones as often as they occur."""
        return sum(map(len, self.token_ids))

    @property
    def num_distinct(self) -> int:
        """Tokens of the prompts, shared ones once."""
        return sum(segment.length for segment in self.segments)

    @property
    def longest(self) -> int:
        """The longest context at its end."""
        lengths = zip(self.token_ids, self.max_tokens, strict=True)
        return max(len(ids) + tokens for ids, tokens in lengths)

    def with_tokens(self, tokens: int) -> Prompts:
        return self._replace(max_tokens=[tokens] * len(self.token_ids))


class PromptSource:
    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed

    def independent(self, name: str, number: int, count: int, length: int, tokens: int) -> Prompts:
        """`count` prompts that have nothing in common."""
        draw = self._generator(name, number)
        ids = [self._ids(draw, length) for _ in range(count)]
        return Prompts(ids, [tokens] * count, [Segment(0, length)] * count)

    def tree(
        self,
        name: str,
        number: int,
        *,
        roots: int,
        root: int,
        groups: int = 1,
        branch: int = 0,
        leaves: int,
        own: int,
        tokens: int,
    ) -> Prompts:
        """`leaves` prompts, evenly under `groups` branches under each of `roots` beginnings."""
        draw = self._generator(name, number)
        ids: list[list[int]] = []
        segments: list[Segment] = []
        for _ in range(roots):
            first = self._ids(draw, root)
            segments.append(Segment(0, root))
            for _ in range(groups):
                prefix = first + self._ids(draw, branch)
                if branch:
                    segments.append(Segment(root, branch))
                for _ in range(leaves // (roots * groups)):
                    ids.append(prefix + self._ids(draw, own))
                    segments.append(Segment(len(prefix), own))
        return Prompts(ids, [tokens] * len(ids), segments)

    def mixed(self, name: str, number: int, count: int, sizes: Sizes) -> Prompts:
        """`count` independent prompts of all lengths, with all lengths of output."""
        draw = self._generator(name, number)
        lengths = draw.integers(*sizes.reads, size=count, endpoint=True).tolist()
        tokens: list[int] = draw.integers(*sizes.writes, size=count, endpoint=True).tolist()
        ids = [self._ids(draw, length) for length in lengths]
        return Prompts(ids, tokens, [Segment(0, length) for length in lengths])

    def arrivals(self, name: str, number: int, count: int, rate: float) -> list[float]:
        """Seconds at which `count` requests arrive, as a Poisson process of `rate` a second."""
        gaps = self._generator(name, number).exponential(1 / rate, size=count)
        times: list[float] = np.cumsum(gaps).tolist()
        return times

    def _generator(self, name: str, number: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(name.encode()), number])

    def _ids(self, draw: np.random.Generator, count: int) -> list[int]:
        ids: list[int] = draw.integers(self._vocab_size, size=count).tolist()
        return ids
