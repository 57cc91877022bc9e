"""Tests on an NVIDIA GPU: torch, triton, transformers and pytest are all they need.

No fixtures of the gateway's tests; run them alone with `--confcutdir=tests/gpu` where only the
engine is installed. Helpers are those of the engine's tests.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "engine"), str(TESTS)]


@pytest.fixture
def poison() -> Iterator[None]:
    """Whatever `torch.empty` gives is NaN: an element that nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def seed() -> int:
    """Another one each time: the kernels must be right on any numbers."""
    return int(torch.seed() % 2**31)
