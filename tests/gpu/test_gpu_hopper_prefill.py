"""Prefill tiles by warps of different kinds, on the device against float64.

An error may be at most twice that of torch's own attention in the same dtype on the same inputs,
and 5e-3 in any case. The cache is NaN wherever no token was written, so that a key behind the last
one shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs an NVIDIA GPU of the Hopper generation", allow_module_level=True)

from harness.engine.attention_cases import Context, PagedCase, relative_error
from harness.engine.device_attention import BF16, FP16, device_backend, errors_beside_torch
from parrot_engine.attention import launch
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.policy import TileCuts
from parrot_engine.attention.triton_backend import TritonAttention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]

LLAMA = AttentionShape(32, 8, 128, 64)
#: Ends of boxes (64 keys) and of tiles of keys (128), and of tiles of tokens (32).
EDGES = (1, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grids of the kernel's launches: each test must have some."""
    grids: list[int] = []
    kernel = launch.hopper_prefill.hopper_prefill

    class Spy:
        def __getitem__(self, grid: tuple[int]) -> Any:
            grids.append(grid[0])
            return kernel[grid]

    monkeypatch.setattr(launch.hopper_prefill, "hopper_prefill", Spy())
    return grids


def _check(
    shape: AttentionShape,
    contexts: list[Context],
    seed: int,
    launched: list[int],
    dtype: torch.dtype = BF16,
    *,
    quantized: bool = False,
    **kw: Any,
) -> None:
    case = PagedCase(shape, contexts, dtype=dtype, device="cuda", seed=seed, quantized=quantized)
    backend = device_backend(shape, None, dtype, quantized=quantized, **kw)
    out = case.run(backend)
    assert launched
    error, own = errors_beside_torch(case, out)
    assert error <= 2 * own
    assert torch.equal(out, case.run(backend))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("cached", [0, 1, 63, 64, 65, 127, 128, 700])
def test_edges(cached: int, quantized: bool, seed: int, launched: list[int]) -> None:
    contexts = [Context(cached, new) for new in EDGES if new > 8]
    _check(LLAMA, contexts, seed, launched, quantized=quantized)


@pytest.mark.parametrize("quantized", [False, True])
def test_more_tiles_than_programs(quantized: bool, seed: int, launched: list[int]) -> None:
    """Each program has several, of different lengths."""
    contexts = [Context(at * 37, 100 + at * 61) for at in range(20)]
    _check(LLAMA, contexts, seed, launched, quantized=quantized)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert launched == [num_sms, num_sms]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        (2, 2, 128, 64, BF16),
        (16, 1, 128, 64, BF16),
        (14, 2, 64, 64, BF16),
        (32, 8, 128, 128, BF16),
        (32, 8, 64, 256, FP16),
        (32, 8, 128, 64, FP16),
    ],
)
@pytest.mark.parametrize("quantized", [False, True])
def test_shapes(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    quantized: bool,
    seed: int,
    launched: list[int],
) -> None:
    shape = AttentionShape(heads, kv_heads, head_dim, block_size)
    contexts = [Context(300, 500), Context(0, 70), Context(129, 66), Context(1000)]
    _check(shape, contexts, seed, launched, dtype, quantized=quantized)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("parts", [2, 3, 7, 21])
def test_parts_of_keys(parts: int, quantized: bool, seed: int, launched: list[int]) -> None:
    """Parts that begin and end at multiples of 64, and of which some tokens see nothing."""
    cuts = TileCuts((parts,), least=64, start=0, merge=0, rounds=100)
    for contexts in ([Context(2500, 130)], [Context(1930, 66), Context(64, 65)]):
        _check(LLAMA, contexts, seed, launched, quantized=quantized, tile_cuts=cuts)


@pytest.mark.parametrize("quantized", [False, True])
def test_last_tiles_in_parts(quantized: bool, seed: int, launched: list[int]) -> None:
    """35 tiles: two rounds of programs and some more, whose keys are cut."""
    contexts = [Context(3000, 1100)]
    case = PagedCase(LLAMA, contexts, dtype=BF16, device="cpu", seed=seed)
    assert len(device_backend(LLAMA).lay_out(case.rows).lists[None].merges) > 0
    _check(LLAMA, contexts, seed, launched, quantized=quantized)


def test_large_scores(seed: int, launched: list[int]) -> None:
    """Rows of which one key has all the weight, and products that the format can just hold."""
    case = PagedCase(LLAMA, [Context(500, 200)], dtype=BF16, device="cuda", seed=seed)
    case.query *= 1000
    backend = TritonAttention(LLAMA, windows=[None], device=torch.device("cuda"), dtype=BF16)
    out = case.run(backend)
    assert launched
    assert relative_error(out, case.expected()) < 2e-2


def test_a_row_that_is_not_finite_stays_alone(seed: int, launched: list[int]) -> None:
    case = PagedCase(LLAMA, [Context(100, 90), Context(200, 150)], dtype=BF16, device="cuda")
    backend = TritonAttention(LLAMA, windows=[None], device=torch.device("cuda"), dtype=BF16)
    clean = case.run(backend)
    case.value[:90] = float("nan")
    out = case.run(backend)
    assert launched
    assert out[:90].isnan().all()
    assert torch.equal(out[90:], clean[90:])
