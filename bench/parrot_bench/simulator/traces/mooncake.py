"""Mooncake's FAST'25 traces: JSONL with timestamp (ms), input_length, output_length, hash_ids.

`hash_ids`, also of the agentic format, are a prompt as a list of the hashes of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from parrot_bench.simulator.plan import ApplicationPlan, Segment, one_call
from parrot_bench.simulator.traces.lines import Line, list_of, number_of, objects_of, tokens_of

#: Of the FAST'25 traces.
MOONCAKE_BLOCK_TOKENS = 512
_BLOCK_SIZES = (512, 256, 128, 64, 32, 16, 1024, 8, 4, 2, 1)


def block_size(prompt_tokens: int, num_hashes: int) -> int | None:
    """The usual block size that cuts this prompt into this many; None: unknown."""
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


def read_mooncake(path: Path, block_tokens: int | None = None) -> Iterator[ApplicationPlan]:
    """One application of one call for each row, in the order of the file.

    The format knows no sessions. `hash_ids` are blocks of `block_tokens` tokens, 512 by default.

    Raises:
        TraceError: a row is wrong, or earlier than the one before.
    """
    latest = 0.0
    for line, row in objects_of(path):
        arrival_s = number_of(line, row, "timestamp") / 1000.0
        if arrival_s < latest:
            raise line.error(f"timestamp goes back, from {latest:g} s to {arrival_s:g} s")
        latest = arrival_s
        output = tokens_of(line, row, "output_length")
        hash_ids = list_of(line, row, "hash_ids", int)
        tokens = tokens_of(line, row, "input_length")
        blocks = block_tokens or MOONCAKE_BLOCK_TOKENS
        prompt = segments(line, tokens, hash_ids, blocks, line.number)
        yield one_call(f"call-{line.number}", arrival_s, prompt, output, kind="call")
