"""Prompts as lists of block hashes: `hash_ids` of the Mooncake formats."""

from __future__ import annotations

from collections.abc import Sequence

from parrot_simulator.plan import Segment
from parrot_simulator.traces.lines import Line

#: Of the FAST'25 traces.
MOONCAKE_BLOCK_TOKENS = 512
_BLOCK_SIZES = (512, 256, 128, 64, 32, 16, 1024, 8, 4, 2, 1)


def block_size(prompt_tokens: int, num_hashes: int) -> int | None:
    """The usual block size that cuts this prompt into this many; None: it cannot be told."""
    if num_hashes < 2:
        return None
    return next((s for s in _BLOCK_SIZES if -(-prompt_tokens // s) == num_hashes), None)


def segments(
    line: Line, prompt_tokens: int, hash_ids: Sequence[int], block_tokens: int, own: object
) -> tuple[Segment, ...]:
    """The prompt: one segment a block, the last one cut; what no hash covers is `own`.

    Raises:
        TraceError: there are more blocks than the prompt is long.
    """
    if not hash_ids:
        return (Segment(("own", own), prompt_tokens),)
    full, rest = divmod(prompt_tokens, block_tokens)
    if len(hash_ids) > full + (rest > 0):
        raise line.error(
            f"hash_ids has {len(hash_ids)} blocks of {block_tokens} tokens, "
            f"input_length is {prompt_tokens}"
        )
    found = [Segment(("block", block), block_tokens) for block in hash_ids]
    covered = len(hash_ids) * block_tokens
    if covered > prompt_tokens:
        found[-1] = Segment(found[-1].content, rest)
    elif covered < prompt_tokens:
        found.append(Segment(("own", own), prompt_tokens - covered))
    return tuple(found)
