"""Shapes of models with their weights in a quantised format: configurations without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parrot_engine.models.checkpoint import read_json

_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def _compressed(
    form: str, weights: dict[str, Any], activations: dict[str, Any] | None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


#: `quantization_config` by a name for the command line, as publishers of checkpoints write it.
FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8-blocks": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "w4a16": _compressed("pack-quantized", _INT4, None),
    "w8a8": _compressed("int-quantized", _INT8, _BY_TOKEN),
}


def write_configuration(shape: Path, name: str, folder: Path) -> Path:
    """A folder beneath `folder` with the configuration of `shape` in format `name`."""
    raw = read_json(shape / "config.json") | {"quantization_config": FORMATS[name]}
    path = folder / f"{shape.name}-{name}"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return path
