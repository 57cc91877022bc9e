"""Tests on an NVIDIA GPU: torch, triton, transformers and pytest are all they need.

No fixtures of the gateway's tests; run them alone with `--confcutdir=tests/gpu` where only the
engine is installed. Helpers come from `harness.engine`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poison() -> Iterator[None]:
    """Fill what `torch.empty` gives with NaN: an element that nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def seed() -> int:
    """Another one each time: the kernels must be right on any numbers."""
    return int(torch.seed() % 2**31)
