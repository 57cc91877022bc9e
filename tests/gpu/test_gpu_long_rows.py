"""Prefill tiles whose keys are cut, on the device against float64.

An error may be at most twice that of torch's own attention in the same dtype on the same inputs,
and 5e-3 in any case.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.engine.attention_cases import SCALE, Context, PagedCase, relative_error
from harness.engine.device_attention import (
    BF16,
    BOUNDS,
    FP16,
    FP32,
    device_backend,
    device_case,
    errors_beside_torch,
)
from parrot_engine.attention import launch
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.policy import MAX_SLOTS, TileCuts
from parrot_engine.attention.triton_backend import Parts, TritonAttention
from parrot_engine.kernels.attention.hopper_prefill import hopper_prefill
from parrot_engine.kernels.attention.prefill_attention import prefill_attention
from parrot_engine.kernels.attention.split_attention import merge_splits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]

LLAMA = AttentionShape(32, 8, 128, 64)
WHOLE = TileCuts((1,), least=10**9, start=0, merge=0)
#: Decodes of a family, strangers, a short prompt, and two rows behind the family's prefix.
MIXED = [
    Context(4096),
    *(Context(4096 + own, 1, 0, 4096) for own in range(1, 20)),
    Context(4096, 70, 0, 4096),
    Context(3),
    Context(4100, 66, 0, 4096),
    Context(0, 40),
    Context(3000, 9),
]


def _into(parts: int) -> TileCuts:
    return TileCuts((parts,), least=64, start=0, merge=0, rounds=100)


def _parts(backend: TritonAttention, case: PagedCase) -> int:
    """In how many parts the last row's keys are cut."""
    (work,) = backend.lay_out(case.rows).lists.values()
    tokens = work.merges[:, 0] == len(case.query) - 1
    return int(work.merges[tokens, 2].max(initial=1))


def _check(case: PagedCase, backend: TritonAttention, window: int | None = None) -> None:
    error, own = errors_beside_torch(case, case.run(backend, window), window)
    # In float32 both are all but exact, and which one more so is chance.
    assert error <= max(2 * own, 1e-6 if case.query.dtype == FP32 else 0.0)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    ("cached", "new"), [(2048, 96), (6144, 65), (6143, 66), (6145, 128), (6111, 255), (6144, 300)]
)
def test_rows_as_the_rule_cuts_them(cached: int, new: int, block_size: int, seed: int) -> None:
    shape = LLAMA._replace(block_size=block_size)
    case, backend = device_case(shape, [Context(cached, new)], seed), device_backend(shape)
    print(f"{_parts(backend, case)} parts")
    if block_size == 64:
        programs = -(-new // 32) * shape.num_kv_heads
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        assert (_parts(backend, case) > 1) == (2 * programs <= num_sms)
    _check(case, backend)


@pytest.mark.parametrize("parts", [2, 3, 7, 21])
def test_numbers_of_parts(parts: int, seed: int) -> None:
    case = device_case(LLAMA, [Context(2500, 130)], seed)
    backend = device_backend(LLAMA, tile_cuts=_into(parts))
    assert _parts(backend, case) == parts
    _check(case, backend)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        (2, 2, 128, 64, BF16),
        (16, 2, 128, 64, BF16),
        (14, 2, 64, 64, BF16),
        (8, 2, 96, 16, FP16),
        (8, 2, 256, 16, BF16),
        (8, 2, 128, 48, FP32),
    ],
)
def test_heads(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, seed: int
) -> None:
    shape = AttentionShape(heads, kv_heads, head_dim, block_size)
    case = device_case(shape, [Context(1500, 140)], seed, dtype)
    backend = device_backend(shape, dtype=dtype, tile_cuts=_into(3))
    assert _parts(backend, case) > 1
    _check(case, backend)


@pytest.mark.parametrize("window", [700, 2500])
def test_windows(window: int, seed: int) -> None:
    case = device_case(LLAMA, [Context(3000, 300)], seed)
    backend = device_backend(LLAMA, window, tile_cuts=_into(3))
    assert _parts(backend, case) == 3
    _check(case, backend, window)


@pytest.mark.parametrize("tile_cuts", [_into(2), _into(5)])
def test_in_company(tile_cuts: TileCuts, seed: int) -> None:
    """Other rows get the bits that they get where no tile is cut."""
    case = device_case(LLAMA, MIXED, seed)
    cut, whole = (device_backend(LLAMA, tile_cuts=c, wide_min_bytes=0) for c in (tile_cuts, WHOLE))
    _check(case, cut)
    decodes = slice(0, 20)
    assert torch.equal(case.run(cut)[decodes], case.run(whole)[decodes])


