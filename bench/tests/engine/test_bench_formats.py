"""Shapes in quantised formats, for measuring without a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parrot_bench.engine.device import Limits, bounds_of
from parrot_bench.engine.formats import FORMATS, write_configuration
from parrot_engine.loading.hub import resolve_model
from parrot_engine.models.loader import read_model_config

#: Bytes of a weight of a layer, without scales.
BYTES = {"fp8": 1, "fp8-blocks": 1, "awq": 0.5, "gptq": 0.5, "w4a16": 0.5, "w8a8": 1}


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_shape_in_every_format(name: str, tmp_path: Path) -> None:
    shape = resolve_model("llama-3.1-8b", with_weights=False)
    config = read_model_config(write_configuration(shape, name, tmp_path))
    assert config.quantization is not None
    assert BYTES[name] <= config.quantization.bytes_per_weight < 1.04 * BYTES[name] + 0.01
    drawn = config.quantization.draw(256, 256, torch.Generator().manual_seed(0))
    assert float(drawn.dense().std()) == pytest.approx(0.02, rel=0.2)


def test_bounds_count_the_bytes_of_codes(tmp_path: Path) -> None:
    shape = resolve_model("llama-3.1-8b", with_weights=False)
    limits = Limits(1e12, 1e15)
    steps = []
    for path in (shape, write_configuration(shape, "fp8", tmp_path)):
        bounds = bounds_of(read_model_config(path), "bfloat16", limits)
        assert bounds is not None
        steps.append(bounds.step_s(1, 0, 0))
    weights = bounds.layer_weights
    assert steps[0] - steps[1] == pytest.approx(weights / 1e12, rel=1e-3)
