"""The table of model families, the only place to register a new one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from parrot_engine.exceptions import UnsupportedModelError
from parrot_engine.models.config import ModelConfig, architecture_of
from parrot_engine.models.decoder import Decoder
from parrot_engine.models.encoder import Encoder
from parrot_engine.models.encoder_config import EncoderConfig
from parrot_engine.models.families import (
    bert,
    distilbert,
    gemma2,
    gemma3,
    glm4,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    modernbert,
    mpnet,
    nomic_bert,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    roberta,
    smollm3,
)
from parrot_engine.models.parts import TensorSpec
from parrot_engine.models.rotary_encoder import RotaryEncoder, RotaryEncoderConfig


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


class EncoderFamily(NamedTuple):
    """The functions of an encoder family; encoders see a text at once and generate nothing."""

    read_config: Callable[[Mapping[str, Any]], EncoderConfig | RotaryEncoderConfig]
    build: Callable[[Any, TensorSpec], Encoder | RotaryEncoder] = Encoder


#: By the name in `architectures` of `config.json`.
ENCODERS: dict[str, EncoderFamily] = {
    "BertForMaskedLM": EncoderFamily(bert.read_config),
    "BertForSequenceClassification": EncoderFamily(bert.read_config),
    "BertModel": EncoderFamily(bert.read_config),
    "DistilBertForMaskedLM": EncoderFamily(distilbert.read_config),
    "DistilBertModel": EncoderFamily(distilbert.read_config),
    "MPNetForMaskedLM": EncoderFamily(mpnet.read_config),
    "MPNetModel": EncoderFamily(mpnet.read_config),
    "ModernBertForMaskedLM": EncoderFamily(modernbert.read_config, RotaryEncoder),
    "ModernBertForSequenceClassification": EncoderFamily(modernbert.read_config, RotaryEncoder),
    "ModernBertModel": EncoderFamily(modernbert.read_config, RotaryEncoder),
    "NomicBertModel": EncoderFamily(nomic_bert.read_config),
    "RobertaForMaskedLM": EncoderFamily(roberta.read_config),
    "RobertaForSequenceClassification": EncoderFamily(roberta.read_config),
    "RobertaModel": EncoderFamily(roberta.read_config),
    "XLMRobertaForMaskedLM": EncoderFamily(roberta.read_config),
    "XLMRobertaForSequenceClassification": EncoderFamily(roberta.read_config),
    "XLMRobertaModel": EncoderFamily(roberta.read_config),
}


def causal_name(architecture: str) -> str:
    """Return the name of the causal language model that has an architecture's body."""
    for ending in ("ForSequenceClassification", "Model"):
        architecture = architecture.removesuffix(ending)
    return architecture if architecture.endswith("ForCausalLM") else f"{architecture}ForCausalLM"


def family_of(raw: Mapping[str, Any], *, headless: bool = False) -> Family:
    """Return the family of a `config.json`; `headless` accepts any name of such a model's body.

    Raises `UnsupportedModelError` for an architecture outside the table.
    """
    architecture = architecture_of(raw)
    if headless and architecture not in FAMILIES:
        architecture = causal_name(architecture)
    if architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(f"architecture {architecture!r} (supported: {known})")
    return FAMILIES[architecture]
