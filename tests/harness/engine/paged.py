"""Drives a `ModelRunner` by hand: block tables without an allocator worth the name.

Physical blocks are handed out in shuffled order, so that no table is contiguous, and every
block is poisoned with NaN before it is used.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from parrot_engine.batch import BatchRow, BlockCopy, LogitsNeed, SamplingRow, StepBatch
from parrot_engine.protocol import SamplingParams
from parrot_engine.runner.model_runner import ModelRunner
from torch import Tensor


def greedy_row() -> SamplingRow:
    return SamplingRow(SamplingParams(temperature=0), [], [], 0, frozenset())


@dataclass
class PagedSequence:
    """One context: its tokens with KV, and the blocks that hold it."""

    token_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)


class PagedHarness:
    """Block tables for sequences on one runner; poisons the whole cache when made."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        # All bits set are NaN in every format, and as a scale.
        runner.kv_cache.view(torch.uint8).fill_(255)
        self._free = list(range(runner.num_blocks))
        random.Random(seed).shuffle(self._free)

    def row(
        self, sequence: PagedSequence, token_ids: Sequence[int], logits: LogitsNeed = "last"
    ) -> BatchRow:
        """Append tokens to a sequence: the row that computes them."""
        start = len(sequence.token_ids)
        sequence.token_ids += token_ids
        while len(sequence.block_table) * self.runner.block_size < len(sequence.token_ids):
            sequence.block_table.append(self._free.pop())
        return BatchRow(list(token_ids), start, list(sequence.block_table), logits)

    def fork(self, parent: PagedSequence) -> tuple[PagedSequence, list[BlockCopy]]:
        """A sequence that shares the parent's full blocks, and the copy of a partial one."""
        child = PagedSequence(list(parent.token_ids), list(parent.block_table))
        if len(parent.token_ids) % self.runner.block_size == 0:
            return child, []
        child.block_table[-1] = self._free.pop()
        return child, [BlockCopy(parent.block_table[-1], child.block_table[-1])]

    def fill(self, sequence: PagedSequence, token_ids: Sequence[int], chunk: int) -> Tensor:
        """Append in chunks, alone; logits of all the tokens."""
        parts = [
            self.runner.execute(StepBatch([self.row(sequence, token_ids[at : at + chunk], "all")]))
            for at in range(0, len(token_ids), chunk)
        ]
        return torch.cat(parts)

    def generate_ahead(
        self, prompts: Sequence[Sequence[int]], orders: Sequence[Sequence[int]]
    ) -> list[list[int | None]]:
        """Greedy decoding, with all steps launched before the first is waited for.

        Each step has rows of the prompts of one of `orders`; from the second on their tokens are
        those that the step before sampled.
        """
        sequences = [PagedSequence() for _ in prompts]
        before: Sequence[int] | None = None
        launches = []
        for order in orders:
            rows = []
            for index in order:
                row = self.row(sequences[index], prompts[index] if before is None else [0])
                if before is not None:
                    row = BatchRow([0], row.start, row.block_table, "last", before.index(index))
                rows.append(row)
            batch = StepBatch(rows, sampling=[greedy_row() for _ in rows])
            launches.append((order, self.runner.launch(batch)))
            before = order
        tokens: list[list[int | None]] = [[] for _ in prompts]
        for order, launch in launches:
            for index, outcome in zip(order, launch.outcome(), strict=True):
                assert outcome.token is not None
                tokens[index].append(outcome.token.token_id)
        return tokens

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int = 10_000
    ) -> tuple[list[list[int]], list[Tensor]]:
        """Greedy decoding of several prompts at once; a prompt's chunks mix with decodes.

        Sequence i starts i steps late. Returns the tokens, and the logits that chose each.
        """
        sequences = [PagedSequence() for _ in prompts]
        pending = [list(prompt) for prompt in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        logits: list[list[Tensor]] = [[] for _ in prompts]
        step = 0
        while any(len(done) < num_tokens for done in tokens):
            rows, owners = [], []
            for index, sequence in enumerate(sequences):
                if step < index or len(tokens[index]) == num_tokens:
                    continue
                part, pending[index] = pending[index][:chunk], pending[index][chunk:]
                rows.append(self.row(sequence, part, "none" if pending[index] else "last"))
                if not pending[index]:
                    owners.append(index)
            out = self.runner.execute(StepBatch(rows))
            assert out.shape == (len(owners), self.runner.vocab_size)
            for index, row in zip(owners, out, strict=True):
                tokens[index].append(int(row.argmax()))
                logits[index].append(row)
                pending[index] = [tokens[index][-1]]
            step += 1
        return tokens, [torch.stack(rows) for rows in logits]
