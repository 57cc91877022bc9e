"""Choice of an engine by its options, the places of models, and the program around it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from harness.engine.checkpoints import CONFIGS, make_checkpoint
from harness.engine_checks import greedy, run_until_idle, tokens_of
from parrot_engine.exceptions import CheckpointError, SettingsError, UnsupportedModelError
from parrot_engine.huggingface import HuggingFaceSettings
from parrot_engine.loading import hub
from parrot_engine.loading.factory import EngineOptions, load_engine
from parrot_engine.loading.hub import ModelNotFoundError, resolve_model, served_name
from parrot_engine.protocol import Fill, Generate, SamplingParams
from parrot_engine.server.command import EXIT_CONFIG
from parrot_engine.settings import BuiltinSettings
from parrot_engine.text import Tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from transformers import GPT2Config

    gpt2 = GPT2Config(
        vocab_size=257, n_embd=32, n_layer=1, n_head=2, n_positions=128,
        bos_token_id=None, eos_token_id=256, pad_token_id=None,
    )  # fmt: skip
    root = tmp_path_factory.mktemp("models")
    return {
        "known": make_checkpoint(root / "known", CONFIGS["llama"]),
        "unknown": make_checkpoint(root / "unknown", gpt2),
    }


def options(folder: Path, **changes: Any) -> EngineOptions:
    return EngineOptions(str(folder), **{"device": "cpu", "num_blocks": 32, **changes})


@pytest.mark.parametrize(
    ("model", "kind", "expected"),
    [
        ("known", "auto", "builtin"),
        ("known", "builtin", "builtin"),
        ("known", "huggingface", "huggingface"),
        ("unknown", "auto", "huggingface"),
    ],
)
def test_kinds(folders: dict[str, Path], model: str, kind: Any, expected: str) -> None:
    loaded = load_engine(options(folders[model], kind=kind, max_context_tokens=64))
    assert loaded.engine.info.kind == expected
    assert loaded.engine.info.model == model
    assert loaded.engine.info.max_context_tokens == 64
    tokenizer = Tokenizer(loaded.text)
    events = run_until_idle(loaded.engine, Fill(1, tokenizer.encode("Hi")), Generate(1, greedy(3)))
    assert len(tokens_of(events, 1)) == 3
    loaded.engine.close()


def test_every_setting_of_an_engine_is_an_option() -> None:
    names = {item.name for item in fields(EngineOptions)}
    for settings in (BuiltinSettings, HuggingFaceSettings):
        assert {item.name for item in fields(settings)} <= names


def test_memory_for_the_cache_is_given_in_bytes(folders: dict[str, Path]) -> None:
    sizes = []
    for size in (10**5, 2 * 10**5):
        given = options(folders["known"], num_blocks=None, kv_cache_bytes=size)
        loaded = load_engine(given)
        sizes.append(loaded.engine.info.num_blocks)
        loaded.engine.close()
    assert 1 <= sizes[0] <= sizes[1] // 2


@pytest.mark.parametrize("kind", ["builtin", "huggingface"])
def test_a_seed_repeats_generations_that_give_none(folders: dict[str, Path], kind: Any) -> None:
    said = []
    for seed in (1, 1, 2):
        loaded = load_engine(options(folders["known"], kind=kind, seed=seed))
        sampling = SamplingParams(max_tokens=16, ignore_eos=True)
        events = run_until_idle(loaded.engine, Fill(1, [5, 6]), Generate(1, sampling))
        said.append(tokens_of(events, 1))
        loaded.engine.close()
    assert said[0] == said[1] != said[2]


def test_settings_are_checked_before_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> None:
        raise AssertionError("asked for the model")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(SettingsError, match="block_size"):
        load_engine(EngineOptions("owner/model", block_size=0))


def test_both_engines_say_the_same(folders: dict[str, Path]) -> None:
    said = []
    for kind in ("builtin", "huggingface"):
        loaded = load_engine(options(folders["known"], kind=kind, dtype="float32"))  # type: ignore[arg-type]
        events = run_until_idle(loaded.engine, Fill(1, list(range(60))), Generate(1, greedy(20)))
        said.append(tokens_of(events, 1))
        loaded.engine.close()
    assert said[0] == said[1]


def test_the_builtin_engine_alone_refuses_what_it_does_not_know(folders: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModelError):
        load_engine(options(folders["unknown"], kind="builtin"))


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_engine(options(tmp_path))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{", "JSON"),
        ("[]", "model"),
        ("{}", "model"),
        ('{"model": "x", "no_such": 1}', "no_such"),
        ('{"model": "x", "num_blocks": "7"}', "num_blocks"),
        ('{"model": "x", "num_blocks": true}', "num_blocks"),
        ('{"model": "x", "kind": "fast"}', "kind"),
        ('{"model": 3}', "model"),
        ('{"model": "x", "adapters": ["a"]}', "adapters"),
        ('{"model": "x", "adapters": {"a": 1}}', "adapters"),
        ('{"model": "x", "adapter_folders": {"a": "b"}}', "adapter_folders"),
        ('{"model": "x", "kind": "huggingface", "adapters": {"a": "b"}}', "adapters"),
    ],
)
def test_options_are_checked(text: str, names: str) -> None:
    with pytest.raises(SettingsError, match=names):
        EngineOptions.from_json(text)


def test_names(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert served_name(str(tmp_path / "my-model")) == "my-model"
    assert served_name("owner/model") == "owner/model"


def test_models_that_are_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="no folder"):
        resolve_model("./not/a/folder")
    (tmp_path / "model.Q4_0.gguf").touch()
    for gguf in (tmp_path, tmp_path / "model.Q4_0.gguf", "./not/there.GGUF"):
        with pytest.raises(ModelNotFoundError, match=r"is a GGUF file.*--upstream"):
            resolve_model(str(gguf))
    (tmp_path / "x.bin").touch()
    with pytest.raises(ModelNotFoundError, match="is a file: give the folder"):
        resolve_model(str(tmp_path / "x.bin"))

    def offline(*_: Any, **__: Any) -> None:
        from huggingface_hub.errors import LocalEntryNotFoundError

        raise LocalEntryNotFoundError("cannot reach it")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelNotFoundError, match="parrot-demo"):
        resolve_model("owner/model")


def test_downloads_take_no_code_and_no_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(repository: str, allow_patterns: list[str], tqdm_class: type) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert hub.resolve_model("owner/model") == tmp_path
    hub.resolve_model("owner/model", with_code=True)
    assert not {"*.py", "*.bin", "*.pt"} & set(asked[0])
    assert "*.safetensors" in asked[0]
    assert "*.py" in asked[1]


def run_worker(*arguments: str, key: str | None = "key") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PARROT_JOIN_KEY", None)
    if key is not None:
        environment["PARROT_JOIN_KEY"] = key
    return subprocess.run(
        [sys.executable, "-m", "parrot_engine", *arguments],
        capture_output=True, text=True, timeout=60, env=environment,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        (
            ["--model", "owner/not-here", "--join", "ws://127.0.0.1:1/"],
            "key",
            "not on this machine",
        ),
        (["--options", "{", "--join", "ws://127.0.0.1:1/"], "key", "JSON"),
        (["--model", "x", "--join", "ws://127.0.0.1:1/"], None, "PARROT_JOIN_KEY"),
    ],
)
def test_the_program_says_what_is_wrong_in_its_last_line(
    arguments: list[str], key: str | None, says: str
) -> None:
    ran = run_worker(*arguments, "--join", "ws://127.0.0.1:1/", key=key)
    assert ran.returncode == EXIT_CONFIG
    assert says in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr


async def test_the_program_ends_with_its_parent(folders: dict[str, Path]) -> None:
    """Standard input is the parent's end of a pipe: when it closes, the worker goes."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "parrot_engine.server.command",
        *("--options", json.dumps({"model": str(folders["known"]), "device": "cpu"})),
        *("--join", "ws://127.0.0.1:1/", "--with-parent"),
        stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PARROT_JOIN_KEY": "key"},
    )  # fmt: skip
    assert child.stderr is not None
    assert child.stdin is not None
    async with asyncio.timeout(60):
        # Up and trying to reach a gateway that is not there.
        while b"no link" not in await child.stderr.readline():
            pass
        child.stdin.close()
        await child.stderr.read()
        assert await child.wait() == 0
