"""Random weights for a model of which only the shape is known.

For measuring: what a step costs does not depend on what the weights are.
"""

from __future__ import annotations

import torch
from torch import nn

from parrot_engine.models.blocks import RMSNorm

#: Standard deviation of weights and biases: that of fresh Llama models (`initializer_range`).
_STD = 0.02


@torch.inference_mode()
def draw_weights(model: nn.Module, seed: int) -> None:
    """Fill every weight of `model` where it lies; norms get ones, so that activations stay finite.

    The same seed gives the same weights on the same kind of device.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
                continue
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            parameter.normal_(std=_STD, generator=generators[device])
