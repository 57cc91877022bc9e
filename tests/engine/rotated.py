"""What rotating queries and keys, and writing keys and values, has to leave."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attention_cases import relative_error
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.models.ops import Angles, rotate
from torch import Tensor


def check_rotated_and_written(
    query: Tensor,
    layer_kv: Tensor,
    *,
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor, float] | None,
    slots: Tensor,
    shape: AttentionShape,
    bound: float,
) -> None:
    """Queries and keys are those of float64 within `bound`, values are copies, the rest is NaN.

    Args:
        query: what came out, `[tokens, heads, head_dim]`.
        layer_kv: a cache that was NaN before.
        qkv: what went in, `[tokens, (heads + 2 * kv_heads) * head_dim]`.
        angles: cosine and sine for each token.
        norms: weights of the norms of queries and keys, and their epsilon.
        slots: of each token.
        shape: heads and blocks.
        bound: of relative errors.
    """
    count, size = len(qkv), shape.block_size
    heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    q, k, v = qkv.double().view(count, sum(heads), shape.head_dim).split(heads, dim=1)
    if norms is not None:
        q = F.rms_norm(q, (shape.head_dim,), norms[0].double(), norms[2])
        k = F.rms_norm(k, (shape.head_dim,), norms[1].double(), norms[2])
    cos, sin = angles
    turned = Angles(cos.double()[:, None], sin.double()[:, None])
    assert relative_error(query, rotate(q, turned)) < bound
    blocks, offsets = slots.long() // size, slots.long() % size
    assert relative_error(layer_kv[0, blocks, :, offsets], rotate(k, turned)) < bound
    assert torch.equal(layer_kv[1, blocks, :, offsets], v.to(qkv.dtype))
    assert int(layer_kv.isfinite().sum()) == 2 * count * shape.num_kv_heads * shape.head_dim
