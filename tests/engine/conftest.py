"""One thread for all tests of the engine, and Triton's interpreter where there is no GPU.

The latter before anything imports triton: its own functions, like ours, are what they are from the
first import on, and transformers imports it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Others run beside these tests.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(params=["off", "on"], scope="module")
def overlap(request: pytest.FixtureRequest) -> Iterator[str]:
    """Everything once with each step waited for, once with the next one launched before."""
    from harness.engine.doubles import run_both_ways

    yield from run_both_ways(request.param)


@pytest.fixture(scope="module")
def poison() -> Iterator[None]:
    """Fill what `torch.empty` gives with NaN: an element that nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
