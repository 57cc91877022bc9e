"""Loads a `PoolingModel` from a checkpoint's folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parrot_engine.attention.packed import PackedAttention
from parrot_engine.exceptions import CheckpointError, PoolingModelError, SettingsError
from parrot_engine.models.checkpoint import TensorFiles, read_json
from parrot_engine.models.config import architecture_of
from parrot_engine.models.decoder import Decoder
from parrot_engine.models.families.registry import ENCODERS
from parrot_engine.models.loader import (
    Progress,
    draw_weights,
    load_model,
    load_weights,
    read_model_config,
    resolve_dtype,
)
from parrot_engine.models.parts import TensorSpec, weight_bytes
from parrot_engine.models.stored_weights import StoredWeights
from parrot_engine.pooling.config import Dense, PoolingConfig
from parrot_engine.pooling.model import DecoderStates, EncoderStates, Head, PoolingModel
from parrot_engine.protocol import PoolingInfo
from parrot_engine.runner.loader import prepare_device
from parrot_engine.settings import BuiltinSettings


class LoadedPooling(NamedTuple):
    """A model of vectors or scores, and the facts that clients need."""

    model: PoolingModel
    info: PoolingInfo
    architecture: str
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int


def load_pooling(
    folder: Path, config: PoolingConfig, settings: BuiltinSettings, progress: Progress | None = None
) -> LoadedPooling:
    """Load a checkpoint's model for the task of `config`.

    Sets torch's thread count for the process when the device is the CPU.

    Raises:
        PoolingModelError, UnsupportedModelError: a feature is not supported.
        CheckpointError: files are missing, broken, or do not fit the configuration.
        SettingsError: device or dtype is unavailable, or `tensor_parallel` is more than 1.
    """
    if settings.tensor_parallel > 1:
        raise SettingsError("tensor_parallel", "a model of vectors or scores runs on one GPU")
    device, kernels = prepare_device(settings)
    raw = read_json(folder / "config.json")
    if architecture_of(raw) in ENCODERS:
        return _encoder(folder, config, settings, device, progress)
    model, _, spec = load_model(
        folder,
        device,
        settings.dtype,
        progress,
        kernels=kernels,
        dummy_seed=(settings.seed or 0) if settings.dummy_weights else None,
        headless=True,
    )
    heads: list[Head] = []
    if config.logit_tokens is not None:
        heads.append(_logit_difference(folder, config.logit_tokens, model, spec))
    elif config.task == "score":
        heads.append(_score_product(folder, model.config.hidden_size, spec))
    # As in vLLM: some decoders are trained to see later tokens, too.
    causal = bool(raw.get("is_causal", True))
    return pooling_of_decoder(folder, config, model, spec, settings, heads=heads, causal=causal)


def pooling_of_decoder(
    folder: Path,
    config: PoolingConfig,
    decoder: Decoder,
    spec: TensorSpec,
    settings: BuiltinSettings,
    *,
    heads: list[Head] | None = None,
    causal: bool = True,
) -> LoadedPooling:
    """Make the same from a loaded decoder.

    Raises: as `load_pooling`.
    """
    shape = decoder.config
    if shape.sinks or shape.attention_softcap is not None:
        feature = "sinks" if shape.sinks else "bounded scores of attention"
        raise PoolingModelError(feature, shape.architecture)
    attention = PackedAttention(spec.device, causal=causal)
    states = DecoderStates(decoder, attention, spec.device)
    products, out_size = _products(folder, config, shape.hidden_size, spec)
    return LoadedPooling(
        PoolingModel(states, [*(heads or ()), *products], attention, config, spec.device),
        _info(config, out_size, shape.max_position, settings),
        shape.architecture,
        shape.vocab_size,
        spec.device,
        spec.dtype,
        weight_bytes(decoder),
    )


def _encoder(
    folder: Path,
    config: PoolingConfig,
    settings: BuiltinSettings,
    device: torch.device,
    progress: Progress | None,
) -> LoadedPooling:
    raw = read_json(folder / "config.json")
    family = ENCODERS[architecture_of(raw)]
    shape = family.read_config(raw)
    if settings.dummy_weights:
        dtype = resolve_dtype(settings.dtype, shape.dtype or "bfloat16", device)
        spec = TensorSpec(device, dtype)
        encoder = family.build(shape, spec)
        draw_weights(encoder, settings.seed or 0)
    else:
        with TensorFiles(folder) as files:
            dtype = resolve_dtype(settings.dtype, shape.dtype or files.dtype, device)
            spec = TensorSpec(device, dtype)
            encoder = family.build(shape, spec)
            files.rename(encoder.stored_name)
            load_weights(encoder, StoredWeights(files, None, device), progress)
    attention = PackedAttention(device, causal=False)
    products, out_size = _products(folder, config, shape.hidden_size, spec)
    heads: list[Head] = [encoder.score] if config.task == "score" else products
    return LoadedPooling(
        PoolingModel(EncoderStates(encoder, attention), heads, attention, config, device),
        _info(config, out_size, shape.max_tokens, settings),
        shape.architecture,
        shape.vocab_size,
        device,
        dtype,
        weight_bytes(encoder),
    )


def _info(
    config: PoolingConfig, out_size: int, max_position: int, settings: BuiltinSettings
) -> PoolingInfo:
    limits = (max_position, config.max_tokens, settings.max_context_tokens)
    return PoolingInfo(
        config.task,
        1 if config.task == "score" else out_size,
        min(limit for limit in limits if limit is not None),
        config.is_matryoshka,
        list(config.matryoshka_dimensions),
        dict(config.prompts or {}),
        config.default_prompt,
        config.lowercase,
        None if config.pair_template is None else dict(config.pair_template),
        config.is_toy,
    )


def _score_product(folder: Path, hidden_size: int, spec: TensorSpec) -> Head:
    """Return the score's product of a decoder, without a bias."""
    with TensorFiles(folder) as files:
        weight = _tensor(files, "score.weight", (1, hidden_size), spec)
    return partial(F.linear, weight=weight)


