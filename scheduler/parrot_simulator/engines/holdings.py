"""What the sequences of a simulated engine hold of its cache: taken, made public, let go."""

from __future__ import annotations

from parrot_simulator.engines.cache import Cache, Match
from parrot_simulator.engines.sequence import Sequence


class Holdings:
    """KV of running sequences: prefixes that they found, and tokens of their own.

    Args:
        cache: the engine's.
        prefix_caching: off, nothing is found and nothing made public.
    """

    def __init__(self, cache: Cache, *, prefix_caching: bool) -> None:
        self._cache = cache
        self._prefix_caching = prefix_caching
        #: Tokens, of prompts and outputs, that all who hold something may come to.
        self.claimed_tokens = 0

    def claim(self, sequence: Sequence) -> int:
        """Tokens that a sequence may come to."""
        return sequence.prompt.tokens + sequence.max_tokens

    def take(self, sequence: Sequence, reserve: int, *, alone: bool) -> Match | None:
        """Let a sequence have room for its whole prompt, and what is known of it.

        Args:
            sequence: holds nothing yet.
            reserve: tokens that stay free.
            alone: nobody else holds anything, so that waiting brings no room.

        Returns:
            what was found; blocks of the host tier in it are still to be loaded. None, and
            nothing taken, when there is no room.
        """
        cache = self._cache
        size = cache.block_tokens
        match = cache.match(sequence.prompt.parts if self._prefix_caching else ())
        while True:
            # The last token is always computed: its logits are wanted.
            here = min(match.device_blocks + match.host_blocks, (sequence.target - 1) // size)
            private = sequence.target - here * size
            pinned = size * sum(node.resident for node in match.nodes if not node.pins)
            need = private + match.host_blocks * size
            if need + pinned + reserve <= cache.free_tokens:
                break
            if not alone or not match.nodes:
                return None
            # Its own cached copy is in the way.
            match = cache.match(())
        for node in match.nodes:
            cache.pin(node, sequence.application)
        cache.make_room(need)
        cache.private_tokens += private
        sequence.nodes = match.nodes
        sequence.cursor = max(0, len(match.nodes) - 1)
        sequence.private = private
        sequence.computed = here * size
        self.claimed_tokens += self.claim(sequence)
        return match

    def publish(self, sequence: Sequence, computed: int) -> None:
        """Let others find what a sequence has filled of its prompt."""
        if not self._prefix_caching:
            return
        cache = self._cache
        parts = sequence.prompt.parts
        nodes = sequence.nodes
        end = computed // cache.block_tokens
        index = sequence.cursor
        while index < len(parts) and parts[index].first_block < end:
            part = parts[index]
            if index == len(nodes):
                parent = nodes[-1] if nodes else None
                nodes.append(cache.node_of(part, parent, sequence.application))
            blocks = min(part.blocks, end - part.first_block)
            sequence.private -= cache.store(nodes[index], blocks)
            if blocks < part.blocks:
                break
            index += 1
        sequence.cursor = index

    def publish_output(self, sequence: Sequence) -> None:
        """Let those who continue a finished sequence find its output."""
        part = sequence.output_part
        if part is None or not self._prefix_caching:
            return
        # The last token was never fed back, so it has no KV.
        tokens = sequence.prompt.tokens + sequence.generated - 1
        blocks = tokens // self._cache.block_tokens - part.first_block
        if blocks > 0:
            nodes = sequence.nodes
            parent = nodes[-1] if nodes else None
            nodes.append(self._cache.node_of(part, parent, sequence.application))
            sequence.private -= self._cache.store(nodes[-1], blocks)

    def release(self, sequence: Sequence, now: float) -> None:
        """A sequence lets go of all that it holds; what is public can still be found."""
        self.claimed_tokens -= self.claim(sequence)
        self._cache.private_tokens -= sequence.private
        self._cache.unpin(sequence.nodes, now, sequence.retention, sequence.application)
        sequence.nodes = []
        sequence.private = 0
