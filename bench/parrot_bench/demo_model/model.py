"""The demo model: a Llama of transformers, with dropout in the residuals for its training."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the decoder."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 416
    num_hidden_layers: int = 7
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def to_config(self) -> dict[str, Any]:
        """The same as Hugging Face's ``config.json``."""
        sizes = asdict(self)
        theta = sizes["rope_theta"]
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **sizes,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            # Weights are stored in bfloat16 but run in float32, where the same seed gives the same
            # text whatever else is in the batch.
            "dtype": "float32",
            "bos_token_id": 0,
            "eos_token_id": [1, 0],
            "pad_token_id": 0,
        }


def story_model(shape: ModelShape, dropout: float = 0.0) -> LlamaForCausalLM:
    """A model with random weights; embeddings are tied."""
    model = LlamaForCausalLM(LlamaConfig(**shape.to_config()))
    residual = 0.02 / math.sqrt(2 * shape.num_hidden_layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=residual if is_residual else 0.02)

    def drop(module: nn.Module, _: object, output: Tensor) -> Tensor:
        return F.dropout(output, dropout, module.training)

    if dropout:
        model.model.embed_tokens.register_forward_hook(drop)
        for layer in model.model.layers:
            layer.self_attn.o_proj.register_forward_hook(drop)
            layer.mlp.register_forward_hook(drop)
    return model


def sample(model: LlamaForCausalLM, ids: list[int], new_tokens: int, stop: list[int]) -> list[int]:
    """Continue `ids` by at most `new_tokens`, `stop` excluded."""
    torch.manual_seed(1)
    made = model.generate(
        torch.tensor([ids], device=model.device),
        max_new_tokens=new_tokens,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        top_k=0,
        eos_token_id=stop,
        pad_token_id=stop[0],
    )
    answer: list[int] = made[0, len(ids) :].tolist()
    return answer[:-1] if answer[-1] in stop else answer
