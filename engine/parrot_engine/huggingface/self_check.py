"""Compares a few tokens in paged steps with one pass of transformers, and refuses models whose
logits differ.

Two contexts of random tokens are computed over paged KV in every form that steps have: a chunk of a
prompt, a later chunk, single tokens, both contexts together, and blocks out of order. This reveals
any computation across tokens apart from attention.
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

#: Tokens of the shorter context, and of the longer one after its first block.
_SHORT, _BEHIND = 7, 9
#: Token ids are below this, because a vocabulary's last tokens have special meanings.
_MAX_TOKEN_ID = 1000
#: Maximum distance of a token's logits from the expected ones, relative to the norm of the latter.
#: Both paths round differently in 16 bits and with an 8-bit cache.
_TOLERANCE = 5e-3
_ROUNDED_TOLERANCE = 0.15


@torch.inference_mode()
def pack_checked(
    model: PreTrainedModel,
    longest: int,
    block_size: int,
    make_runner: Callable[[PackedModel, int], ModelRunner],
) -> PackedModel:
    """Return `model` over paged keys and values, after replacing its attention function.

    Args:
        model: in evaluation mode, on its device.
        longest: the longest context in tokens.
        block_size: the cache's, in tokens.
        make_runner: makes a runner from the result, with this number of blocks.

    Raises:
        UnpagedModelError: it does not work so, or its logits differ.
    """
    probed = probe(model, longest)
    packed = PackedModel(model, probed.body, probed.shape, probed.layers)
    size = block_size + _BEHIND
    if size > longest:
        raise UnpagedModelError(f"its contexts end at {longest} tokens")
    counts = [-(-count // block_size) for count in (size, _SHORT)]
    runner = make_runner(packed, sum(counts))
    # In descending order; the longer context's blocks have the higher ids.
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
    """Turn CUDA graphs of `runner` off if it computes other logits with them than `plain` does.

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
    """Return the largest distance of a row, relative to its norm; NaN if a row has a NaN."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())
