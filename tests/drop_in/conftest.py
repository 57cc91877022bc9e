"""A gateway with the engine that plays the model of an agent, whichever tests run."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from harness.clever_engine import CleverEngine
from harness.gateway.serving import Service, serving


@pytest.fixture
async def clever() -> AsyncIterator[Service]:
    async with serving(CleverEngine()) as running:
        yield running
