"""Small checkpoints of embedders and rerankers with random weights, laid out as published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = (
    "the", "a", "fish", "cat", "sea", "ship", "king", "queen", "night", "day", "old", "young",
    "swims", "sleeps", "sails", "and", "of", "in",
)  # fmt: skip
VOCAB = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}

_ENCODER: dict[str, Any] = {
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "pad_token_id": 0,
}
_DECODER: dict[str, Any] = {
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "eos_token_id": 3,
    "pad_token_id": 0,
    "bos_token_id": None,
}
_MODERN = {
    **_ENCODER,
    "num_hidden_layers": 4,
    "local_attention": 6,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_XLM = {**_ENCODER, "pad_token_id": 1, "type_vocab_size": 1}

#: By name: the class and its configuration.
MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "bert": (BertModel, BertConfig(**_ENCODER)),
    "xlm-roberta": (XLMRobertaModel, XLMRobertaConfig(**_XLM)),
    "qwen3": (Qwen3Model, Qwen3Config(**_DECODER)),
    "qwen3-window": (
        Qwen3Model,
        Qwen3Config(**_DECODER, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    ),
    "distilbert": (
        DistilBertModel,
        DistilBertConfig(
            vocab_size=len(VOCAB),
            dim=32,
            hidden_dim=48,
            n_layers=2,
            n_heads=4,
            max_position_embeddings=66,
        ),
    ),
    "mpnet": (
        MPNetModel,
        MPNetConfig(**{**_ENCODER, "pad_token_id": 1, "max_position_embeddings": 400}),
    ),
    "modernbert": (ModernBertModel, ModernBertConfig(**_MODERN)),
    "nomic-bert": (
        NomicBertModel,
        NomicBertConfig(
            **{**_ENCODER, "rope_parameters": {"rope_type": "default", "rope_theta": 7}}
        ),
    ),
    "modernbert-score": (
        ModernBertForSequenceClassification,
        ModernBertConfig(**_MODERN, num_labels=1, classifier_pooling="mean"),
    ),
    "bert-score": (BertForSequenceClassification, BertConfig(**_ENCODER, num_labels=1)),
    "roberta-score": (
        RobertaForSequenceClassification,
        RobertaConfig(**{**_XLM, "type_vocab_size": 2}, num_labels=1),
    ),
    "xlm-roberta-score": (
        XLMRobertaForSequenceClassification,
        XLMRobertaConfig(**_XLM, num_labels=1),
    ),
    "qwen3-score": (Qwen3ForSequenceClassification, Qwen3Config(**_DECODER, num_labels=1)),
    "qwen3-rerank": (Qwen3ForCausalLM, Qwen3Config(**_DECODER, tie_word_embeddings=True)),
    "qwen3-rerank-untied": (Qwen3ForCausalLM, Qwen3Config(**_DECODER, tie_word_embeddings=False)),
}

#: Laid out as that of Qwen3-Reranker, in words of the vocabulary.
PAIR_TEMPLATE = (
    '{%- set instruction = messages | selectattr("role", "eq", "system") | map(attribute="content")'
    ' | first | default("old night") -%}\n'
    '{%- set query = messages | selectattr("role", "eq", "query") | map(attribute="content")'
    " | first -%}\n"
    '{%- set document = messages | selectattr("role", "eq", "document")'
    ' | map(attribute="content") | first -%}\n'
    "sea {{ instruction }} day {{ query }} ship {{ document }} sleeps\n"
    "{% if add_generation_prompt %}and a{% endif %}\n"
)


def write_model(name: str, folder: Path) -> PreTrainedModel:
    """Write the checkpoint of `MODELS` into a folder; returns transformers' own model of it."""
    cls, config = MODELS[name]
    torch.manual_seed(len(name))
    model = cls(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norms that do something.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    _tokenizer("qwen3" not in name).save_pretrained(folder)
    return model


def write_modules(
    folder: Path,
    *,
    mode: str = "mean",
    normalize: bool = True,
    dense: int | None = None,
    **details: Any,
) -> None:
    """Write the files of sentence-transformers; `details` are its configuration."""
    kinds = ["Transformer", "Pooling"]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden_size = config.get("hidden_size") or config["dim"]
    if dense is not None:
        kinds.append("Dense")
    if normalize:
        kinds.append("Normalize")
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    write_json(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": hidden_size,
            "pooling_mode_cls_token": mode == "cls",
            "pooling_mode_mean_tokens": mode == "mean",
            "pooling_mode_max_tokens": mode == "max",
            "pooling_mode_lasttoken": mode == "lasttoken",
        },
    )
    if dense is not None:
        write_json(
            folder / "2_Dense" / "config.json",
            {
                "in_features": hidden_size,
                "out_features": dense,
                "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh",
            },
        )
        weights = {
            "linear.weight": torch.randn(dense, hidden_size),
            "linear.bias": torch.randn(dense),
        }
        save_file(weights, folder / "2_Dense" / "model.safetensors")
    write_json(folder / "config_sentence_transformers.json", details)


def write_logit_score(
    folder: Path, *, yes: str = "king", no: str | None = "queen", **details: Any
) -> None:
    """Write the files of a reranker that asks a decoder for a token, as Qwen3-Reranker has them."""
    kinds = {"base.modules.transformer.Transformer": "",
             "cross_encoder.modules.logit_score.LogitScore": "1_LogitScore"}  # fmt: skip
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{kind}"}
        for index, (kind, path) in enumerate(kinds.items())
    ]
    write_json(folder / "modules.json", modules)
    tokens = {"true_token_id": VOCAB[yes], "false_token_id": None if no is None else VOCAB[no]}
    write_json(folder / "1_LogitScore" / "config.json", tokens)
    modality = {"method": "forward", "method_output_name": "logits"}
    transformer = {
        "transformer_task": "text-generation",
        "modality_config": {"text": modality, "message": {**modality, "format": "flat"}},
        "module_output_name": "causal_logits",
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    }
    write_json(folder / "sentence_bert_config.json", transformer)
    (folder / "chat_template.jinja").write_text(PAIR_TEMPLATE)
    saved = {"model_type": "CrossEncoder", "prompts": {}, "default_prompt_name": None, **details}
    write_json(folder / "config_sentence_transformers.json", saved)


def write_json(path: Path, value: Any) -> None:
    """Write a file, and its folder."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def change_config(folder: Path, **values: Any) -> None:
    """Change keys of `config.json`."""
    path = folder / "config.json"
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **values})


def _tokenizer(is_encoder: bool) -> PreTrainedTokenizerFast:
    """Words; [CLS] and [SEP] round texts of encoders, [SEP] behind those of decoders."""
    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", VOCAB["[CLS]"]), ("[SEP]", VOCAB["[SEP]"])]
    if is_encoder:
        single, pair = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
    else:
        single, pair = "$A [SEP]", "$A $B [SEP]"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=special
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", sep_token="[SEP]"
    )
