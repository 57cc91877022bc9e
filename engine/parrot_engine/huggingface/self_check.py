"""A few tokens through the paged path and through transformers' own: the same logits, or no paging.

Two contexts of random tokens are computed in each way that steps differ: a chunk of a prompt, one
behind it, single tokens, both contexts side by side, in blocks out of order. Whatever a model does
across tokens other than by attention shows here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from parrot_engine.batch import BatchRow, StepBatch
from parrot_engine.huggingface.packed_model import PAGED, PackedModel
from parrot_engine.huggingface.probe import UnpagedModelError, probe
from parrot_engine.runner.model_runner import ModelRunner

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
    """`model` over paged keys and values, its attention function replaced.

    Args:
        model: in evaluation mode, on its device.
        longest: the longest context in tokens.
        block_size: of the cache, in tokens.
        make_runner: makes a runner of the result with so many blocks.

    Raises:
        UnpagedModelError: it cannot run so, or computes something else then; it is as it was.
    """
    probed = probe(model, longest)
    own_attention = model.config._attn_implementation
    packed = PackedModel(model, probed.body, probed.shape, probed.layers)
    size = block_size + _BEHIND
    if size > longest:
        raise UnpagedModelError(f"its contexts end at {longest} tokens")
    counts = [-(-count // block_size) for count in (size, _SHORT)]
    runner = make_runner(packed, sum(counts))
    # Downwards, the longer context's behind the other's.
    blocks = list(reversed(range(sum(counts))))
    at, of = blocks[: counts[0]], blocks[counts[0] :]
    generator = torch.Generator().manual_seed(0)
    limit = min(packed.config.vocab_size, _MAX_TOKEN_ID)
    long, short = (
        torch.randint(1, limit, (count,), generator=generator).tolist() for count in (size, _SHORT)
    )
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
        found = [torch.cat((a, c, e)), torch.cat((b, d, f))]
        _compare(torch.cat(found), torch.cat(expected), is_exact=_is_exact(runner))
    except Exception as error:
        model.set_attn_implementation(own_attention)
        if isinstance(error, UnpagedModelError):
            raise
        raise UnpagedModelError(f"a first step fails: {error!r}") from error
    return packed


def _row(tokens: list[int], start: int, end: int, blocks: list[int]) -> BatchRow:
    return BatchRow(tokens[start:end], start, blocks, "all")


def _expected(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    token_ids = torch.tensor([tokens], device=model.device)
    logits: Tensor = model(input_ids=token_ids, use_cache=False).logits[0]
    return logits.float()


def _is_exact(runner: ModelRunner) -> bool:
    return runner.dtype == "float32" and runner.kv_cache.dtype is torch.float32


def _compare(found: Tensor, expected: Tensor, *, is_exact: bool) -> None:
    difference = float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())
    # NOTE: a NaN fails as well.
    if not difference <= (_TOLERANCE if is_exact else _ROUNDED_TOLERANCE):
        raise UnpagedModelError(
            f"its logits over paged keys and values differ from its own by {difference:.2g}"
        )
