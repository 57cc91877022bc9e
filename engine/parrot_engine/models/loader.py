"""From a checkpoint directory to a model with its weights.

Chooses device and dtype, builds the family's model with empty weights, and fills them from the
checkpoint's memory-mapped tensors (fusing and converting on the way). Does not download anything
and does not read the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from parrot_engine.exceptions import CheckpointError, SettingsError, UnsupportedModelError
from parrot_engine.kernels.selection import Kernels
from parrot_engine.models.checkpoint import TensorFiles, read_json, read_optional_json
from parrot_engine.models.config import GenerationDefaults, ModelConfig, read_generation_defaults
from parrot_engine.models.decoder import Decoder
from parrot_engine.models.families import family_of
from parrot_engine.models.parts import Linear, RMSNorm, TensorSpec, weight_parts
from parrot_engine.models.sharding import Collective, Shard, part_of, parts_of_stack, shard_config

#: Called after each tensor with (tensors loaded, tensors in all).
Progress: TypeAlias = Callable[[int, int], None]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: Standard deviation of weights and biases: that of fresh Llama models (`initializer_range`).
_STD = 0.02


class LoadedModel(NamedTuple):
    """A model with its weights and its checkpoint's generation defaults."""

    model: Decoder
    defaults: GenerationDefaults
    spec: TensorSpec


def read_model_config(path: Path) -> ModelConfig:
    """The configuration of a checkpoint, without touching its tensors.

    Raises `UnsupportedModelError` when this engine cannot run it, so that a caller can choose
    another engine before anything is loaded; `CheckpointError` for a broken `config.json`.
    """
    raw = read_json(path / "config.json")
    return family_of(raw).read_config(raw)


def load_model(
    path: Path,
    device: torch.device,
    dtype: str,
    progress: Progress | None = None,
    *,
    kernels: Kernels = "torch",
    dummy_seed: int | None = None,
    collective: Collective | None = None,
) -> LoadedModel:
    """Build the model of a checkpoint and load its weights.

    With `dummy_seed` the weights are drawn from it, and only the configuration is read. With
    `collective` they are the part of its rank.

    Raises:
        UnsupportedModelError: the model is not one that this engine knows how to run.
        CheckpointError: files are missing, broken, or do not fit the configuration.
        SettingsError: the dtype cannot be had.
    """
    raw = read_json(path / "config.json")
    family = family_of(raw)
    config = family.read_config(raw)
    defaults = read_generation_defaults(raw, read_optional_json(path / "generation_config.json"))
    own = config if collective is None else shard_config(config, collective.shard)

    def whole() -> Decoder:
        return family.build(config, TensorSpec(torch.device("meta"), torch.float32))

    if dummy_seed is not None:
        stored = config.dtype or "bfloat16"
        spec = TensorSpec(device, resolve_dtype(dtype, stored, device), kernels, collective)
        model = family.build(own, spec)
        if collective is None:
            draw_weights(model, dummy_seed)
        else:
            draw_weights(model, dummy_seed, whole(), collective.shard)
        return LoadedModel(model.eval(), defaults, spec)
    with TensorFiles(path) as files:
        spec = TensorSpec(
            device, resolve_dtype(dtype, config.dtype or files.dtype, device), kernels, collective
        )
        model = family.build(own, spec)
        cuts = {} if collective is None else _cuts(whole(), model, collective.shard)
        load_weights(model, files, progress, cuts)
    return LoadedModel(model.eval(), defaults, spec)


class _Cut(NamedTuple):
    """Of which tensor of the checkpoint a weight is a part."""

    shape: torch.Size
    place: tuple[slice, ...]


def _cuts(whole: nn.Module, model: nn.Module, shard: Shard) -> dict[str, _Cut]:
    """For each tensor's name what of it belongs to `model`, the shard of `whole`."""
    return {
        part.name: _Cut(uncut.target.shape, part_of(uncut.target.shape, part.target.shape, shard))
        for uncut, part in zip(weight_parts(whole), weight_parts(model), strict=True)
    }


@torch.inference_mode()
def load_weights(
    model: nn.Module,
    files: TensorFiles,
    progress: Progress | None = None,
    cuts: Mapping[str, _Cut] = MappingProxyType({}),
) -> None:
    """Fill every weight of `model` from the checkpoint, converting to the model's dtype.

    Of a tensor among `cuts` no more is read than what belongs to the model.

    Raises `CheckpointError` naming tensors that are missing, left over, or of another shape.
    """
    parts = list(weight_parts(model))
    expected = {part.name for part in parts}
    present = set(files.names)
    missing = sorted(expected - present)
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_listing(missing)}")
    unexpected = sorted(name for name in present - expected if not _is_redundant(name))
    if unexpected:
        raise CheckpointError(
            f"the checkpoint holds tensors that the model has no place for: {_listing(unexpected)}"
        )
    for count, (name, target) in enumerate(parts, start=1):
        tensor = files.tensor(name)
        cut = cuts.get(name)
        shape = target.shape if cut is None else cut.shape
        if tensor.shape != shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(tensor.shape)}, "
                f"the configuration asks for {list(shape)}"
            )
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise UnsupportedModelError(f"weights stored as {tensor.dtype} ({name})")
        target.copy_(tensor if cut is None else tensor[cut.place])
        if progress is not None:
            progress(count, len(parts))


@torch.inference_mode()
def draw_weights(
    model: nn.Module, seed: int, whole: nn.Module | None = None, shard: Shard | None = None
) -> None:
    """Fill every weight of `model` with random values, where it lies; norms get ones.

    For measuring: what a step costs does not depend on the weights, as long as activations stay
    finite.

    The same seed gives the same weights on the same kind of device. Where `model` is the `shard`
    of a model, `whole` is that one without its weights, and what is drawn are parts of its.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for module, origin in zip(model.modules(), (whole or model).modules(), strict=True):
        of_origin = origin.parameters(recurse=False)
        for parameter, drawn in zip(module.parameters(recurse=False), of_origin, strict=True):
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
                continue
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            if parameter.shape == drawn.shape:
                parameter.normal_(std=_STD, generator=generators[device])
                continue
            assert isinstance(module, Linear)
            assert isinstance(origin, Linear)
            assert shard is not None
            values = torch.empty(drawn.shape, dtype=parameter.dtype, device=device)
            values.normal_(std=_STD, generator=generators[device])
            for rows, own_rows in parts_of_stack(origin.parts, module.parts):
                target = parameter[own_rows]
                target.copy_(values[rows][part_of(values[rows].shape, target.shape, shard)])


def resolve_device(name: str) -> torch.device:
    """The torch device of a setting; `auto` takes a GPU where there is one.

    Raises `SettingsError` for a device that this machine or this engine does not have.
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
    """The dtype of weights, activations and KV for a setting.

    `auto` is the checkpoint's own dtype on a GPU. On a CPU it is bfloat16 for a bfloat16
    checkpoint where the processor multiplies bfloat16 natively, else float32.
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
    """Whether this CPU has bfloat16 matrix instructions (AMX or avx512_bf16)."""
    # NOTE: private names, absent on some platforms; without them float32 is the safe answer.
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(bool(getattr(torch.cpu, check, bool)()) for check in checks)


def _is_redundant(name: str) -> bool:
    """Tensors that old checkpoints store although they follow from the configuration."""
    # `lm_head.weight` is left over only where the head is tied to the embedding.
    return name == "lm_head.weight" or name.endswith(".rotary_emb.inv_freq")


def _listing(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
