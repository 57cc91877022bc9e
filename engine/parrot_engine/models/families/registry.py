"""The table of model families: the one place that a new family is registered in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from parrot_engine.exceptions import UnsupportedModelError
from parrot_engine.models.config import ModelConfig, architecture_of
from parrot_engine.models.decoder import Decoder
from parrot_engine.models.families import (
    gemma2,
    gemma3,
    glm4,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from parrot_engine.models.parts import TensorSpec


class Family(NamedTuple):
    """The functions that read a family's configuration and build its model."""

    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    build: Callable[[ModelConfig, TensorSpec], Decoder] = Decoder


#: By the name in `architectures` of `config.json`.
FAMILIES: dict[str, Family] = {
    "Gemma2ForCausalLM": Family(gemma2.read_config),
    "Gemma3ForCausalLM": Family(gemma3.read_config),
    "Gemma3ForConditionalGeneration": Family(gemma3.read_text_config),
    "Glm4ForCausalLM": Family(glm4.read_config),
    "GptOssForCausalLM": Family(gpt_oss.read_config),
    "GraniteForCausalLM": Family(granite.read_config),
    "LlamaForCausalLM": Family(llama.read_config),
    "MistralForCausalLM": Family(mistral.read_config),
    "MixtralForCausalLM": Family(mixtral.read_config),
    "Olmo2ForCausalLM": Family(olmo2.read_config),
    "OlmoeForCausalLM": Family(olmoe.read_config),
    "Phi3ForCausalLM": Family(phi3.read_config),
    "Qwen2ForCausalLM": Family(qwen2.read_config),
    "Qwen3ForCausalLM": Family(qwen3.read_config),
    "Qwen3MoeForCausalLM": Family(qwen3_moe.read_config),
    "SmolLM3ForCausalLM": Family(smollm3.read_config),
}


def family_of(raw: Mapping[str, Any]) -> Family:
    """The family of a `config.json`.

    Raises `UnsupportedModelError` for an architecture that is not in the table.
    """
    architecture = architecture_of(raw)
    if architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(f"architecture {architecture!r} (supported: {known})")
    return FAMILIES[architecture]
