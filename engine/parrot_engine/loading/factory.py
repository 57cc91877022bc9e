"""Turns options into a running engine: its kind, its folder, its name.

Imports only the chosen engine: a machine without transformers can use the builtin engine, and vice
versa.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

from parrot_engine.adapters.peft_config import read_peft_config
from parrot_engine.exceptions import CheckpointError, SettingsError, UnsupportedModelError
from parrot_engine.loading.hub import resolve_model, served_name
from parrot_engine.progress import ProgressLines
from parrot_engine.protocol import AdapterLoading, Engine
from parrot_engine.settings import DEFAULT_LORA_RANK, DEFAULT_MAX_LORAS, BuiltinSettings
from parrot_engine.text.tokenizer import TextAssets, TextAssetsError

if TYPE_CHECKING:
    from parrot_engine.pooling.config import PoolingConfig

_log = logging.getLogger(__name__)

EngineKind: TypeAlias = Literal["auto", "builtin", "huggingface"]

_KINDS = ("auto", "builtin", "huggingface")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The model to load, and the settings of all engines.

    None means the engine's own default. Options that the chosen engine lacks are ignored.
    """

    #: A folder, a hub id, or `parrot-demo`.
    model: str
    #: The name for clients; by default the folder's name or the hub id.
    name: str | None = None
    #: `auto` means the builtin engine if it supports the model.
    kind: EngineKind = "auto"
    device: str = "auto"
    dtype: str = "auto"
    kernels: str | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    memory_share: float | None = None
    cuda_graphs: str | None = None
    #: Storage format of keys and values.
    kv_cache_dtype: str | None = None
    overlap: str | None = None
    speculative_tokens: int | None = None
    speculative_min_ngram: int | None = None
    speculative_max_ngram: int | None = None
    speculative_batch_tokens: int | None = None
    max_batch_size: int | None = None
    max_batch_tokens: int | None = None
    max_background_tokens: int | None = None
    background_burst_tokens: int | None = None
    long_prompt_tokens: int | None = None
    max_context_tokens: int | None = None
    max_logprob_tokens: int | None = None
    max_waiting: int | None = None
    max_contexts: int | None = None
    prefix_caching: bool | None = None
    seed: int | None = None
    num_threads: int | None = None
    #: GPUs of this host that hold the model together (builtin engine only).
    tensor_parallel: int | None = None
    enable_expert_parallel: bool | None = None
    peer_memory: bool | None = None
    #: Host memory for KV that leaves the device, in GB or in blocks.
    host_memory_gb: float | None = None
    host_blocks: int | None = None
    host_min_tokens: int | None = None
    #: LoRA adapters to load (folders by name), folders from which others may be loaded later, and
    #: the maximum number per step and their rank (builtin engine only).
    adapters: dict[str, str] | None = None
    adapter_folders: list[str] | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    #: See `BuiltinSettings` (builtin engine only).
    deterministic: bool | None = None
    #: True: random weights, reading only the model's configuration (builtin engine only).
    dummy_weights: bool = False
    #: True: run Python code that comes with the checkpoint (huggingface engine only).
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Raise `SettingsError` for an unknown kind, or one without dummy weights."""
        if self.kind not in _KINDS:
            raise SettingsError("kind", f"{self.kind!r} is none of {', '.join(_KINDS)}")
        if self.dummy_weights and self.kind == "huggingface":
            raise SettingsError("dummy_weights", "the huggingface engine has none")
        if self.adapters and self.kind == "huggingface":
            raise SettingsError("adapters", "the huggingface engine takes none")
        if self.deterministic and self.kind == "huggingface":
            raise SettingsError("deterministic", "the huggingface engine does not support it")

    @classmethod
    def from_json(cls, text: str) -> EngineOptions:
        """Parse options from a JSON object.

        Raises:
            SettingsError: the text is no object, a key is unknown, or a value has the wrong type.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise SettingsError("options", f"not valid JSON: {error}") from error
        if not isinstance(values, dict) or "model" not in values:
            raise SettingsError("options", "must be a JSON object with at least 'model'")
        hints = get_type_hints(cls)
        for key, value in values.items():
            if key not in hints:
                raise SettingsError(key, "there is no such option")
            if key != "kind" and not _fits(value, hints[key]):
                raise SettingsError(key, f"{value!r} has the wrong type")
        return cls(**values)