def test_the_same_twice(seed: int) -> None:
    case, backend = device_case(LLAMA, MIXED, seed), device_backend(LLAMA, tile_cuts=_into(4))
    first = case.run(backend)
    assert all(torch.equal(case.run(backend), first) for _ in range(5))


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_cache_of_float8(block_size: int, seed: int) -> None:
    shape = LLAMA._replace(block_size=block_size)
    case = PagedCase(
        shape, [Context(2500, 130)], dtype=BF16, device="cuda", seed=seed, quantized=True
    )
    backend = device_backend(shape, quantized=True, tile_cuts=_into(3))
    error = relative_error(case.run(backend), case.expected())
    print(f"error {error:.2e}")
    assert error < BOUNDS[BF16]


def test_a_captured_launch_serves_cut_tiles_and_whole_ones(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    # The captured launch has room for many merges. Those of a step with few add up in another
    # order, and then the last bit may differ.
    of_many = launch.merge_tuning(MAX_SLOTS)
    monkeypatch.setattr(launch, "merge_tuning", lambda _: of_many)
    backend = device_backend(LLAMA)
    device = torch.device("cuda")
    layout = backend.fixed_layout(512, 8, 8192, MAX_SLOTS, 0)
    buffer = torch.zeros(layout.size, dtype=torch.int32, device=device)
    host_buffer = buffer.cpu()
    parts = Parts(tiles=True, wide=True)
    plan = backend.fixed_plan(buffer, layout, parts, backend.partials(layout.capacity.slots))
    steps = [
        [Context(6144, 256)],
        [Context(700, 200), Context(500)],
        [Context(6144, 128), *[Context(900)] * 5],
    ]
    cases = [device_case(LLAMA, contexts, seed) for contexts in steps]
    blocks = max(case.layer_kv.shape[1] for case in cases)
    cache = torch.zeros((2, blocks, *cases[0].layer_kv.shape[2:]), dtype=BF16, device=device)
    query, key, value = (
        torch.zeros(512, heads, 128, dtype=BF16, device=device) for heads in (32, 8, 8)
    )

    def work() -> torch.Tensor:
        return backend.forward(query, key, value, cache, plan, window=None, scale=SCALE)

    layout.write_nothing(host_buffer.numpy())
    buffer.copy_(host_buffer)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    cut = []
    for case in cases:
        host = backend.lay_out(case.rows)
        assert layout.holds(*host)
        cut.append(len(host.lists[None].merges))
        layout.write(host_buffer.numpy(), host.tables, host.lists)
        buffer.copy_(host_buffer)
        count = len(case.query)
        query[:count], key[:count], value[:count] = case.query, case.key, case.value
        cache[:, : case.layer_kv.shape[1]] = case.layer_kv
        graph.replay()
        assert torch.equal(out[:count], case.run(backend))
        assert relative_error(out[:count], case.expected()) < BOUNDS[BF16]
    assert cut[0] == 256
    assert cut[2] >= 128


def test_cuts_compile_nothing_new(seed: int) -> None:
    backend = device_backend(LLAMA)
    kernels = (merge_splits, prefill_attention, hopper_prefill)

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    # Merges of few queries and of many are compiled apart.
    for contexts in ([Context(0, 100), Context(3000)], [Context(3000, 96)]):
        device_case(LLAMA, contexts, seed).run(backend)
    before = compiled()
    for cached, new in ((2048, 96), (6144, 256), (5000, 65), (16, 16)):
        device_case(LLAMA, [Context(cached, new)], seed).run(backend)
    assert compiled() == before


# -- control: the comparison above must notice this


def test_control_natural_log_sum_exp(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    run_merge = launch.run_merge

    def natural(call: launch.AttentionCall, *args: Any, **kw: Any) -> None:
        partials = call.partials._replace(lse2=call.partials.lse2 * 0.6931471805599453)
        run_merge(call._replace(partials=partials), *args, **kw)

    monkeypatch.setattr(launch, "run_merge", natural)
    with pytest.raises(AssertionError):
        _check(device_case(LLAMA, [Context(6144, 128)], seed), device_backend(LLAMA))
