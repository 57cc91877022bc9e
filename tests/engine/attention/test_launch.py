"""Kernels that a model gets on a device, and how they are compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels come with triton")

from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.launch import DeviceLimits, Tunings, tunings

LLAMA = AttentionShape(32, 8, 128, 64)
HOPPER = DeviceLimits(132, 227 * 1024, copy_engine=True, hopper=True)


def _tunings(
    shape: AttentionShape = LLAMA,
    dtype: torch.dtype = torch.bfloat16,
    limits: DeviceLimits = HOPPER,
    *,
    quantized: bool = False,
) -> Tunings:
    return tunings(shape, dtype, limits, quantized=quantized)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantized", [False, True])
def test_prefill_of_16_bits_is_specialized(
    head_dim: int, block_size: int, dtype: torch.dtype, quantized: bool
) -> None:
    shape = LLAMA._replace(head_dim=head_dim, block_size=block_size)
    prefill = _tunings(shape, dtype, quantized=quantized).prefill
    assert prefill.specialized
    assert prefill.block_m == 128
    assert prefill.programs_per_sm == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "limits"),
    [
        (LLAMA, torch.bfloat16, HOPPER._replace(hopper=False)),
        (LLAMA, torch.float32, HOPPER),
        (LLAMA._replace(block_size=16), torch.bfloat16, HOPPER),
        (LLAMA._replace(head_dim=96), torch.bfloat16, HOPPER),
        (LLAMA._replace(head_dim=256), torch.bfloat16, HOPPER),
        (AttentionShape(200, 1, 128, 64), torch.bfloat16, HOPPER),
    ],
)
@pytest.mark.parametrize("quantized", [False, True])
def test_other_prefill_is_not(
    shape: AttentionShape, dtype: torch.dtype, limits: DeviceLimits, quantized: bool
) -> None:
    assert not _tunings(shape, dtype, limits, quantized=quantized).prefill.specialized
