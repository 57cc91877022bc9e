"""gpt-oss's experts in MXFP4: read as transformers reads them, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness.engine.checkpoints import CONFIGS, make_checkpoint
from harness.engine.paged import PagedHarness
from parrot_engine.exceptions import CheckpointError, UnsupportedModelError
from parrot_engine.runner.loader import load_runner
from parrot_engine.settings import BuiltinSettings
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

SETTINGS = BuiltinSettings(device="cpu", dtype="float32", num_blocks=16)
PROMPTS = [[5, 6, 7], list(range(40, 70))]


def packed(path: Path) -> dict[str, Tensor]:
    """Turn the experts of a checkpoint into random MXFP4; returns them as plain tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(path / "model.safetensors")
    plain = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 126, shape[:-1], dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (path / "config.json").write_text(json.dumps(config))
    return plain


def change(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gpt-oss") / "model", CONFIGS["gpt-oss"])


@pytest.fixture
def mxfp4(checkpoint: Path, tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for file in checkpoint.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def test_experts_in_mxfp4_are_those_of_transformers(checkpoint: Path, mxfp4: Path) -> None:
    plain = packed(mxfp4)
    tokens, logits = PagedHarness(load_runner(mxfp4, SETTINGS)).generate(PROMPTS, 6)
    change(checkpoint, lambda tensors: tensors.update(plain))
    expected, expected_logits = PagedHarness(load_runner(checkpoint, SETTINGS)).generate(PROMPTS, 6)
    assert tokens == expected
    for ours, theirs in zip(logits, expected_logits, strict=True):
        assert torch.equal(ours, theirs)


SCALES = "model.layers.1.mlp.experts.down_proj_scales"


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda tensors: tensors[SCALES].fill_(255), "not numbers"),
        (lambda tensors: tensors.pop(SCALES), "lacks .*down_proj_scales"),
        (
            lambda tensors: tensors.update({SCALES: tensors[SCALES][:, 1:].contiguous()}),
            "scales of model.layers.1.mlp.experts.down_proj have shape",
        ),
        (
            lambda tensors: tensors.pop(SCALES.replace("scales", "bias")),
            "lacks .*experts.0.down_proj.bias",
        ),
    ],
)
def test_broken_experts_are_refused_by_name(
    mxfp4: Path, edit: Callable[[dict[str, Tensor]], object], problem: str
) -> None:
    packed(mxfp4)
    change(mxfp4, edit)
    with pytest.raises(CheckpointError, match=problem):
        load_runner(mxfp4, SETTINGS)


def test_other_quantization_of_it_is_named(mxfp4: Path) -> None:
    config = json.loads((mxfp4 / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (mxfp4 / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="bitsandbytes"):
        load_runner(mxfp4, SETTINGS)