#: By option, properties of its command-line flag besides an optional value of the option's type.
_FLAGS: dict[str, dict[str, Any]] = {
    "kind": {"choices": _KINDS},
    "device": {"help": "cpu, cuda, cuda:1, … (default: auto)"},
    "dtype": {"choices": ("auto", "float32", "bfloat16", "float16")},
    "kernels": {"choices": ("auto", "torch", "triton")},
    "block_size": {"help": "tokens in a block of the KV cache"},
    "num_blocks": {"help": "blocks of the KV cache"},
    "kv_cache_bytes": {"help": "memory for the KV cache, instead of --num-blocks"},
    "kv_cache_dtype": {
        "choices": ("auto", "fp8_e4m3"),
        "help": "how keys and values are stored: as the model computes, or in 8 bits with scales",
    },
    "gpu_memory_utilization": {
        "metavar": "SHARE",
        "help": "of a GPU's memory, where the cache's size is not given (default: 0.9)",
    },
    "cuda_graphs": {
        "choices": ("auto", "start", "lazy", "off"),
        "help": "capture them when needed or idle, before it is ready, when needed, or never",
    },
    "overlap": {
        "choices": ("auto", "on", "off"),
        "help": "launch a step while the device computes the one before",
    },
    "speculative_tokens": {
        "metavar": "K",
        "help": "propose up to so many tokens (7 at most) at a time, from what the text repeats",
    },
    "max_batch_size": {"help": "contexts that run at once"},
    "max_batch_tokens": {"help": "tokens of one step"},
    "max_context_tokens": {"help": "longest context served"},
    "prefix_caching": {"action": argparse.BooleanOptionalAction},
    "seed": {"help": "of generations that give none of their own"},
    "num_threads": {"help": "CPU threads"},
    "tensor_parallel": {
        "metavar": "GPUS",
        "help": "GPUs of this host that hold the model together (default: 1)",
    },
    "enable_expert_parallel": {
        "action": "store_true",
        "default": None,
        "help": "with --tensor-parallel: each GPU holds whole experts, not a part of every expert",
    },
    "host_memory_gb": {
        "metavar": "GB",
        "help": "of the host's memory, for KV blocks that leave the device (default: 0)",
    },
    "max_loras": {"help": "LoRA adapters of one step (default: 8 where some are given)"},
    "max_lora_rank": {"help": "their largest rank, to 256 (default: 16, or theirs)"},
    "deterministic": {
        "action": "store_true",
        "default": None,
        "help": "same tokens whatever else runs, is cached, or was computed before; slower",
    },
    "dummy_weights": {
        "action": "store_true",
        "default": None,
        "help": "random weights: of the model only configuration and tokenizer are read",
    },
    "trust_remote_code": {
        "action": "store_true",
        "default": None,
        "help": "run the checkpoint's code",
    },
}


def add_engine_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add flags for some `EngineOptions`, which are None unless given."""
    hints = get_type_hints(EngineOptions)
    for name in names:
        flag = dict(_FLAGS[name])
        for kind in (int, float):
            if hints[name] == kind | None:
                flag["type"] = kind
        parser.add_argument(f"--{name.replace('_', '-')}", **flag)


def given_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the `EngineOptions` given on a command line, by name."""
    names = EngineOptions.__dataclass_fields__.keys()
    return {
        name: value for name, value in vars(parsed).items() if value is not None and name in names
    }


class LoadedEngine(NamedTuple):
    """A ready engine, and the model's tokenizer and templates."""

    engine: Engine
    text: TextAssets


def load_engine(options: EngineOptions) -> LoadedEngine:
    """Find the model and load it; may download, and takes as long as needed.

    With `auto`, a model unknown to the builtin engine goes to the huggingface engine.

    Raises:
        ModelError: the model cannot be found, read or run.
        SettingsError: an option does not suit the model or machine.
    """
    # Imports tokenizers, which engines without text do not need.
    from parrot_engine.text.loading import load_text_assets

    settings, folder = _prepare(options)
    try:
        text = load_text_assets(folder)
    except TextAssetsError as error:
        raise CheckpointError(str(error)) from error
    return LoadedEngine(_load(options, settings, folder, text.tokenizer_json), text)


def load_engine_alone(options: EngineOptions) -> Engine:
    """Do the work of `load_engine` without the model's tokenizer, which need not exist."""
    return _load(options, *_prepare(options))


def _prepare(options: EngineOptions) -> tuple[BuiltinSettings | None, Path]:
    """Return the builtin engine's settings, unless it is excluded, and the model's folder."""
    # Check settings first, because a download may be long.
    settings = None if options.kind == "huggingface" else _builtin_settings(options)
    folder = resolve_model(
        options.model, with_code=options.trust_remote_code, with_weights=not options.dummy_weights
    )
    return settings, folder


def _load(
    options: EngineOptions,
    settings: BuiltinSettings | None,
    folder: Path,
    tokenizer_json: str | None = None,
) -> Engine:
    name = options.name or served_name(options.model)
    from parrot_engine.pooling.config import read_pooling

    pooling = read_pooling(folder)
    # The other engine, and several GPUs, still support generation.
    one_device = settings is not None and settings.tensor_parallel == 1
    if pooling is not None and (one_device or not pooling.also_generates):
        if settings is None:
            raise SettingsError("kind", "only the builtin engine computes vectors and scores")
        if options.adapters and not pooling.also_generates:
            raise SettingsError("adapters", "models of vectors and scores take none")
        if settings.deterministic and not pooling.also_generates:
            raise SettingsError("deterministic", "models of vectors and scores do not support it")
        engine = _load_pooling(folder, pooling, settings, name, tokenizer_json)
        _load_adapters(engine, options.adapters or {})
        return engine
    if settings is not None:
        try:
            engine = _load_builtin(folder, settings, name, tokenizer_json)
        except UnsupportedModelError as error:
            needs_builtin = options.dummy_weights or options.adapters or options.deterministic
            if options.kind == "builtin" or needs_builtin:
                raise
            _log.warning("%s: %s. Using the huggingface engine.", name, error)
        else:
            _load_adapters(engine, options.adapters or {})
            return engine
    return _load_huggingface(folder, options, name, tokenizer_json)


