"""Small checkpoints with random weights, as transformers writes them, for tests.

Each is a real directory (`config.json`, `generation_config.json`, safetensors, tokenizer) made
with transformers' own classes, so that loading is tested against files as users have them. The
tokenizer is a byte-level BPE without merges: one token a byte, plus `<|end|>`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM as AutoModel
from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SiglipVisionConfig,
    SmolLM3Config,
)

END_OF_TEXT = "<|end|>"
VOCAB_SIZE = 257

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
    "pad_token_id": None,
}


_TWO_LAYERS = _SMALL | {"num_hidden_layers": 2}


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10_000.0, **parameters}


#: One configuration per family and feature, by a name for test ids.
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SMALL),
    "llama-biases-mha": LlamaConfig(
        **{**_SMALL, "num_key_value_heads": 4}, attention_bias=True, mlp_bias=True
    ),
    "llama-llama3": LlamaConfig(
        **_SMALL,
        rope_parameters=_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-linear": LlamaConfig(**_SMALL, rope_parameters=_rope("linear", factor=4.0)),
    "llama-dynamic": LlamaConfig(**_SMALL, rope_parameters=_rope("dynamic", factor=2.0)),
    "llama-yarn": LlamaConfig(
        **_SMALL, rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=128)
    ),
    "llama-longrope": LlamaConfig(
        **_SMALL,
        rope_parameters=_rope(
            "longrope",
            short_factor=[1.0 + index / 4 for index in range(8)],
            long_factor=[2.0 + index for index in range(8)],
            factor=2.0,
            original_max_position_embeddings=256,
        ),
    ),
    "mistral-window": MistralConfig(**_SMALL, sliding_window=11),
    "mistral": MistralConfig(**_SMALL, sliding_window=None),
    "qwen2": Qwen2Config(**_SMALL, tie_word_embeddings=True),
    "qwen2-windows": Qwen2Config(
        **_SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**_SMALL, head_dim=32),
    "qwen3-moe": Qwen3MoeConfig(
        **_TWO_LAYERS,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "mixtral": MixtralConfig(**_TWO_LAYERS, num_local_experts=5, num_experts_per_tok=2),
    "olmoe": OlmoeConfig(**_TWO_LAYERS, num_experts=6, num_experts_per_tok=2),
    "olmo2": Olmo2Config(**_TWO_LAYERS),
    "smollm3": SmolLM3Config(
        **_TWO_LAYERS, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=13
    ),
    "granite": GraniteConfig(
        **_TWO_LAYERS,
        attention_multiplier=0.1,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=3.0,
    ),
    "phi3": Phi3Config(
        **{**_TWO_LAYERS, "max_position_embeddings": 1024},
        original_max_position_embeddings=512,
        sliding_window=21,
        rope_parameters=_rope(
            "longrope",
            partial_rotary_factor=0.75,
            short_factor=[1.0 + index / 4 for index in range(6)],
            long_factor=[2.0 + index for index in range(6)],
        ),
    ),
    "gemma2": Gemma2Config(
        **_TWO_LAYERS,
        head_dim=16,
        query_pre_attn_scalar=20,
        sliding_window=10,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": Gemma3TextConfig(
        **_TWO_LAYERS,
        head_dim=16,
        query_pre_attn_scalar=20,
        sliding_window=10,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": _rope("linear", factor=8.0),
            "sliding_attention": _rope("default") | {"rope_theta": 500.0},
        },
    ),
    "gpt-oss": GptOssConfig(
        **_TWO_LAYERS,
        head_dim=16,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=12,
        swiglu_limit=1.5,
    ),
    "gemma3-vision": Gemma3Config(
        text_config=Gemma3TextConfig(**_TWO_LAYERS, head_dim=16, sliding_window=10),
        vision_config=SiglipVisionConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
        mm_tokens_per_image=4,
        eos_token_id=VOCAB_SIZE - 1,
        pad_token_id=None,
        boi_token_index=1,
        eoi_token_index=2,
        image_token_index=VOCAB_SIZE - 2,
    ),
    "glm4": Glm4Config(**_TWO_LAYERS, head_dim=16, attention_bias=True),
}


def make_checkpoint(
    directory: Path,
    config: PreTrainedConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    generation: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of random weights to `directory`; returns the directory.

    Weights are larger than a fresh initialisation, biases and norms are not trivial: every part
    of the computation shows in the logits. `generation` updates `generation_config.json`.
    """
    # NOTE: transformers fills in fields of the configuration it is given.
    config = type(config).from_dict(config.to_dict())
    generator = torch.Generator().manual_seed(seed)
    model = AutoModel.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1.0 + 0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
    for key, value in (generation or {}).items():
        setattr(model.generation_config, key, value)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    make_tokenizer().save_pretrained(directory)
    return directory


def load_reference(path: Path, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    """Load transformers' model of a checkpoint; `attention` as its `attn_implementation`."""
    model = AutoModel.from_pretrained(path, dtype=dtype, attn_implementation=attention).eval()
    limit = getattr(model.config, "swiglu_limit", None)
    for module in model.modules():
        # transformers 5.17 has the limit of the published gpt-oss in its code alone.
        if limit is not None and hasattr(module, "limit"):
            module.limit = limit
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer with ids 0 … 255 for bytes and 256 for end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
