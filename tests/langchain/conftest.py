"""One gateway in front of the scripted model, for all modules that use it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from harness.processes import API_KEY, GatewayProcess, upstream_settings
from harness.scripted_model import ScriptedModel


@pytest.fixture(scope="module", autouse=True)
def _without_garbage_of_others() -> None:
    """Clients and deferred texts that other files' tests left would be heard of in ours."""
    gc.collect()


@pytest.fixture(scope="session")
def scripted() -> Iterator[ScriptedModel]:
    """The scripted model itself, for what a test wants to know of the calls it got."""
    with ScriptedModel() as server:
        yield server


@pytest.fixture(scope="session")
def gateway(scripted: ScriptedModel) -> Iterator[GatewayProcess]:
    """A gateway with a key in front of the scripted model."""
    config = {"upstreams": [upstream_settings("behind", scripted.base_url)]}
    with GatewayProcess(config=config, api_key=API_KEY) as process:
        yield process
