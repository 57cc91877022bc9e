"""Norm, gate, and rotation kernels in Triton's interpreter against float64."""

from __future__ import annotations

import harness.engine.interpreted  # noqa: F401 -- skips this module where it cannot run
import pytest
import torch
import torch.nn.functional as F
from harness.engine.attention_cases import relative_error
from harness.engine.rotated import check_rotation_and_writes
from parrot_engine.attention.interface import AttentionShape, Rotation
from parrot_engine.kernels import rowwise
from torch import Tensor

pytestmark = pytest.mark.usefixtures("poison")

BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3}


def _draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 100), (2, 896), (1, 4096)])
def test_rms_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    x, delta = _draw(rows, size, dtype=dtype), _draw(rows, size, dtype=dtype, seed=1)
    weight = _draw(size, dtype=dtype, seed=2)
    expected = F.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    assert relative_error(rowwise.rms_norm(x, weight, 1e-5), expected) < BOUNDS[dtype]
    out, summed = rowwise.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(summed, x + delta)
    expected = F.rms_norm(summed.double(), (size,), weight.double(), 1e-5)
    assert relative_error(out, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("rows", "size"), [(1, 96), (3, 1000), (2, 1025)])
def test_swiglu(rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = 3 * _draw(rows, 2 * size, dtype=dtype)
    gate, up = gate_up.double().split(size, dim=1)
    assert relative_error(rowwise.swiglu(gate_up), F.silu(gate) * up) < BOUNDS[dtype]


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
def test_rotation_and_writes(head_dim: int, qk_norm: bool) -> None:
    shape = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=head_dim, block_size=16)
    count = 5
    qkv = _draw(count, 10 * head_dim)
    angle = _draw(count, head_dim // 2, seed=1)
    slots = torch.tensor([3, 47, 16, 31, 0], dtype=torch.int32)
    norms = (_draw(head_dim, seed=2), _draw(head_dim, seed=3), 1e-5) if qk_norm else None
    check_rotation_and_writes(shape, qkv, angle, norms, slots, 1e-6)


@pytest.mark.parametrize("rotation", [Rotation(24), Rotation(32, True), Rotation(16, True)])
def test_rotation_of_a_part_of_a_head_and_of_neighbours(rotation: Rotation) -> None:
    shape = AttentionShape(num_heads=3, num_kv_heads=1, head_dim=32, block_size=16)
    qkv, angle = _draw(4, 5 * 32), _draw(4, 16, seed=1)
    slots = torch.tensor([3, 17, 16, 0], dtype=torch.int32)
    norms = (_draw(32, seed=2), _draw(32, seed=3), 1e-5)
    check_rotation_and_writes(shape, qkv, angle, norms, slots, 1e-6, rotation)
