"""Triton's attention on a GPU: back ends, cases, and how exact they have to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.triton_backend import TritonAttention
from torch import Tensor

from harness.engine.attention_cases import Context, PagedCase, relative_error

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {BF16: 5e-3, FP16: 1e-3, FP32: 2e-6}


def device_backend(
    shape: AttentionShape, window: int | None = None, dtype: torch.dtype = BF16, **options: Any
) -> TritonAttention:
    device = torch.device("cuda")
    return TritonAttention(shape, windows=[window], device=device, dtype=dtype, **options)


def device_case(
    shape: AttentionShape, contexts: Sequence[Context], seed: int, dtype: torch.dtype = BF16
) -> PagedCase:
    return PagedCase(shape, contexts, dtype=dtype, device="cuda", seed=seed)


def errors_beside_torch(
    case: PagedCase, out: Tensor, window: int | None = None
) -> tuple[float, float]:
    """Errors of a result, which have a bound, and of torch's own attention in the same dtype."""
    expected = case.expected(window)
    error = relative_error(out, expected)
    own = relative_error(case.expected(window, out.dtype), expected)
    print(f"error {error:.2e}, torch's own {own:.2e}")
    assert error < BOUNDS[out.dtype]
    return error, own
