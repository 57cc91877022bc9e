"""Logits of a deterministic runner are the same to the bit, however the work comes to it."""

from __future__ import annotations

import random
from pathlib import Path

import harness.engine.interpreted  # noqa: F401 -- skips this module where it cannot run
import pytest
import torch
from harness.engine.checkpoints import CONFIGS, make_checkpoint
from harness.engine.paged import PagedHarness, PagedSequence
from harness.engine.quantized_checkpoints import write_checkpoint
from harness.pooling_checkpoints import write_model
from parrot_engine.batch import StepBatch
from parrot_engine.exceptions import SettingsError
from parrot_engine.loading.factory import EngineOptions, load_engine_alone
from parrot_engine.runner.loader import load_runner
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.settings import BuiltinSettings

_DRAW = random.Random(1)
TEXT = [_DRAW.randrange(100) for _ in range(40)]
OTHERS = [[_DRAW.randrange(100) for _ in range(count)] for count in (3, 17, 50)]


@pytest.fixture(scope="module", params=["qwen3", "gemma2"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path = make_checkpoint(tmp_path_factory.mktemp("deterministic"), CONFIGS[request.param])
    settings = BuiltinSettings(
        device="cpu", dtype="float32", num_blocks=32, kernels="triton", deterministic=True
    )
    return load_runner(path, settings)


def test_chunks_and_neighbours_change_nothing(runner: ModelRunner) -> None:
    whole = PagedHarness(runner).fill(PagedSequence(), TEXT, chunk=len(TEXT))
    in_chunks = PagedHarness(runner).fill(PagedSequence(), TEXT, chunk=7)
    one_by_one = PagedHarness(runner).fill(PagedSequence(), TEXT, chunk=1)
    harness = PagedHarness(runner, seed=3)
    rows = [
        harness.row(PagedSequence(), tokens, "all") for tokens in (*OTHERS[:2], TEXT, OTHERS[2])
    ]
    first = sum(len(tokens) for tokens in OTHERS[:2])
    beside = runner.execute(StepBatch(rows))[first : first + len(TEXT)]
    for other in (in_chunks, one_by_one, beside):
        assert torch.equal(other, whole)


def test_rows_do_not_share_what_they_read(runner: ModelRunner) -> None:
    assert not runner.share_prefixes(True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_loras": 2}, "adapters"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
        ({"kernels": "torch"}, "Triton"),
    ],
)
def test_what_cannot_be_deterministic_is_refused(
    options: dict[str, object], text: str, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, CONFIGS["qwen3"])
    with pytest.raises(SettingsError, match=text) as refused:
        load_runner(path, BuiltinSettings(device="cpu", deterministic=True, **options))  # type: ignore[arg-type]
    assert refused.value.setting == "deterministic"


def test_other_models_and_the_other_engine_are_refused(tmp_path: Path) -> None:
    mixture = make_checkpoint(tmp_path / "mixture", CONFIGS["qwen3-moe"])
    quantised = write_checkpoint(tmp_path, "awq").path
    for path in (mixture, quantised):
        with pytest.raises(SettingsError, match="mixtures of experts and quantised weights"):
            load_runner(path, BuiltinSettings(device="cpu", kernels="triton", deterministic=True))
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    write_model("bert", encoder)
    with pytest.raises(SettingsError, match="vectors and scores"):
        load_engine_alone(
            EngineOptions(str(encoder), device="cpu", kernels="triton", deterministic=True)
        )
    with pytest.raises(SettingsError, match="huggingface"):
        EngineOptions("m", kind="huggingface", deterministic=True)