def _logit_difference(
    folder: Path, tokens: tuple[int, int | None], model: Decoder, spec: TensorSpec
) -> Head:
    """Return a function for a token's logit, minus that of a second token, from rows of a decoder's
    output head.
    """
    config = read_model_config(folder)
    wanted = [token for token in tokens if token is not None]
    if config.tie_embeddings:
        rows = model.model.embed_tokens.weight[wanted].clone()
    else:
        with TensorFiles(folder) as files:
            if "lm_head.weight" not in files.names:
                raise CheckpointError("the checkpoint lacks lm_head.weight")
            rows = files.tensor("lm_head.weight")[wanted].to(spec.device, spec.dtype)

    def head(pooled: Tensor) -> Tensor:
        logits = F.linear(pooled, rows).float() * config.logits_scale
        if (cap := config.logits_softcap) is not None:
            logits = (logits / cap).tanh() * cap
        return logits if len(wanted) == 1 else logits[:, :1] - logits[:, 1:]

    return head


def _products(
    folder: Path, config: PoolingConfig, size: int, spec: TensorSpec
) -> tuple[list[Head], int]:
    """Return the products after the pooling, and the size of the last one's output."""
    heads: list[Head] = []
    for dense in config.dense:
        if dense.in_size != size:
            raise CheckpointError(
                f"{dense.folder}/config.json: in_features is {dense.in_size}, but {size} come in"
            )
        heads.append(_product(folder, dense, spec))
        size = dense.out_size
    return heads, size


def _product(folder: Path, dense: Dense, spec: TensorSpec) -> Head:
    with TensorFiles(folder / dense.folder) as files:
        weight = _tensor(files, "linear.weight", (dense.out_size, dense.in_size), spec)
        bias = _tensor(files, "linear.bias", (dense.out_size,), spec) if dense.bias else None

    def head(pooled: Tensor) -> Tensor:
        out = F.linear(pooled, weight, bias)
        return out.tanh() if dense.tanh else out

    return head


def _tensor(files: TensorFiles, name: str, shape: tuple[int, ...], spec: TensorSpec) -> Tensor:
    if name not in files.names:
        raise CheckpointError(f"the checkpoint lacks {name}")
    tensor = files.tensor(name)
    if tensor.shape != shape:
        raise CheckpointError(
            f"tensor {name} has shape {list(tensor.shape)}, "
            f"the configuration asks for {list(shape)}"
        )
    return tensor.to(spec.device, spec.dtype, copy=True)
