"""Kernels on a cache of float8, interpreted: bits against torch, sums against float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from harness.engine.attention_cases import (
    Context,
    PagedCase,
    mixed_contexts,
    relative_error,
    shared_contexts,
)
from harness.engine.interpreted import CHUNK, TUNINGS, interpreted_backend
from parrot_engine.attention import launch, storage
from parrot_engine.attention.interface import AttentionShape

GROUPED = AttentionShape(8, 2, 64, 16)

#: log2(0) of rows that no query fills; they are not stored.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.usefixtures("poison"),
]


#: Tiles of many rows as well, which read bytes and not pairs of them.
BYTES = TUNINGS._replace(prefill=TUNINGS.prefill._replace(block_m=64))


_backend = partial(interpreted_backend, quantized=True)


def _case(
    shape: AttentionShape, contexts: Sequence[Context], dtype: torch.dtype = torch.float32
) -> PagedCase:
    return PagedCase(shape, contexts, dtype=dtype, quantized=True)


@pytest.mark.parametrize("window", [None, 45])
def test_mixed_lengths(window: int | None) -> None:
    shape = GROUPED._replace(num_heads=4)
    case = _case(shape, mixed_contexts(16, CHUNK))
    backend = _backend(shape, window, tunings=BYTES if window else TUNINGS)
    assert relative_error(case.run(backend, window), case.expected(window)) < 2e-6


@pytest.mark.parametrize(
    ("dtype", "size", "bound"),
    [
        (torch.float16, 1.0, 4e-4),
        # The interpreter cuts off what bfloat16 does not hold; other numbers tell nothing more.
        (torch.bfloat16, 1.0, 4e-3),
        (torch.bfloat16, 2.0**-25, 4e-3),
    ],
)
def test_half_precision(dtype: torch.dtype, size: float, bound: float) -> None:
    """Products in float16, also of values whose scales are too small for it."""
    case = _case(GROUPED, [Context(40), Context(70), Context(33, 20)], dtype)
    scales = case.layer_kv[1].view(torch.float32).flatten(2)[..., 16 * 64 // 4 :]
    scales *= size
    case.value = (case.value.float() * size).to(dtype)
    expected = case.expected() * size
    out = case.run(_backend(GROUPED, dtype=dtype, tunings=BYTES))
    assert relative_error(out, expected) < bound


def test_a_query_beyond_float16_fails_its_row_alone() -> None:
    case = _case(GROUPED, [Context(20), Context(33), Context(5)], torch.bfloat16)
    sound = case.run(_backend(GROUPED, dtype=torch.bfloat16))
    case.query[1, 3, 5] = 16 * 65504.0
    out = case.run(_backend(GROUPED, dtype=torch.bfloat16))
    assert bool(out[1, 3 * 64 : 4 * 64].isnan().all())
    assert torch.equal(out[[0, 2]], sound[[0, 2]])
    case.query[1, 3, 5] = 15 * 65504.0
    assert bool(case.run(_backend(GROUPED, dtype=torch.bfloat16)).isfinite().all())


def test_shared_prefixes_through_the_copy_engine() -> None:
    shape = GROUPED._replace(block_size=32)
    tunings = launch.Tunings(*(tuning._replace(descriptors=True) for tuning in TUNINGS))
    case = _case(shape, shared_contexts(32, CHUNK))
    backend = _backend(shape, wide_min_bytes=0, tunings=tunings)
    assert relative_error(case.run(backend), case.expected()) < 2e-6


def test_head_of_96() -> None:
    shape = GROUPED._replace(head_dim=96)
    case = _case(shape, [Context(40), Context(70), Context(33, 20)])
    assert relative_error(case.run(_backend(shape)), case.expected()) < 2e-6


def _values() -> torch.Tensor:
    """Heads of all sizes, zeros and ties between two bytes among them; `[tokens, 2, 64]`."""
    heads = torch.randn(12, 2, 64) * torch.logspace(-12, 12, 12)[:, None, None]
    heads[3, 1] = 0
    heads[4, 0, ::3] = 0
    # The largest is 448, and scales are 1: halves of the last digit, below and above 2^-6.
    heads[5, 0] = torch.arange(64) / 1024
    heads[5, 0, 1] = 448
    heads[6, 1] = 8.5 + torch.arange(64) / 2
    heads[6, 1, 1] = -448
    return heads


def test_what_is_written_is_what_torch_writes() -> None:
    key, value = _values(), _values().flip(0)
    shape = GROUPED._replace(block_size=8)
    rows = storage.tile_rows(8, 64, quantized=True)
    layer_kv = torch.full((2, 3, 2, rows, 64), 255, dtype=torch.uint8)
    slots = torch.tensor([9, 2, -1, 0, 17, 16, 5, 23, 7, -1, 8, 10], dtype=torch.int32)
    expected = layer_kv.clone()
    places = slots.long()[:, None] // 8 * 2 + torch.arange(2)
    places = places * rows + slots[:, None] % 8
    written = slots >= 0
    for part, heads in zip(expected, (key, value), strict=True):
        bits, scales = storage.quantize(heads[written])
        storage.write_quantized(part, places[written].view(-1), bits.flatten(0, 1), scales.view(-1))
    # -0 and 0 are the same to who reads them.
    expected[expected == 128] = 0
    launch.run_write_kv(key, value, slots, launch.cache_view(layer_kv), shape=shape)
    layer_kv[layer_kv == 128] = 0
    assert torch.equal(layer_kv, expected)


def test_rotated_heads_are_written_like_others() -> None:
    shape = AttentionShape(3, 2, 64, 8)
    count = 5
    qkv = torch.randn(count, (3 + 4) * 64) * 3
    cos, sin = torch.ones(count, 32), torch.zeros(count, 32)
    rows = storage.tile_rows(8, 64, quantized=True)
    caches = [torch.full((2, 2, 2, rows, 64), 255, dtype=torch.uint8) for _ in range(2)]
    slots = torch.tensor([3, -1, 15, 8, 4], dtype=torch.int32)
    fused, plain = (launch.cache_view(cache) for cache in caches)
    launch.run_rotate_and_write(qkv, cos, sin, None, slots, fused, shape=shape)
    _, key, value = qkv.view(count, 7, 64).split((3, 2, 2), dim=1)
    launch.run_write_kv(key.contiguous(), value.contiguous(), slots, plain, shape=shape)
    assert int((caches[0] != 255).sum()) > 0
    assert torch.equal(*caches)


@pytest.mark.parametrize("sick", [float("nan"), float("inf")])
def test_what_is_not_finite_fails_its_row_alone(sick: float) -> None:
    case = _case(GROUPED, [Context(20), Context(33), Context(5)])
    sound = case.run(_backend(GROUPED))
    case.value[1, 0, 7] = sick
    out = case.run(_backend(GROUPED))
    assert bool(out[1].isnan().any())
    assert torch.equal(out[[0, 2]], sound[[0, 2]])
