"""Tasks on a simulated engine, and what they hold of its cache."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

from parrot_scheduler.actions import Retention
from parrot_scheduler.task import TaskId

from parrot_bench.simulator.engines.cache import Cache, CacheNode
from parrot_bench.simulator.engines.prompts import HashedPrompt, Part


@dataclass(slots=True, eq=False)
class EngineSequence:
    """One task on an engine. Compared by identity."""

    task_id: TaskId
    prompt: HashedPrompt
    #: Tokens that it really generates.
    output_tokens: int
    _: KW_ONLY
    #: The part that its output adds to the prefix, for those who continue it.
    output_part: Part | None = None
    application: str = ""
    retention: Retention = "normal"
    #: Place in the queue: its priority, and a number that the engine gives.
    key: tuple[int, int] = (0, 0)
    #: `waiting`, `filling`, `decoding`, `ended`.
    state: str = "waiting"
    failed: bool = False
    admitted_at: float = -1.0
    first_token_at: float = -1.0
    #: Prompt tokens found in the cache at first; tokens filled, those done twice included.
    cached: int = 0
    prefilled: int = 0
    preemptions: int = 0
    #: Tokens to fill before it can decode, and those that are done.
    target: int = field(init=False)
    computed: int = 0
    generated: int = 0
    #: While decoding: the engine's count of decode steps at its beginning and end, and the keys
    #: that it alone read at first.
    join_step: int = 0
    finish_step: int = 0
    own_context: int = 0
    #: Pinned, from the root; and which of the prompt's parts is the last of them.
    nodes: list[CacheNode] = field(default_factory=list)
    cursor: int = 0
    #: Tokens of KV of its own; while decoding, at the beginning of its decode.
    private: int = 0

    def __post_init__(self) -> None:
        self.target = self.prompt.tokens


class KvAllocations:
    """KV of running sequences: prefixes that they found, and tokens of their own.

    Args:
        cache: the engine's.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def take(self, sequence: EngineSequence, reserve: int, *, alone: bool) -> bool:
        """Let a sequence have room for its whole prompt, and what is known of it.

        Args:
            sequence: holds nothing yet.
            reserve: tokens that stay free.
            alone: no other sequence holds anything, so that waiting frees nothing.

        Returns:
            False, and nothing taken, when there is no room.
        """
        cache = self._cache
        size = cache.block_tokens
        match = cache.match(sequence.prompt.parts)
        while True:
            # The last token is always computed, for its logits.
            here = min(match.blocks, (sequence.target - 1) // size)
            private = sequence.target - here * size
            pinned = size * sum(node.resident for node in match.nodes if not node.pins)
            if private + pinned + reserve <= cache.free_tokens:
                break
            if not alone or not match.nodes:
                return False
            # Its own cached copy is in the way.
            match = cache.match(())
        for node in match.nodes:
            cache.pin(node, sequence.application)
        cache.make_room(private)
        cache.take_private(private)
        sequence.nodes = match.nodes
        sequence.cursor = max(0, len(match.nodes) - 1)
        sequence.private = private
        sequence.computed = here * size
        return True

    def publish(self, sequence: EngineSequence, computed: int) -> None:
        """Let others find what a sequence has filled of its prompt."""
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
            sequence.private -= cache.store(nodes[index], part, blocks)
            if blocks < part.blocks:
                break
            index += 1
        sequence.cursor = index

    def publish_output(self, sequence: EngineSequence) -> None:
        """Let those who continue a finished sequence find its output."""
        part = sequence.output_part
        if part is None:
            return
        # The last token was never fed back, so it has no KV.
        tokens = sequence.prompt.tokens + sequence.generated - 1
        blocks = tokens // self._cache.block_tokens - part.first_block
        if blocks > 0:
            nodes = sequence.nodes
            parent = nodes[-1] if nodes else None
            nodes.append(self._cache.node_of(part, parent, sequence.application))
            sequence.private -= self._cache.store(nodes[-1], part, blocks)

    def release(self, sequence: EngineSequence, now: float) -> None:
        """Release all that a sequence holds; public blocks stay in the cache."""
        self._cache.take_private(-sequence.private)
        self._cache.unpin(sequence.nodes, now, sequence.retention, sequence.application)
        sequence.nodes = []
        sequence.private = 0
