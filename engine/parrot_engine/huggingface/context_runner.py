"""Forward passes of a transformers model, one context each, and their past key values.

A KV block of this runner is the past key values of a whole context in transformers' own cache; its
block size is the longest context.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from parrot_engine.batch import BatchRow, RowOutcome, Runner, StepBatch
from parrot_engine.models.config import GenerationDefaults
from parrot_engine.runner.model_runner import InFlightStep
from parrot_engine.runner.sampler import StepLogits

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Past:
    cache: DynamicCache
    token_ids: list[int] = field(default_factory=list)
    #: The model's prediction behind the last of them, float32 `[1, vocab_size]`.
    logits: Tensor | None = None


class ContextRunner(Runner):
    """Executes steps with a transformers model, row by row."""

    def __init__(
        self,
        model: PreTrainedModel,
        defaults: GenerationDefaults,
        *,
        longest: int,
        num_blocks: int,
        takes_chunks: bool = True,
    ) -> None:
        """Take a loaded model.

        Args:
            model: in evaluation mode, on its device.
            defaults: the checkpoint's rules for ending and sampling.
            longest: the longest context in tokens.
            num_blocks: contexts that keep their past key values.
            takes_chunks: whether the model goes on from past key values with several tokens;
                otherwise all tokens are computed again where that is needed.
        """
        self.model = model
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.eos_token_ids = defaults.eos_token_ids
        self.max_position = self.block_size = longest
        self.architecture = type(model).__name__
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.device = str(model.device)
        self.num_blocks = num_blocks
        self.default_sampling = defaults.sampling
        self._takes_chunks = takes_chunks
        self._past: dict[int, _Past] = {}

    @property
    def num_cached(self) -> int:
        """Contexts that hold past key values."""
        return len(self._past)

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> ContextStep:
        """Compute a step; a row that fails leaves the others as they are."""
        for source, target in batch.copies:
            self._past[target] = copy.deepcopy(self._past[source])
        logits: list[Tensor] = []
        failed: set[int] = set()
        for index, row in enumerate(batch.rows):
            block = int(row.block_table[0])
            num_logits = {"none": 0, "last": 1, "all": len(row.token_ids)}[row.logits]
            try:
                computed = self.compute(row)
            except Exception:
                _log.exception("a forward pass of %d tokens failed", len(row.token_ids))
                self._past.pop(block, None)
                failed.add(index)
                computed = torch.zeros(num_logits, self.vocab_size, device=self.model.device)
            logits.append(computed[len(computed) - num_logits :])
        return ContextStep(batch, torch.cat(logits), failed)

    @torch.inference_mode()
    def compute(self, row: BatchRow) -> Tensor:
        """The logits of a row's tokens, float32; of the last one alone where no others matter."""
        block = int(row.block_table[0])
        if row.start == 0:
            self._past[block] = self._empty_past()
        past = self._past[block]
        # A row may begin with the last token computed, whose logits are needed once more.
        num_known = len(past.token_ids) - row.start
        token_ids = row.token_ids[num_known:]
        known = [past.logits] if num_known and past.logits is not None else []
        if not token_ids:
            return torch.cat(known)
        num_new = len(token_ids)
        if num_new > 1 and past.token_ids and not self._takes_chunks:
            token_ids = [*past.token_ids, *token_ids]
            past = self._past[block] = self._empty_past()
        num_needed = num_new if row.logits == "all" else 1
        output = self.model(
            input_ids=torch.tensor([token_ids], device=self.model.device),
            past_key_values=past.cache,
            use_cache=True,
            logits_to_keep=num_needed,
        )
        logits: Tensor = output.logits[0, -num_needed:].float()
        past.cache = output.past_key_values
        past.token_ids += token_ids
        past.logits = logits[-1:].clone()
        return torch.cat([*known, logits])

    def _empty_past(self) -> _Past:
        return _Past(DynamicCache(config=self.model.config))

    def retain(self, references: Callable[[int], int]) -> None:
        """Drop the past key values of blocks that nothing refers to."""
        for block in [block for block in self._past if references(block) == 0]:
            del self._past[block]

    def close(self) -> None:
        self._past.clear()


class ContextStep(InFlightStep):
    """A computed step, of which single rows may have failed."""

    def __init__(self, batch: StepBatch, logits: Tensor, failed: Collection[int]) -> None:
        super().__init__(batch, StepLogits(logits), logits.device, "torch")
        self._failed = failed

    def outcome(self) -> list[RowOutcome]:
        return [
            RowOutcome(has_failed=True) if index in self._failed else outcome
            for index, outcome in enumerate(super().outcome())
        ]
