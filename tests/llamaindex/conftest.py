"""Fixtures of all modules of these tests."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _without_garbage_of_others() -> None:
    """Clients that other files' tests left would be heard of in ours."""
    gc.collect()
