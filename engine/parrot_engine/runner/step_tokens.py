"""What goes into the model in a step, as arrays on the host, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from parrot_engine.batch import BatchRow
from parrot_engine.runner.sampler import Largest

Ints = npt.NDArray[np.int32]


class StepTokens(NamedTuple):
    """What the rows of a batch compute, row after row."""

    token_ids: Ints
    positions: Ints
    #: Tokens known only to the device, and the rows of the step before that sampled them.
    pending_at: Ints
    pending_rows: Ints
    #: Tokens whose logits are needed; None for all.
    wanted: Ints | None


class Computed(NamedTuple):
    """What a model makes of a step's tokens; valid until the next step is launched."""

    #: `[num_tokens, hidden_size]`, before the final norm.
    hidden: Tensor
    #: `[num_tokens, vocab_size]` in float32, where they were computed along with it.
    logits: Tensor | None
    #: Of these logits, where it was looked for along with them.
    largest: Largest | None = None


class StepLogits(NamedTuple):
    """What a step's tokens are chosen from; valid until the next step is launched."""

    #: Float32 `[num_logit_rows, vocab_size]`, in the order of rows and positions.
    values: Tensor
    #: Of each of these rows, where it is known already.
    largest: Largest | None = None


def gather_tokens(rows: Sequence[BatchRow]) -> StepTokens:
    """The tokens of at least one row."""
    lists, firsts, _, needs, waits, _ = zip(*rows, strict=True)
    counts = list(map(len, lists))
    starts = np.array(firsts, dtype=np.int32)
    token_ids = np.array(list(chain.from_iterable(lists)), dtype=np.int32)
    pending: list[tuple[int, int]] = []
    if waits.count(None) < len(rows):
        pending = [(index, row) for index, row in enumerate(waits) if row is not None]
    if len(rows) == len(token_ids):
        at, waiting = zip(*pending, strict=True) if pending else ((), ())
        if "none" not in needs:
            return _tokens(token_ids, starts, at, waiting, None)
        wanted = [index for index, need in enumerate(needs) if need != "none"]
        return _tokens(token_ids, starts, at, waiting, wanted)
    ends = np.cumsum(counts)
    first_tokens = (ends - counts).astype(np.int32)
    positions = np.repeat(starts - first_tokens, counts)
    positions += np.arange(len(positions), dtype=np.int32)
    wanted = []
    for row, first, end in zip(rows, first_tokens.tolist(), ends.tolist(), strict=True):
        if row.logits == "last":
            wanted.append(end - 1)
        elif row.logits == "all":
            wanted.extend(range(first, end))
    at = tuple(int(first_tokens[index]) for index, _ in pending)
    return _tokens(token_ids, positions, at, tuple(row for _, row in pending), wanted)


def _tokens(
    token_ids: Ints,
    positions: Ints,
    at: Sequence[int],
    waiting: Sequence[int],
    wanted: Sequence[int] | None,
) -> StepTokens:
    return StepTokens(
        token_ids,
        positions,
        np.array(at, dtype=np.int32),
        np.array(waiting, dtype=np.int32),
        None
        if wanted is None or len(wanted) == len(token_ids)
        else np.array(wanted, dtype=np.int32),
    )
