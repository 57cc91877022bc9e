"""Random weights for a model of which only the shape is known.

For measuring: what a step costs does not depend on what the weights are.
"""

from __future__ import annotations

import torch
from torch import nn

from parrot_engine.models.blocks import Linear, RMSNorm
from parrot_engine.models.sharding import Shard, part_of, parts_of_stack

#: Standard deviation of weights and biases: that of fresh Llama models (`initializer_range`).
_STD = 0.02


@torch.inference_mode()
def draw_weights(
    model: nn.Module, seed: int, whole: nn.Module | None = None, shard: Shard | None = None
) -> None:
    """Fill every weight of `model` where it lies; norms get ones, so that activations stay finite.

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
