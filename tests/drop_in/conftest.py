"""A gateway with the engine that plays the model of an agent, whichever tests run."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "gateway"))

from clever_engine import CleverEngine
from serving import Service, serving


@pytest.fixture
async def clever() -> AsyncIterator[Service]:
    async with serving(CleverEngine()) as running:
        yield running
