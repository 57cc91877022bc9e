"""Mooncake's FAST'25 traces: JSONL with timestamp (ms), input_length, output_length, hash_ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from parrot_scheduler.task import LATENCY

from parrot_simulator.plan import ApplicationPlan, CallPlan
from parrot_simulator.traces.blocks import MOONCAKE_BLOCK_TOKENS, segments
from parrot_simulator.traces.lines import list_of, number_of, objects_of, tokens_of


def read_mooncake(path: Path, block_tokens: int | None = None) -> Iterator[ApplicationPlan]:
    """One application of one call for each row, in the order of the file.

    The format knows no sessions. `hash_ids` are blocks of 512 tokens unless told otherwise.

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
        call = CallPlan(
            index=0,
            prompt=segments(
                line,
                tokens_of(line, row, "input_length"),
                hash_ids,
                block_tokens or MOONCAKE_BLOCK_TOKENS,
                line.number,
            ),
            output_tokens=output,
            max_tokens=output,
            objective=LATENCY,
        )
        yield ApplicationPlan(
            id=f"call-{line.number}", arrival_s=arrival_s, calls=(call,), kind="call"
        )
