"""Masks over the vocabulary on the device: the kernel against torch on the CPU, and a draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from parrot_engine.batch import SamplingRow
from parrot_engine.protocol import SamplingParams
from parrot_engine.runner.sampler import apply_masks, sample
from parrot_engine.runner.step_inputs import TokenMasks

pytestmark = pytest.mark.gpu


class Evens:
    """Allows every second token."""

    problem = None
    is_closing = False

    def fill_mask(self, generated_token_ids: Sequence[int], mask: Any) -> None:
        """See `Matcher`."""
        mask[:] = np.int32(0x55555555)


@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 32), (2, 1025), (64, 128_256)])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_does_as_torch_does(rows: int, width: int, some: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows * width)
    bits = torch.randint(-(2**31), 2**31, (rows, -(-width // 32)), generator=generator)
    bits = bits.to(torch.int32)
    logits = torch.randn((rows + 2 * some, width), generator=generator).to(dtype)
    at = torch.arange(rows).flip(0) + 1 if some else None
    expected = logits.clone()
    apply_masks(expected, TokenMasks(at, bits))
    found = logits.cuda()
    apply_masks(found, TokenMasks(None if at is None else at.cuda(), bits.cuda()))
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draw_under_masks(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1)
    logits = torch.randn((8, 128_256), device="cuda")
    rows = [
        SamplingRow(params, [], [], seed, frozenset(), matcher=Evens() if seed % 2 else None)
        for seed in range(8)
    ]
    found = [token.token_id for token in sample(logits, rows)]
    expected = [token.token_id for token in sample(logits.cpu(), rows)]
    assert all(token is not None and token % 2 == 0 for token in found[1::2])
    if temperature == 0:
        assert found == expected
