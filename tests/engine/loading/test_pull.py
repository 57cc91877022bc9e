"""Downloads in a process of their own, from a hub on this machine."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from harness.fake_hub import FakeHub, fake_hub
from harness.processes import clean_environment, wait_until
from parrot_engine.loading.hub import ModelNotFoundError, hub_failures, resolve_model

WAIT_S = 60
SMALL_FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def start(hub: FakeHub, cache: Path, model: str, max_bytes: int = 10**9) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "parrot_engine.loading.pull", model, "--max-bytes", str(max_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=clean_environment(hub.environment(cache)),
    )


def lines(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Return the lines that it writes until its end."""
    with process:
        assert process.stdout is not None
        return [json.loads(line) for line in process.stdout]


def test_what_was_cut_off_is_fetched_and_nothing_else(tmp_path: Path) -> None:
    repository, cache = tmp_path / "repository", tmp_path / "cache"
    shutil.copytree(resolve_model("parrot-demo"), repository)
    for name in ("code.py", "pytorch_model.bin", "model.gguf"):
        (repository / name).write_bytes(b"never fetched")
    with fake_hub({"own/tiny": repository}) as hub:
        hub.held["model.safetensors"] = threading.Event()
        with start(hub, cache, "own/tiny") as first:
            assert hub.holding.wait(WAIT_S)
            # Files are fetched side by side, in any order.
            wait_until(lambda: set(hub.fetched) >= SMALL_FILES, "the other files are fetched")
            assert first.stdin is not None
            # As when the process that asked for it is killed.
            first.stdin.close()
            assert first.wait(WAIT_S) == 1
        fetched = set(hub.fetched)
        assert not fetched & {"code.py", "pytorch_model.bin", "model.gguf"}
        assert not list(cache.rglob("*.incomplete"))
        hub.held["model.safetensors"].set()
        hub.fetched.clear()
        begun, *_, last = lines(start(hub, cache, "own/tiny"))
        assert "model.safetensors" in hub.fetched
        assert begun["done_bytes"] < begun["total_bytes"]
        size = (repository / "model.safetensors").stat().st_size
        assert (Path(last["path"]) / "model.safetensors").stat().st_size == size
        # It is all there now, and too much for a smaller limit.
        hub.fetched.clear()
        (refused,) = lines(start(hub, cache, "own/tiny", max_bytes=1000))
        assert refused["failure"] == "download_too_large"
        assert hub.fetched == []


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (OSError(errno.ENOSPC, "no space"), "disk_full"),
        (OSError("no route"), "hub_unreachable"),
        (ValueError("bad name"), "download_failed"),
        (RuntimeError("the server hung up"), "download_failed"),
        (ModelNotFoundError("none", "no_safetensors"), "no_safetensors"),
    ],
)
def test_failures_have_names(error: Exception, failure: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught, hub_failures("own/tiny"):
        raise error
    assert caught.value.failure == failure
