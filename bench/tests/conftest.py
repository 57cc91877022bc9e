"""A real gateway for the benches to measure, and no data of the user."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess
from hypothesis import settings

# Nothing asserts a speed, and every run tries the same examples.
settings.register_profile("tests", parent=settings(), deadline=None, derandomize=True)
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """Give gateways under test a folder of their own for files and batches."""
    data = tempfile.TemporaryDirectory(prefix="parrot-data-", ignore_cleanup_errors=True)
    os.environ["XDG_DATA_HOME"] = data.name
    config.add_cleanup(data.cleanup)
    if hasattr(config.option, "benchmark_disable"):
        config.option.benchmark_disable = True


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway with the demo model on a real engine process, behind a key."""
    with GatewayProcess(
        config={
            "models": [{"model": DEMO_MODEL, "max_batch_size": 4, "num_blocks": 512}],
            "engines": {"heartbeat_s": 0.5},
            "batches": {"folder": str(tmp_path_factory.mktemp("batches"))},
        },
        api_key=API_KEY,
    ) as gateway:
        yield gateway
