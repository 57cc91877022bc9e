"""Loads a model with its weights from a checkpoint directory.

Chooses device and dtype, builds the family's model with empty weights, and fills them from the
checkpoint's memory-mapped tensors (fusing and converting on the way). It downloads nothing and does
not read the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from parrot_engine.exceptions import CheckpointError, SettingsError
from parrot_engine.kernels.selection import Kernels, reads_float8
from parrot_engine.models.checkpoint import TensorFiles, read_json, read_optional_json
from parrot_engine.models.config import GenerationDefaults, ModelConfig, read_generation_defaults
from parrot_engine.models.decoder import Decoder
from parrot_engine.models.families.registry import family_of
from parrot_engine.models.parts import Packable, RMSNorm, Stacked, TensorSpec, weight_parts
from parrot_engine.models.sharding import Collective, Shard, part_of, shard_config
from parrot_engine.models.stored_weights import StoredWeights
from parrot_engine.quantization.interface import Quantization
from parrot_engine.quantization.packed import PackedWeight, pack_stacked
from parrot_engine.quantization.weights import QuantizedWeight

#: Called after each tensor with (tensors loaded, total tensors).
Progress: TypeAlias = Callable[[int, int], None]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: Standard deviation of random weights and biases: that of fresh Llama models
#: (`initializer_range`).
_STD = 0.02


class LoadedModel(NamedTuple):
    """A model with its weights and its checkpoint's generation defaults."""

    model: Decoder
    defaults: GenerationDefaults
    spec: TensorSpec


def read_model_config(path: Path) -> ModelConfig:
    """Read a checkpoint's configuration without touching its tensors.

    Raises `UnsupportedModelError` if this engine cannot run the model, so that a caller can choose
    another engine before loading, and `CheckpointError` for a broken `config.json`.
    """
    raw = read_json(path / "config.json")
    return family_of(raw).read_config(raw)


def build_empty(path: Path) -> Decoder:
    """Build a checkpoint's model without memory for its weights, for their shapes.

    Raises like `read_model_config`.
    """
    raw = read_json(path / "config.json")
    family = family_of(raw)
    return family.build(family.read_config(raw), TensorSpec(torch.device("meta"), torch.float32))


def load_model(
    path: Path,
    device: torch.device,
    dtype: str,
    progress: Progress | None = None,
    *,
    kernels: Kernels = "torch",
    dummy_seed: int | None = None,
    collective: Collective | None = None,
    expert_parallel: bool = False,
    headless: bool = False,
    deterministic: bool = False,
) -> LoadedModel:
    """Build the model of a checkpoint and load its weights.

    With `dummy_seed` the weights are random, and only the configuration is read. With `collective`
    they are the rank's part; `expert_parallel` gives it whole experts. A `headless` model computes
    hidden states, and its output head is not read. In a `deterministic` model a token's result does
    not depend on the other tokens of a step.

    Raises:
        UnsupportedModelError: this engine cannot run the model.
        CheckpointError: files are missing, broken, or do not fit the configuration.
        SettingsError: the dtype is not available, or the model cannot be `deterministic`.
    """
    raw = read_json(path / "config.json")
    family = family_of(raw, headless=headless)
    config = family.read_config(raw)
    if deterministic and (config.experts is not None or config.quantization is not None):
        raise SettingsError(
            "deterministic", "mixtures of experts and quantised weights are not supported"
        )
    if headless:
        config = replace(config, tie_embeddings=True)
    quantization = config.quantization
    defaults = read_generation_defaults(raw, read_optional_json(path / "generation_config.json"))
    own = config
    if collective is not None:
        own = shard_config(config, collective.shard, expert_parallel=expert_parallel)

    def whole() -> Decoder:
        return family.build(config, TensorSpec(torch.device("meta"), torch.float32))

    def spec_of(stored: str) -> TensorSpec:
        weights = resolve_dtype(dtype, stored, device)
        # The kernels multiply codes by activations of two bytes.
        packed = quantization is not None and kernels == "triton" and weights.itemsize == 2
        if quantization is not None and quantization.codes_dtype.is_floating_point:
            packed = packed and reads_float8(device)
        return TensorSpec(device, weights, kernels, collective, packed, deterministic)

    if dummy_seed is not None:
        spec = spec_of(config.dtype or "bfloat16")
        model = family.build(own, spec)
        if spec.packed and quantization is not None:
            draw_packed(model, dummy_seed, quantization, device)
        if collective is None:
            draw_weights(model, dummy_seed)
        else:
            draw_weights(model, dummy_seed, whole(), collective.shard)
        return LoadedModel(model.eval(), defaults, spec)
    with TensorFiles(path) as files:
        if config.is_part:
            files.rename(name_in_text_model)
        if headless:
            files.rename(name_in_body)
        # Codes do not determine the dtype of activations.
        stored = "bfloat16" if quantization is not None else files.dtype
        spec = spec_of(config.dtype or stored)
        model = family.build(own, spec)
        cuts = {} if collective is None else _cuts(whole(), model, collective.shard)
        stacked = config.experts is not None and config.experts.stacked
        weights = StoredWeights(files, quantization, device, config.fused, stacked_experts=stacked)
        load_weights(model, weights, progress, cuts)
    return LoadedModel(model.eval(), defaults, spec)


