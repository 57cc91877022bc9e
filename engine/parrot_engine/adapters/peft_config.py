"""Reads `adapter_config.json` of a PEFT folder: the modules that a LoRA adapter changes, and its
scale.

Unsupported keys that change the computation are refused by name; keys that only concern training
are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parrot_engine.exceptions import AdapterError
from parrot_engine.settings import MAX_LORA_RANK

CONFIG_FILE = "adapter_config.json"

#: Keys that are read here, or do not change the computation with the tensors.
_KNOWN = frozenset(
    {
        "peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora",
        "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "bias",
        "init_lora_weights", "task_type", "auto_mapping", "base_model_name_or_path", "revision",
        "inference_mode", "lora_dropout", "peft_version", "fan_in_fan_out", "loftq_config",
        "eva_config", "corda_config", "lora_ga_config", "runtime_config", "megatron_core",
        "qalora_group_size", "ensure_weight_tying",
    }
)  # fmt: skip
#: Initialisations that change the base's own weights, so that they differ from its checkpoint.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings of an adapter."""

    rank: int
    alpha: float
    #: Returns true for the full name of a module that the adapter changes.
    targets: Callable[[str], bool]
    #: By a pattern of module names.
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    #: The base model that the adapter's folder names; for messages.
    base: str

    @property
    def max_rank(self) -> int:
        return max(self.rank, *self.rank_pattern.values(), 1)

    def rank_of(self, module: str) -> int:
        return int(_of_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor on B A."""
        alpha, rank = _of_pattern(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return float(alpha / (rank**0.5 if self.use_rslora else rank))


def read_peft_config(folder: Path) -> PeftConfig:
    """Read the configuration of the adapter in `folder`.

    Raises:
        AdapterError: it is missing or not supported.
    """
    if not folder.is_dir():
        raise AdapterError(f"{folder} is no folder")
    try:
        raw = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{CONFIG_FILE} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise AdapterError(f"{CONFIG_FILE} must hold a JSON object")
    _check_kind(raw)
    rank = _positive(raw, "r", int)
    ranks = {key: _positive(_patterns(raw, "rank_pattern"), key, int)
             for key in _patterns(raw, "rank_pattern")}  # fmt: skip
    alphas = {key: _positive(_patterns(raw, "alpha_pattern"), key, float)
              for key in _patterns(raw, "alpha_pattern")}  # fmt: skip
    config = PeftConfig(
        rank,
        _positive(raw, "lora_alpha", float),
        _targets(raw),
        ranks,
        alphas,
        bool(raw.get("use_rslora")),
        str(raw.get("base_model_name_or_path") or "another model"),
    )
    if config.max_rank > MAX_LORA_RANK:
        raise AdapterError(f"rank {config.max_rank} is more than {MAX_LORA_RANK}")
    return config


def _check_kind(raw: Mapping[str, Any]) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"peft_type {kind!r} is not supported; LORA is")
    if raw.get("use_dora"):
        raise AdapterError("use_dora: DoRA is not supported; merge the adapter into its base")
    if raw.get("modules_to_save"):
        raise AdapterError(
            f"modules_to_save {raw['modules_to_save']}: whole modules are not replaced; merge the "
            "adapter into its base"
        )
    if raw.get("bias", "none") != "none":
        raise AdapterError(f"bias {raw['bias']!r} is not supported; 'none' is")
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and init.startswith(_CHANGES_BASE):
        raise AdapterError(
            f"init_lora_weights {init!r} changes the weights of the base; convert the adapter to "
            "plain LoRA when saving (`path_initial_model_for_weight_conversion`)"
        )
    for key, value in raw.items():
        if value and key not in _KNOWN:
            raise AdapterError(f"{key} is not supported")


def _targets(raw: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return the test for `target_modules` without `exclude_modules`, in the layers of
    `layers_to_transform`.
    """
    wanted = _matcher(raw, "target_modules")
    excluded = _matcher(raw, "exclude_modules") if raw.get("exclude_modules") else None
    layers = raw.get("layers_to_transform")
    if isinstance(layers, int):
        layers = [layers]
    if layers is not None and not _is_list_of(layers, int):
        raise AdapterError("layers_to_transform must list numbers of layers")

    def is_target(module: str) -> bool:
        if not wanted(module) or (excluded is not None and excluded(module)):
            return False
        if not layers:
            return True
        found = re.search(r"\.(\d+)\.", module)
        return found is not None and int(found[1]) in layers

    return is_target


def _matcher(raw: Mapping[str, Any], key: str) -> Callable[[str], bool]:
    """Return a test of module names: a list has endings of names, a string is a regular
    expression.
    """
    value = raw.get(key)
    if value == "all-linear" and key == "target_modules":
        return lambda module: True
    if isinstance(value, str) and value:
        try:
            pattern = re.compile(value)
        except re.error as error:
            raise AdapterError(f"{key} is no regular expression: {error}") from error
        return lambda module: pattern.fullmatch(module) is not None
    if not _is_list_of(value, str) or not value:
        raise AdapterError(f"{key} must be a list of names, a regular expression or 'all-linear'")
    names = tuple(value)
    return lambda module: any(module == name or module.endswith(f".{name}") for name in names)


def _of_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    for pattern, value in patterns.items():
        expression = pattern if pattern.startswith("^") else rf"(.*\.)?({pattern})$"
        if re.match(expression, module):
            return value
    return default


def _patterns(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise AdapterError(f"{key} must be an object")
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterError(f"{key}: {pattern!r} is no regular expression") from error
    return value


def _positive(raw: Mapping[str, Any], key: str, kind: type) -> Any:
    value: Any = raw.get(key)
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise AdapterError(f"{key} must be a positive number, not {value!r}")
    return value


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)
