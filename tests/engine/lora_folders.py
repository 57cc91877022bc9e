"""PEFT folders with random low-rank weights, and references with the same weights merged."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from checkpoints import load_reference
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: Of random weights: what an adapter adds is as large as what is there.
_STD = 0.4


def linear_modules(model: PreTrainedModel, targets: Iterable[str]) -> dict[str, nn.Linear]:
    """Modules by name, those whose names end in one of `targets`."""
    endings = tuple(f".{target}" for target in targets)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.endswith(endings)
    }


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
    for name, module in linear_modules(load_reference(base, torch.float32), targets).items():
        own = (ranks or {}).get(name.rpartition(".")[2], rank)
        for which, shape in (("A", (own, module.in_features)), ("B", (module.out_features, own))):
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


def merged(base: Path, adapter: Path | None, scales: Mapping[str, float]) -> PreTrainedModel:
    """The base with B A added to its weights, times a factor by the ends of names, or `""`."""
    model = load_reference(base, torch.float32)
    if adapter is not None:
        tensors = load_file(adapter / "adapter_model.safetensors")
        for name, module in model.named_modules():
            prefix = f"base_model.model.{name}.lora_"
            if f"{prefix}A.weight" in tensors:
                scale = scales.get(name.rpartition(".")[2], scales[""])
                added = scale * tensors[f"{prefix}B.weight"] @ tensors[f"{prefix}A.weight"]
                assert isinstance(module, nn.Linear)
                module.weight.data += added
    return model
