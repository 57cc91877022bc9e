"""Norm, gate and rotation kernels on the device against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.engine.attention_cases import relative_error
from harness.engine.rotated import check_rotation_and_writes
from parrot_engine.attention.interface import AttentionShape, Rotation
from parrot_engine.kernels import rowwise
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
BOUNDS = {FP32: 1e-6, FP16: 1e-3, BF16: 4e-3}


def _draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


# Every combination is compiled: each dtype and each size once or twice.
@pytest.mark.parametrize(
    ("rows", "size", "dtype"),
    [(1, 64, FP32), (3, 896, BF16), (2000, 4096, BF16), (3, 4096, FP16), (5, 16384, FP32)],
)
def test_rms_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    x, delta, weight = (
        _draw(*shape, dtype=dtype) for shape in ((rows, size), (rows, size), (size,))
    )
    expected = F.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    assert relative_error(rowwise.rms_norm(x, weight, 1e-5), expected) < BOUNDS[dtype]
    out, summed = rowwise.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(summed, x + delta)
    expected = F.rms_norm(summed.double(), (size,), weight.double(), 1e-5)
    assert relative_error(out, expected) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("rows", "size", "dtype"), [(1, 96, FP32), (3, 4864, FP16), (3000, 14336, BF16)]
)
def test_swiglu(rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = 3 * _draw(rows, 2 * size, dtype=dtype)
    gate, up = gate_up.double().split(size, dim=1)
    assert relative_error(rowwise.swiglu(gate_up), F.silu(gate) * up) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("head_dim", "qk_norm", "dtype"),
    [
        (64, False, BF16),
        (96, True, FP16),
        (96, False, FP32),
        (128, True, BF16),
        (128, True, FP32),
        (256, False, BF16),
    ],
)
def test_rotation_and_writes(head_dim: int, qk_norm: bool, dtype: torch.dtype) -> None:
    shape = AttentionShape(num_heads=14, num_kv_heads=2, head_dim=head_dim, block_size=16)
    count = 77
    qkv = _draw(count, 18 * head_dim, dtype=dtype)
    angle = _draw(count, head_dim // 2)
    slots = torch.randperm(8 * 16, device="cuda")[:count].int()
    norms = None
    if qk_norm:
        norms = (_draw(head_dim, dtype=dtype), _draw(head_dim, dtype=dtype), 1e-5)
    check_rotation_and_writes(shape, qkv, angle, norms, slots, BOUNDS[dtype])


@pytest.mark.parametrize("rotation", [Rotation(96), Rotation(64, True), Rotation(128, True)])
def test_rotation_of_a_part_of_a_head_and_of_neighbours(rotation: Rotation) -> None:
    shape = AttentionShape(num_heads=14, num_kv_heads=2, head_dim=128, block_size=16)
    qkv, angle = _draw(77, 18 * 128, dtype=BF16), _draw(77, 64)
    slots = torch.randperm(8 * 16, device="cuda")[:77].int()
    check_rotation_and_writes(shape, qkv, angle, None, slots, BOUNDS[BF16], rotation)
