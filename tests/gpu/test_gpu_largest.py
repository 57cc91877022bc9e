"""The largest logit of each row on the device against torch's, launched and out of a graph."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.engine.largest_cases import awkward_logits
from parrot_engine.kernels.sampling.logits import find_largest
from parrot_engine.runner.sampler import Largest
from torch import Tensor

pytestmark = pytest.mark.gpu


def _check(logits: Tensor, found: Largest) -> None:
    expected = logits.max(dim=-1)
    is_finite = expected.values.isfinite()
    assert torch.equal(found.values.nan_to_num(nan=7.0), expected.values.nan_to_num(nan=7.0))
    # Of several equal ones the first counts: torch's own choice on a CPU.
    tokens = logits.cpu().max(dim=-1).indices.cuda()
    assert torch.equal(found.tokens, tokens)
    assert torch.equal(found.tokens, expected.indices)
    assert torch.equal(found.checked, tokens.masked_fill(~is_finite, -1))


@pytest.mark.parametrize("vocab_size", [200, 4096, 128_256, 151_936])
def test_what_torch_finds(vocab_size: int) -> None:
    logits = awkward_logits(vocab_size, vocab_size).cuda()
    rows = len(logits)
    found = Largest(
        torch.empty(rows, device="cuda"), *torch.empty((2, rows), dtype=torch.int64, device="cuda")
    )
    find_largest(logits, *found)
    _check(logits, found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        find_largest(logits, *found)
    for seed in range(3):
        logits.copy_(awkward_logits(vocab_size, seed).roll(seed, 0))
        graph.replay()
        _check(logits, found)
