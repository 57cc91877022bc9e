"""Products with packed weights, with everything that can be fused, and their float64 reference."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from parrot_engine.kernels.matmul.quantized_matmul import quantized_product
from parrot_engine.kernels.tuning import Tuning
from parrot_engine.quantization.packed import PackedWeight, pack
from parrot_engine.quantization.weights import QuantizedWeight
from torch import Tensor

EPS = 1e-5

#: (bits, float codes, rows and columns of a block, zero points, an order of columns)
KINDS: dict[str, tuple[int, bool, tuple[int, int], bool, bool]] = {
    "fp8-tensor": (8, True, (1 << 20, 1 << 20), False, False),
    "fp8-rows": (8, True, (1, 1 << 20), False, False),
    "fp8-blocks": (8, True, (16, 32), False, False),
    "int8": (8, False, (1, 1 << 20), False, False),
    "int8-groups": (8, False, (1, 32), True, True),
    "int4": (4, False, (1, 32), False, False),
    "int4-zeros": (4, False, (1, 32), True, False),
    "int4-order": (4, False, (1, 32), True, True),
    "int4-rows": (4, False, (1, 1 << 20), False, False),
}


class QuantizedCase(NamedTuple):
    """One product; what is fused is named by letters: n(orm), g(ated), b(ias), r(esidual)."""

    kind: str
    num_tokens: int
    out_size: int
    in_size: int
    fused: str = ""
    dtype: torch.dtype = torch.bfloat16
    #: Columns of a group, where they are grouped; 0: those of the kind.
    group: int = 0


class Operands(NamedTuple):
    """Random operands of a case; those that it does not use are None."""

    x: Tensor
    weight: PackedWeight
    dense: Tensor
    norm: Tensor | None
    bias: Tensor | None
    residual: Tensor | None


def draw_weight(case: QuantizedCase, generator: torch.Generator) -> QuantizedWeight:
    """A weight whose product with a row of ones is of the order of 1."""
    device = generator.device
    bits, is_float, block, has_zeros, has_order = KINDS[case.kind]
    rows, columns = case.out_size * (2 if "g" in case.fused else 1), case.in_size
    width = case.group if case.group and block[1] < columns else block[1]
    height, width = min(block[0], rows), min(width, columns)
    count = (-(-rows // height), -(-columns // width))
    scales = 1 + torch.rand(count, generator=generator, device=device)
    scales *= 0.02 if bits == 8 else 0.15
    if is_float:
        noise = 32 * torch.randn(rows, columns, generator=generator, device=device)
        codes = noise.to(torch.float8_e4m3fn)
    else:
        half = 2 ** (bits - 1)
        codes = torch.randint(-half, half, (rows, columns), generator=generator, device=device)
        codes = codes.to(torch.int8)
        scales = scales.to(torch.float16)
    zeros = groups = None
    if has_zeros:
        zeros = torch.randint(-7, 9, count, generator=generator, device=device).short()
    if has_order:
        order = torch.randperm(columns, generator=generator, device=device)
        groups = order // width
    return QuantizedWeight(codes, scales / columns**0.5, (height, width), zeros, groups, bits)


def draw(case: QuantizedCase, device: str = "cpu", seed: int = 0) -> Operands:
    generator = torch.Generator(device).manual_seed(seed)
    weight = draw_weight(case, generator)
    packed = pack(weight, torch.device(device))
    assert packed is not None
    rows = len(weight.codes)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(case.dtype)

    return Operands(
        normal(case.num_tokens, case.in_size),
        packed,
        weight.dense(),
        normal(case.in_size) if "n" in case.fused else None,
        normal(rows) if "b" in case.fused else None,
        normal(case.num_tokens, case.out_size) if "r" in case.fused else None,
    )


def compute(case: QuantizedCase, operands: Operands, tuning: Tuning) -> Tensor:
    """Run the kernels; counts of parts are zeros again behind it."""
    arrivals = torch.zeros(case.out_size, dtype=torch.int32, device=operands.x.device)
    out = quantized_product(
        operands.x,
        operands.weight,
        tuning,
        norm=None if operands.norm is None else (operands.norm, EPS),
        gated="g" in case.fused,
        bias=operands.bias,
        residual=operands.residual,
        arrivals=arrivals,
    )
    assert not arrivals.any()
    return out


def reference(case: QuantizedCase, operands: Operands) -> Tensor:
    """The same in float64."""
    x = operands.x.double()
    if operands.norm is not None:
        x = F.rms_norm(x, operands.norm.shape, operands.norm.double(), EPS)
    bias = None if operands.bias is None else operands.bias.double()
    out = F.linear(x, operands.dense.double(), bias)
    if "g" in case.fused:
        gate, up = out.chunk(2, dim=1)
        out = F.silu(gate) * up
    return out if operands.residual is None else out + operands.residual.double()
