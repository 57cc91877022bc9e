"""PEFT folders with random low-rank weights, for checkpoints on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: Of random weights: what an adapter adds is as large as what is there.
_STD = 0.4


def make_adapter(
    folder: Path,
    base: Path,
    *,
    targets: Iterable[str] = ALL,
    rank: int = 4,
    seed: int = 0,
    ranks: dict[str, int] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter of the checkpoint `base`, as PEFT does; `ranks` by the ends of names."""
    targets = list(targets)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    with safe_open(base / "model.safetensors", framework="pt") as file:
        for weight in sorted(file.keys()):
            name = weight.removesuffix(".weight")
            end = name.rpartition(".")[2]
            if end not in targets or ".experts." in name or name == weight:
                continue
            out_size, in_size = file.get_slice(weight).get_shape()
            own = (ranks or {}).get(end, rank)
            for which, shape in (("A", (own, in_size)), ("B", (out_size, own))):
                values = torch.randn(shape, generator=generator) * _STD / own**0.5
                tensors[f"base_model.model.{name}.lora_{which}.weight"] = values
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/base",
        "r": rank,
        "lora_alpha": 6,
        "target_modules": targets,
        "lora_dropout": 0.05,
        "bias": "none",
        "inference_mode": True,
        **({"rank_pattern": ranks} if ranks else {}),
        **config,
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