#: Name prefixes in checkpoints that contain more than a text model, and our prefixes.
_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}


def name_in_text_model(name: str) -> str | None:
    """Return a tensor's name in the text model; None if it belongs to another part."""
    for prefix, own in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return None


def name_in_body(name: str) -> str | None:
    """Return a tensor's name below the head; None for the head itself. Some checkpoints have no
    prefix there.
    """
    if name.startswith(("lm_head.", "score.")):
        return None
    return name if name.startswith("model.") else f"model.{name}"


class _Cut(NamedTuple):
    """The shape of a checkpoint's tensor, and the part of it on this rank."""

    shape: torch.Size
    #: None: other ranks hold it.
    place: tuple[slice, ...] | None


def _cuts(whole: nn.Module, model: nn.Module, shard: Shard) -> dict[str, _Cut]:
    """Return, for each tensor name of `whole`, the part that belongs to `model`, its shard."""
    shapes = {part.name: part.target.shape for part in weight_parts(model)}
    return {
        uncut.name: _Cut(
            uncut.target.shape,
            None
            if uncut.name not in shapes
            else part_of(uncut.target.shape, shapes[uncut.name], shard),
        )
        for uncut in weight_parts(whole)
    }


@torch.inference_mode()
def load_weights(
    model: nn.Module,
    stored: StoredWeights,
    progress: Progress | None = None,
    cuts: Mapping[str, _Cut] = MappingProxyType({}),
) -> None:
    """Fill every weight of `model` from the checkpoint, converting to the model's dtype.

    Tensors in `cuts` are read only as far as they belong to the model. Weights without memory are
    packed if the checkpoint has them quantised and the kernels support it.

    Raises `CheckpointError` naming tensors that are missing, superfluous, or of another shape.
    """
    expected = {part.name: part.target.shape for part in weight_parts(model)}
    present = set(stored.names)
    missing = sorted(expected.keys() - present)
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_listing(missing)}")
    known = expected.keys() | cuts.keys()
    unexpected = sorted(name for name in present - known if not _is_redundant(name))
    if unexpected:
        raise CheckpointError(
            f"the checkpoint holds tensors that the model has no place for: {_listing(unexpected)}"
        )
    count = 0

    def read(name: str) -> Tensor | QuantizedWeight:
        nonlocal count
        tensor, cut = stored.read(name), cuts.get(name)
        shape = expected[name] if cut is None else cut.shape
        if tensor.shape != shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(tensor.shape)}, "
                f"the configuration asks for {list(shape)}"
            )
        count += 1
        if progress is not None:
            progress(count, len(expected))
        if cut is None or cut.place is None:
            return tensor
        if isinstance(tensor, QuantizedWeight):
            return tensor.part(*cut.place)
        return tensor[cut.place]

    def fill(target: Tensor, weight: Tensor | QuantizedWeight) -> None:
        stored.upload.fill(
            target, weight.dense() if isinstance(weight, QuantizedWeight) else weight
        )

    done = set()
    for path, module in _without_memory(model):
        names = [part.name for part in module.weight_parts(path) if part.target.is_meta]
        weights = [read(name) for name in names]
        if not module.pack(weights, stored.packed):
            module.give_memory(stored.device)
            targets = {part.name: part.target for part in module.weight_parts(path)}
            for name, weight in zip(names, weights, strict=True):
                fill(targets[name], weight)
        done.update(names)
    for name, target, offset in weight_parts(model):
        if name not in done:
            fill(target, read(name))
            if offset:
                target += offset


