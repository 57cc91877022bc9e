"""A few tokens in steps, and in one pass of transformers: a way whose logits differ is not taken.

Over paged KV two contexts of random tokens are computed in each way that steps differ: a chunk of a
prompt, one behind it, single tokens, both contexts side by side, in blocks out of order. Whatever a
model does across tokens other than by attention shows here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from parrot_engine.batch import BatchRow, StepBatch
from parrot_engine.huggingface.packed_model import PAGED, PackedModel
from parrot_engine.huggingface.probe import UnpagedModelError, probe
from parrot_engine.runner.model_runner import ModelRunner

_log = logging.getLogger(__name__)

#: Tokens of the shorter context, and tokens behind the first block of the longer one.
_SHORT, _BEHIND = 7, 9
#: Ids of the tokens are smaller: those with a meaning of their own are the last of a vocabulary.
_MAX_TOKEN_ID = 1000
#: The largest distance of a token's logits from the expected ones, relative to the norm of these.
#: In 16 bits, and with a cache of 8, the paths round differently.
_TOLERANCE = 5e-3
_ROUNDED_TOLERANCE = 0.15


@torch.inference_mode()
def pack_checked(
    model: PreTrainedModel,
    longest: int,
    block_size: int,
    make_runner: Callable[[PackedModel, int], ModelRunner],
) -> PackedModel:
    """Return `model` over paged keys and values, its attention function replaced.

    Args:
        model: in evaluation mode, on its device.
        longest: the longest context in tokens.
        block_size: of the cache, in tokens.
        make_runner: makes a runner of the result with a number of blocks.

    Raises:
        UnpagedModelError: it cannot run so, or computes something else then.
    """
    probed = probe(model, longest)
    packed = PackedModel(model, probed.body, probed.shape, probed.layers)
    size = block_size + _BEHIND
    if size > longest:
        raise UnpagedModelError(f"its contexts end at {longest} tokens")
    counts = [-(-count // block_size) for count in (size, _SHORT)]
    runner = make_runner(packed, sum(counts))
    # Downwards, the longer context's behind the other's.
    blocks = list(reversed(range(sum(counts))))
    at, of = blocks[: counts[0]], blocks[counts[0] :]
    drawn = _draw(size + _SHORT, packed.config.vocab_size)
    long, short = drawn[:size], drawn[size:]
    expected = [_expected(model, tokens) for tokens in (long, short)]
    cut = size // 2
    steps = [
        [_row(long, 0, cut, at), _row(short, 0, 5, of)],
        [_row(short, 5, 6, of), _row(long, cut, size - 1, at)],
        [_row(long, size - 1, size, at), _row(short, 6, 7, of)],
    ]
    model.set_attn_implementation(PAGED)
    try:
        (a, b), (d, c), (e, f) = (
            runner.execute(StepBatch(rows)).split([len(row.token_ids) for row in rows])
            for rows in steps
        )
    except Exception as error:
        raise UnpagedModelError(f"a first step fails: {error!r}") from error
    found = torch.cat((a, c, e, b, d, f))
    difference = _difference(found, torch.cat(expected))
    rounds = runner.kv_cache.dtype is not torch.float32
    if not difference <= (_ROUNDED_TOLERANCE if rounds else _TOLERANCE):
        raise UnpagedModelError(f"its logits over paged KV differ from its own by {difference:.2g}")
    return packed


def check_graphs(runner: ModelRunner, plain: ModelRunner) -> None:
    """Have `runner` do without CUDA graphs if it computes something else than `plain` with them.

    Writes to the first block of both caches.
    """
    tokens = _draw(_SHORT, runner.vocab_size)
    steps = [_row(tokens, 0, _SHORT - 1, [0]), _row(tokens, _SHORT - 1, _SHORT, [0])]
    found, expected = (
        torch.cat([each.execute(StepBatch([row])) for row in steps]) for each in (runner, plain)
    )
    rounds = runner.kv_cache.dtype is not torch.float32
    if not _difference(found, expected) <= (_ROUNDED_TOLERANCE if rounds else _TOLERANCE):
        _log.warning("steps are launched kernel by kernel: graphs compute something else")
        runner.forget_graphs()


def _draw(count: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    limit = min(vocab_size, _MAX_TOKEN_ID)
    token_ids: list[int] = torch.randint(1, limit, (count,), generator=generator).tolist()
    return token_ids


def _row(tokens: list[int], start: int, end: int, blocks: list[int]) -> BatchRow:
    return BatchRow(tokens[start:end], start, blocks, "all")


def _expected(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    token_ids = torch.tensor([tokens], device=model.device)
    logits: Tensor = model(input_ids=token_ids, use_cache=False).logits[0]
    return logits.float()


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest distance of a row, relative to its norm; NaN where one holds a NaN."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())
