"""A small model of random weights on a GPU, the same each time; needs no transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.settings import BuiltinSettings

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}


def dummy_engine(folder: Path, **settings: Any) -> BuiltinEngine:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    chosen = BuiltinSettings.for_device("cuda", device="cuda", dummy_weights=True, **settings)
    return BuiltinEngine.load(folder, chosen, model="tiny")
