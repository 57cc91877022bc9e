"""Random LoRA adapters for a model of which only the configuration is read."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from parrot_engine.models.config import ModelConfig
from safetensors.torch import save_file
from torch import Tensor

#: Small beside the weights, so that activations stay finite.
_STD = 0.01


def write_adapter(folder: Path, config: ModelConfig, rank: int, seed: int) -> Path:
    """Write a PEFT folder for all products of a model that adapters can change; returns it."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    attention = {"q_proj": query, "k_proj": key, "v_proj": key}
    mlp = {"gate_proj": inner, "up_proj": inner}
    for fused in config.fused:
        target = attention if fused.parts[0][0] in attention else mlp
        for name, _ in fused.parts:
            del target[name]
        target[fused.name] = sum(size for _, size in fused.parts)
    tensors: dict[str, Tensor] = {}
    for layer in range(config.num_layers):
        shapes = {f"self_attn.{name}": (size, hidden) for name, size in attention.items()}
        shapes["self_attn.o_proj"] = hidden, query
        if config.experts is None or layer not in config.experts.layers:
            shapes |= {f"mlp.{name}": (size, hidden) for name, size in mlp.items()}
            shapes["mlp.down_proj"] = hidden, inner
        for name, (out_size, in_size) in shapes.items():
            for which, shape in (("A", (rank, in_size)), ("B", (out_size, rank))):
                path = f"base_model.model.model.layers.{layer}.{name}.lora_{which}.weight"
                values = torch.randn(shape, generator=generator) * _STD
                tensors[path] = values.to(torch.bfloat16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": r".*_proj"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