def _builtin_settings(options: EngineOptions) -> BuiltinSettings:
    from parrot_engine.models.loader import resolve_device

    device = resolve_device(options.device)
    chosen = _chosen(options, fields(BuiltinSettings))
    if options.adapters or options.adapter_folders:
        chosen.setdefault("max_loras", DEFAULT_MAX_LORAS)
        if not chosen["max_loras"]:
            raise SettingsError("max_loras", "0, but there are adapters to load")
        if options.max_lora_rank is None:
            folders = (Path(path).expanduser() for path in (options.adapters or {}).values())
            ranks = (read_peft_config(folder).max_rank for folder in folders)
            chosen["max_lora_rank"] = max(DEFAULT_LORA_RANK, *ranks)
    return BuiltinSettings.for_device(device.type, **chosen)


def _load_adapters(engine: Engine, adapters: Mapping[str, str]) -> None:
    if adapters:
        assert isinstance(engine, AdapterLoading)
        for name, path in adapters.items():
            engine.add_adapter(engine.read_adapter(name, path))


def _load_builtin(
    folder: Path, settings: BuiltinSettings, name: str, tokenizer_json: str | None
) -> Engine:
    from parrot_engine.engine.builtin_engine import BuiltinEngine

    return BuiltinEngine.load(
        folder,
        settings,
        model=name,
        progress=ProgressLines("loading weights"),
        tokenizer_json=tokenizer_json,
    )


def _load_pooling(
    folder: Path,
    pooling: PoolingConfig,
    settings: BuiltinSettings,
    name: str,
    tokenizer_json: str | None,
) -> Engine:
    """Load a model of vectors or scores; if it generates too, load both engines."""
    from parrot_engine.pooling.engine import PoolingEngine
    from parrot_engine.pooling.loader import load_pooling, pooling_of_decoder

    progress = ProgressLines("loading weights")
    if not pooling.also_generates:
        loaded = load_pooling(folder, pooling, settings, progress)
        return PoolingEngine(loaded, settings, model=name)
    from parrot_engine.models.loader import load_model
    from parrot_engine.pooling.beside import GeneratingAndPooling
    from parrot_engine.runner.loader import adapter_slots, prepare_device, runner_of

    device, kernels = prepare_device(settings)
    seed = (settings.seed or 0) if settings.dummy_weights else None
    model, defaults, spec = load_model(
        folder,
        device,
        settings.dtype,
        progress,
        kernels=kernels,
        dummy_seed=seed,
        deterministic=settings.deterministic,
    )
    adapters = adapter_slots(model, settings, device, spec.dtype)
    runner = runner_of(model, defaults, settings, device, spec.dtype, kernels, adapters=adapters)
    loaded = pooling_of_decoder(folder, pooling, model, spec, settings)
    vectors = PoolingEngine(loaded, settings, model=name)
    return GeneratingAndPooling.of(runner, settings, name, tokenizer_json, pooling=vectors)


def _load_huggingface(
    folder: Path, options: EngineOptions, name: str, tokenizer_json: str | None
) -> Engine:
    try:
        from parrot_engine.huggingface import HuggingFaceEngine, HuggingFaceSettings
    except ImportError as error:
        raise SettingsError(
            "kind", f"the huggingface engine needs the transformers package ({error})"
        ) from error
    from parrot_engine.models.loader import resolve_device

    device = resolve_device(options.device)
    chosen = _chosen(options, fields(HuggingFaceSettings))
    # Only for the builtin engine.
    for option in ("tensor_parallel", "enable_expert_parallel", "max_loras"):
        chosen.pop(option, None)
    settings = HuggingFaceSettings.for_device(device.type, **chosen)
    return HuggingFaceEngine.load(folder, settings, model=name, tokenizer_json=tokenizer_json)


def _chosen(options: EngineOptions, known: tuple[Field[Any], ...]) -> dict[str, Any]:
    """Return the options that an engine has and that were given."""
    names = [item.name for item in known if item.name in EngineOptions.__dataclass_fields__]
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(value, bool):
        return hint in (bool, bool | None)
    if isinstance(value, int) and hint == float | None:
        return True
    if isinstance(value, (list, dict)):
        texts = chain(value, value.values() if isinstance(value, dict) else ())
        generic = list[str] if isinstance(value, list) else dict[str, str]
        return bool(hint == generic | None) and all(isinstance(text, str) for text in texts)
    if get_origin(hint) is UnionType and any(get_origin(each) for each in get_args(hint)):
        return value is None
    return isinstance(value, hint)
