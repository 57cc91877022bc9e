"""Chain summary (Parrot, OSDI '24, figure 11): a summary refined chunk by chunk.

Chunks of 1024 tokens, outputs of 50. Step 0 summarises chunk 0, step i refines the summary with
chunk i, only the last summary is read. The paper's documents make about 20 steps.
"""

from __future__ import annotations

from parrot_gateway.bench.apps import book
from parrot_gateway.bench.apps.workload import Call, Job, Output, Size, Workload

CHUNK_TOKENS = 1024
OUTPUT_TOKENS = 50


def build(size: Size, salt: str) -> Workload:
    """The workload with `size.count` steps; prompts begin with `salt`."""
    calls: list[Call] = []
    for step, chunk in enumerate(book.chunks(size.count, size.characters(CHUNK_TOKENS))):
        head = f"{salt}\nSummarise a book in one sentence, part by part.\n"
        if calls:
            middle: tuple[str | Output, ...] = (
                head + "The summary of the parts before: ",
                Output(calls[-1].name),
                f"\nRefine it with the next part:\n{chunk}\nThe refined summary:",
            )
        else:
            middle = (f"{head}The first part:\n{chunk}\nThe summary:",)
        calls.append(Call(f"step_{step}", middle, size.tokens(OUTPUT_TOKENS), seed=step))
    job = Job("chain", "chain", tuple(calls), (calls[-1].name,))
    # NOTE: each call reads the one before: a client that sends in parallel is the same client.
    return Workload("chain", (job,), ("one by one",))