def _without_memory(model: nn.Module) -> Iterator[tuple[str, Packable]]:
    for path, module in model.named_modules():
        if isinstance(module, Packable) and module.is_meta:
            yield path, module


@torch.inference_mode()
def draw_packed(
    model: nn.Module, seed: int, quantization: Quantization, device: torch.device
) -> None:
    """Fill every weight without memory with random codes, or with memory if it is dense."""
    generator = torch.Generator(device).manual_seed(seed)

    def packed(weights: Sequence[Tensor | QuantizedWeight]) -> PackedWeight | None:
        return pack_stacked(weights, device, quantization.activations)

    for path, module in _without_memory(model):
        parts = [part for part in module.weight_parts(path) if part.target.is_meta]
        drawn: list[Tensor | QuantizedWeight] = []
        if not any(quantization.skips(part.name.removesuffix(".weight")) for part in parts):
            for rows, columns in (part.target.shape for part in parts):
                drawn.append(quantization.draw(rows, columns, generator))
        if not drawn or not module.pack(drawn, packed):
            module.give_memory(device)


@torch.inference_mode()
def draw_weights(
    model: nn.Module, seed: int, whole: nn.Module | None = None, shard: Shard | None = None
) -> None:
    """Fill every weight of `model` with random values in place; norms get ones.

    For measurements: a step's cost does not depend on the weights while activations stay finite.

    The same seed gives the same weights on the same kind of device. If `model` is the `shard` of a
    model, `whole` is that model without weights, and the random values are parts of its values.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for module, origin in zip(model.modules(), (whole or model).modules(), strict=True):
        of_origin = origin.parameters(recurse=False)
        for parameter, drawn in zip(module.parameters(recurse=False), of_origin, strict=True):
            if parameter.is_meta:
                continue
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
                continue
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            if parameter.shape == drawn.shape:
                parameter.normal_(std=_STD, generator=generators[device])
                continue
            assert isinstance(module, Stacked)
            assert isinstance(origin, Stacked)
            assert shard is not None
            values = torch.empty(drawn.shape, dtype=parameter.dtype, device=device)
            values.normal_(std=_STD, generator=generators[device])
            uncut = {part.name: part.target for part in origin.weight_parts("")}
            for part in module.weight_parts(""):
                target, place = part.target, uncut[part.name]
                if target.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr():
                    # View the random values as `place` views a weight without memory.
                    view = values.as_strided(place.shape, place.stride(), place.storage_offset())
                    target.copy_(view[part_of(view.shape, target.shape, shard)])


def resolve_device(name: str) -> torch.device:
    """Return the torch device of a setting; `auto` uses a GPU if there is one.

    Raises `SettingsError` for a device that this machine or engine does not have.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError("device", f"{name!r} is no device") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise SettingsError("device", f"{name!r} is not supported; use cpu or cuda")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise SettingsError("device", f"{name!r} asks for a GPU that torch does not see")
    return torch.device("cuda", index)


def resolve_dtype(name: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype of weights, activations and KV for a setting.

    `auto` is the checkpoint's own dtype on a GPU. On a CPU it is bfloat16 for a bfloat16 checkpoint
    if the processor multiplies bfloat16 natively, otherwise float32.
    """
    if name != "auto":
        if name not in _DTYPES:
            raise SettingsError("dtype", f"{name!r} is none of auto, {', '.join(_DTYPES)}")
        return _DTYPES[name]
    stored = _DTYPES.get(checkpoint_dtype, torch.float32)
    if device.type == "cuda" or (stored is torch.bfloat16 and has_fast_bfloat16()):
        return stored
    return torch.float32


def has_fast_bfloat16() -> bool:
    """Return true if this CPU has bfloat16 matrix instructions (AMX or avx512_bf16)."""
    # NOTE: private names, absent on some platforms; float32 is then the safe answer.
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(bool(getattr(torch.cpu, check, bool)()) for check in checks)


def _is_redundant(name: str) -> bool:
    """Return true for tensors in old checkpoints that follow from the configuration."""
    # `lm_head.weight` is superfluous only if the head is tied to the embedding. Stored scales of an
    # 8-bit cache are unused: this engine's cache has one per head and token.
    return name == "lm_head.weight" or name.endswith(
        (".rotary_emb.inv_freq", ".k_scale", ".v_scale", ".kv_scale")
    )


def _listing(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
