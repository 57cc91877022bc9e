"""Sums over ranks on the device: two ranks on one GPU, each on a stream of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.engine.attention_cases import relative_error
from parrot_engine.kernels.sum_ranks import Exchange, empty_boxes, sum_ranks_onto

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]

EPS = 1e-5
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
MAX_ROWS = 64


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 896), (torch.float16, 1000), (torch.bfloat16, 4096)]
)
def test_two_ranks_get_the_same_sum(dtype: torch.dtype, size: int) -> None:
    count, nothing = empty_boxes(2, MAX_ROWS, size, dtype)
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    boxes = torch.zeros(2, count, dtype=bits, device="cuda")
    addresses = torch.tensor([part.data_ptr() for part in boxes], device="cuda")
    exchanges = [
        Exchange(rank, addresses, torch.zeros(MAX_ROWS, dtype=torch.int32, device="cuda"))
        for rank in range(2)
    ]
    streams = [torch.cuda.Stream() for _ in range(2)]
    weight = torch.randn(size, device="cuda").to(dtype)
    # Nothing is waited for in boxes of zeros: a kernel that waits must not keep the other one from
    # being loaded.
    for exchange in exchanges:
        zeros = torch.zeros(1, size, dtype=dtype, device="cuda")
        sum_ranks_onto(zeros, zeros, exchange, (weight, EPS))
        exchange.turns.zero_()
    boxes.fill_(nothing)
    for rows in (MAX_ROWS, 1, 7, MAX_ROWS, 3, 3, 3):
        hidden, *shares = torch.randn(3, rows, size, device="cuda").to(dtype)
        torch.cuda.synchronize()
        results = []
        for stream, exchange, share in zip(streams, exchanges, shares, strict=True):
            with torch.cuda.stream(stream):
                results.append(sum_ranks_onto(share, hidden, exchange, (weight, EPS)))
        torch.cuda.synchronize()
        (out, summed), theirs = results
        assert torch.equal(out, theirs[0])
        assert torch.equal(summed, theirs[1])
        exact = torch.stack([hidden, *shares]).double().sum(0)
        assert relative_error(summed, exact) < BOUNDS[dtype]
        exact = F.rms_norm(summed.double(), (size,), weight.double(), EPS)
        assert relative_error(out, exact) < BOUNDS[dtype]
