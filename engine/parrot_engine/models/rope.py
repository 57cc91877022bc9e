"""The frequencies of each kind of rotary position embedding.

Formulas and the order of operations follow `modeling_rope_utils.py` in transformers 5, so that
float32 results agree to the last few bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from parrot_engine.models.config import RopeConfig


class Frequencies(NamedTuple):
    """Inverse frequencies `[rotary_dim / 2]` in float32, and the factor on cos and sin."""

    inverse: Tensor
    attention_factor: float


def frequencies(rope: RopeConfig, head_dim: int) -> Frequencies:
    """Compute the rotation speeds of one kind of rope, on the CPU.

    For `dynamic` and `longrope` they are valid up to `ModelConfig.max_position` (see there).
    Sources: RoFormer (arXiv 2104.09864), linear and dynamic NTK scaling as in transformers, YaRN
    (arXiv 2309.00071), LongRoPE (arXiv 2402.13753), Llama 3.1's reference code.
    """
    dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    default = 1.0 / (rope.theta**exponents)
    if rope.kind in ("default", "dynamic"):
        return Frequencies(default, 1.0)
    if rope.kind == "linear":
        return Frequencies(default / rope.factor, 1.0)
    if rope.kind == "llama3":
        return Frequencies(_llama3(rope, default), 1.0)
    if rope.kind == "yarn":
        return Frequencies(_yarn(rope, exponents), _yarn_attention_factor(rope))
    short = torch.tensor(rope.short_factor, dtype=torch.float32)
    return Frequencies(1.0 / (short * rope.theta**exponents), _longrope_attention_factor(rope))


def _llama3(rope: RopeConfig, default: Tensor) -> Tensor:
    wavelength = 2 * math.pi / default
    low_wavelength = rope.original_max_position / rope.low_freq_factor
    high_wavelength = rope.original_max_position / rope.high_freq_factor
    scaled = torch.where(wavelength > low_wavelength, default / rope.factor, default)
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    medium = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(medium, smoothed, scaled)


def _yarn(rope: RopeConfig, exponents: Tensor) -> Tensor:
    dim = 2 * len(exponents)

    def correction(rotations: float) -> float:
        """Return the dimension that turns `rotations` times over the original length."""
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    speeds = rope.theta**exponents
    keep = 1 - ramp
    return (1.0 / (rope.factor * speeds)) * (1 - keep) + (1.0 / speeds) * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
