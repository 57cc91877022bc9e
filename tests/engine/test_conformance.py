"""The builtin engine passes the checks that every engine passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import CONFIGS, make_checkpoint
from parrot_engine.builtin.engine import BuiltinEngine
from parrot_engine.builtin.settings import BuiltinSettings
from parrot_engine.protocol import Engine
from parrot_engine.testing import ENGINE_CHECKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("model"), CONFIGS["llama"])


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_follows_the_protocol(check: Callable[[Engine], None], folder: Path) -> None:
    settings = BuiltinSettings(device="cpu", dtype="float32", num_blocks=64)
    engine = BuiltinEngine.load(folder, settings, model="m")
    check(engine)
    engine.check_integrity()
    engine.close()
