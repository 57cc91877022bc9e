"""The table of formats, the only place to register a new one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from parrot_engine.exceptions import CheckpointError, UnsupportedModelError
from parrot_engine.quantization import awq, compressed_tensors, fp8, gptq
from parrot_engine.quantization.interface import Quantization

#: Readers by `quant_method`.
METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "awq": awq.read_config,
    "compressed-tensors": compressed_tensors.read_config,
    "fbgemm_fp8": fp8.read_config,
    "fp8": fp8.read_config,
    "gptq": gptq.read_config,
    "modelopt": fp8.read_config,
}


def read_quantization(raw: Mapping[str, Any], architecture: str) -> Quantization | None:
    """Return the storage format of weights named in `config.json`; None for plain numbers.

    Raises:
        UnsupportedModelError: the method or its options are not in the table.
        CheckpointError: the configuration contradicts itself.
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
