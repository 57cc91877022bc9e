"""The table of formats: the one place that a new one is registered in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from parrot_engine.exceptions import CheckpointError, UnsupportedModelError
from parrot_engine.quantization import awq, compressed_tensors, fp8, gptq
from parrot_engine.quantization.interface import Quantization

#: By `quant_method`.
METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "awq": awq.read_config,
    "compressed-tensors": compressed_tensors.read_config,
    "fbgemm_fp8": fp8.read_config,
    "fp8": fp8.read_config,
    "gptq": gptq.read_config,
    "modelopt": fp8.read_config,
}


def read_quantization(raw: Mapping[str, Any], architecture: str) -> Quantization | None:
    """How `config.json` says that the weights are stored; None where they are plain numbers.

    Raises:
        UnsupportedModelError: by a method, or with options, that is not in the table.
        CheckpointError: it contradicts itself.
    """
    config = raw.get("quantization_config") or raw.get("compression_config")
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise CheckpointError(f"config.json: `quantization_config` must be an object: {config!r}")
    method = config.get("quant_method", "unknown")
    if method not in METHODS:
        raise UnsupportedModelError(
            f"quantization {method!r} (supported: {', '.join(sorted(METHODS))}, or the same model "
            "without quantization)",
            architecture=architecture,
        )
    return METHODS[method](config)
