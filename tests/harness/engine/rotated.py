"""Rotating queries and keys, and writing keys and values: against float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from parrot_engine.attention import launch
from parrot_engine.attention.interface import AttentionShape, Rotation
from parrot_engine.models.ops import Angles, rotate
from torch import Tensor

from harness.engine.attention_cases import relative_error


def check_rotation_and_writes(
    shape: AttentionShape,
    qkv: Tensor,
    angle: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    slots: Tensor,
    bound: float,
    rotation: Rotation | None = None,
) -> None:
    """Queries and keys are those of float64 within `bound`, values are copies, the rest is NaN.

    Args:
        shape: heads and blocks.
        qkv: `[tokens, (heads + 2 * kv_heads) * head_dim]`.
        angle: `[tokens, head_dim / 2]`.
        norms: weights of the norms of queries and keys, and their epsilon.
        slots: where each token is written.
        bound: of relative errors.
        rotation: which elements are rotated together.
    """
    count, size, dim, dtype = len(qkv), shape.block_size, shape.head_dim, qkv.dtype
    angle = angle.clone()
    if rotation is not None:
        angle[:, rotation.size // 2 :] = 0.0
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    sizes = (2, int(slots.max()) // size + 1, shape.num_kv_heads, size, dim)
    layer_kv = torch.full(sizes, float("nan"), dtype=dtype, device=qkv.device)
    query = launch.run_rotate_and_write(
        qkv, cos, sin, norms, slots, launch.cache_view(layer_kv), shape=shape, rotation=rotation
    )
    heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    q, k, v = qkv.double().view(count, sum(heads), dim).split(heads, dim=1)
    if norms is not None:
        q = F.rms_norm(q, (dim,), norms[0].double(), norms[2])
        k = F.rms_norm(k, (dim,), norms[1].double(), norms[2])
    angles = Angles(cos.double()[:, None], sin.double()[:, None])
    assert relative_error(query, rotate(q, angles, rotation)) < bound
    blocks, offsets = slots.long() // size, slots.long() % size
    assert relative_error(layer_kv[0, blocks, :, offsets], rotate(k, angles, rotation)) < bound
    assert torch.equal(layer_kv[1, blocks, :, offsets], v.to(dtype))
    assert int(layer_kv.isfinite().sum()) == 2 * count * shape.num_kv_heads * dim
