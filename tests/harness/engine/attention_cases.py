"""Batches over a paged cache with contexts that share blocks, and what attention must give.

For any attention back end on any device. The cache is NaN wherever no token was written; the
reference is float64, sequence by sequence, over the rounded inputs; of a quantized cache over what
it holds of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from parrot_engine.attention import storage
from parrot_engine.attention.interface import AttentionBackend, AttentionShape
from parrot_engine.batch import BatchRow
from torch import Tensor

SCALE = 0.2


class Context(NamedTuple):
    """One sequence: tokens in the cache, tokens of this step, and whose blocks it begins with."""

    cached: int
    new: int = 1
    parent: int | None = None
    #: Tokens shared with the parent; whole blocks of them are the same physical blocks.
    shared: int = 0


class PagedCase:
    """Random tensors and block tables for some contexts."""

    def __init__(
        self,
        shape: AttentionShape,
        contexts: Sequence[Context],
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
        spare_blocks: int = 8,
        quantized: bool = False,
    ) -> None:
        self.shape = shape
        self.quantized = quantized
        self._generator = torch.Generator().manual_seed(seed)
        size = shape.block_size
        total = sum(-(-(c.cached + c.new) // size) for c in contexts) + spare_blocks
        free = list(range(total))
        random.Random(seed).shuffle(free)
        rows = storage.tile_rows(size, shape.head_dim, quantized=quantized)
        sizes = (2, total, shape.num_kv_heads, rows, shape.head_dim)
        if quantized:
            # NaN as float8 and as float32.
            self.layer_kv = torch.full(sizes, 255, dtype=torch.uint8, device=device)
        else:
            self.layer_kv = torch.full(sizes, float("nan"), dtype=dtype).to(device)
        self.rows: list[BatchRow] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        for context in contexts:
            self._add(context, free, dtype, device)
        count = sum(c.new for c in contexts)
        self.query = self._draw(count, shape.num_heads).to(dtype).to(device)
        new = [(k[c.cached :], v[c.cached :]) for c, k, v in self._per_context(contexts)]
        self.key = torch.cat([key for key, _ in new])
        self.value = torch.cat([value for _, value in new])

    def _per_context(self, contexts: Sequence[Context]) -> list[tuple[Context, Tensor, Tensor]]:
        return list(zip(contexts, self._keys, self._values, strict=True))

    def _draw(self, count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, self.shape.head_dim, generator=self._generator)

    def _add(self, context: Context, free: list[int], dtype: torch.dtype, device: str) -> None:
        length, size = context.cached + context.new, self.shape.block_size
        key = self._draw(length, self.shape.num_kv_heads).to(dtype).to(device)
        value = self._draw(length, self.shape.num_kv_heads).to(dtype).to(device)
        table: list[int] = []
        if context.parent is not None:
            assert context.shared <= context.cached
            key[: context.shared] = self._keys[context.parent][: context.shared]
            value[: context.shared] = self._values[context.parent][: context.shared]
            table = self.rows[context.parent].block_table[: context.shared // size]
        while len(table) * size < length:
            table.append(free.pop())
        positions = torch.arange(context.cached, device=device)
        blocks = torch.tensor(table, device=device)[positions // size]
        for part, heads in zip(self.layer_kv, (key, value), strict=True):
            if self.quantized:
                tiles = blocks[:, None] * heads.shape[1] + torch.arange(heads.shape[1]).to(device)
                slots = tiles * part.shape[2] + (positions % size)[:, None]
                bits, scales = storage.quantize(heads[: context.cached])
                storage.write_quantized(part, slots.view(-1), bits.flatten(0, 1), scales.view(-1))
            else:
                part[blocks, :, positions % size] = heads[: context.cached]
        self._keys.append(key)
        self._values.append(value)
        self.rows.append(BatchRow([0] * context.new, context.cached, table))

    def run(self, backend: AttentionBackend[Any], window: int | None = None, **how: Any) -> Tensor:
        """Run the step on the back end; the output is `[num_tokens, num_heads * head_dim]`."""
        plan = backend.plan(self.rows)
        cache = self.layer_kv.clone()
        return backend.forward(
            self.query, self.key, self.value, cache, plan, window=window, scale=SCALE, **how
        )

    def expected(
        self,
        window: int | None = None,
        dtype: torch.dtype = torch.float64,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The same by torch, in `dtype`."""
        outs = []
        token = 0
        group = self.shape.num_heads // self.shape.num_kv_heads
        for row, *heads in zip(self.rows, self._keys, self._values, strict=True):
            key, value = (self._as_stored(part) for part in heads)
            count = len(row.token_ids)
            query = self.query[token : token + count].to(dtype).transpose(0, 1)
            queries = torch.arange(row.start, row.start + count, device=key.device)[:, None]
            keys = torch.arange(len(key), device=key.device)
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            key = key.to(dtype).repeat_interleave(group, dim=1).transpose(0, 1)[None]
            value = value.to(dtype).repeat_interleave(group, dim=1).transpose(0, 1)[None]
            if softcap is None and sinks is None:
                attended = F.scaled_dot_product_attention(
                    query[None], key, value, attn_mask=seen, scale=SCALE
                )
            else:
                scores = query[None] @ key.mT * SCALE
                if softcap is not None:
                    scores = softcap * (scores / softcap).tanh()
                scores = scores.masked_fill(~seen, float("-inf"))
                if sinks is not None:
                    beside = sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
                    scores = torch.cat((scores, beside), dim=-1)
                attended = scores.softmax(dim=-1)[..., : key.shape[-2]] @ value
            outs.append(attended[0].transpose(0, 1).reshape(count, -1))
            token += count
        return torch.cat(outs)

    def _as_stored(self, heads: Tensor) -> Tensor:
        if not self.quantized:
            return heads
        bits, scales = storage.quantize(heads)
        return bits.view(torch.float8_e4m3fn).double() * scales[..., None].double()


def relative_error(out: Tensor, expected: Tensor) -> float:
    """‖out - expected‖ / ‖expected‖ in float64; infinite when anything is not finite."""
    difference = (out.double() - expected.double()).norm() / expected.double().norm()
    return float(difference.nan_to_num(float("inf"), float("inf")))


def mixed_contexts(block: int, chunk: int) -> list[Context]:
    """Lengths at all edges: of blocks, of chunks; decodes, short rows, prefills; alone."""
    cached = [0, block - 2, block - 1, block, chunk - 1, chunk, chunk + block - 1, 2 * chunk + 3]
    decodes = [Context(length) for length in cached]
    return [
        *decodes,
        Context(0, block + 3),
        Context(chunk + 5, 9 + block),
        Context(2 * chunk - 2, 4),
        Context(3, 2),
    ]


def shared_contexts(block: int, chunk: int) -> list[Context]:
    """Two families, one of two levels, and strangers; prefixes at and off the chunks' edges."""
    root = 2 * chunk + 2 * block
    family = [Context(root + own, 1, 0, root) for own in (1, 2, block, chunk + 3, 5, 6, 7)]
    branch = [Context(root + chunk + own, 1, 4, root + chunk) for own in (3, 4, block + 1)]
    second = 8 + len(branch)
    other = [Context(chunk + own, 1, second, chunk) for own in (1, block - 1, chunk)]
    return [
        Context(root),
        *family,
        *branch,
        Context(chunk + 2),
        *other,
        Context(chunk + 9, 3, second, chunk),
        Context(3),
        Context(2 * chunk + 1),
    ]
