"""Attention kernels on the device against float64, over heads, dtypes, windows and lengths.

An error may be at most twice that of torch's own attention in the same dtype on the same inputs,
and 5e-3 in any case.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.engine.attention_cases import (
    Context,
    PagedCase,
    mixed_contexts,
    relative_error,
    shared_contexts,
)
from harness.engine.device_attention import (
    BF16,
    BOUNDS,
    FP16,
    FP32,
    device_backend,
    device_case,
    errors_beside_torch,
)
from parrot_engine.attention import host_plan, launch, work_list
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.policy import Cuts
from parrot_engine.attention.triton_backend import TritonAttention
from parrot_engine.kernels.attention.hopper_prefill import hopper_prefill
from parrot_engine.kernels.attention.prefill_attention import prefill_attention
from parrot_engine.kernels.attention.split_attention import merge_splits, split_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]

LLAMA = AttentionShape(32, 8, 128, 16)


def _check(case: PagedCase, backend: TritonAttention, window: int | None = None) -> None:
    error, own = errors_beside_torch(case, case.run(backend, window), window)
    # In float32 both are all but exact, and which one more so is chance.
    assert error <= (1e-6 if case.query.dtype == FP32 else 2 * own)


# Nearly all of these tests' time goes to compiling: a few of the combinations, each for a reason.
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, BF16), (96, FP16), (128, BF16), (256, BF16), (256, FP32)]
)
def test_head_dims_and_dtypes(head_dim: int, dtype: torch.dtype, seed: int) -> None:
    shape = AttentionShape(8, 2, head_dim, 16)
    case = device_case(shape, mixed_contexts(16, 512), seed, dtype)
    _check(case, device_backend(shape, dtype=dtype))


@pytest.mark.parametrize("group", [1, 3, 7])
def test_query_heads_of_a_group(group: int, seed: int) -> None:
    shape = AttentionShape(2 * group, 2, 64, 16)
    _check(device_case(shape, mixed_contexts(16, 512), seed), device_backend(shape))


@pytest.mark.parametrize(
    "lengths", [[0], [575], [576, 63], [511, 512, 767, 768], [4095], [20_000], [1000] * 7]
)
def test_few_rows(lengths: list[int], seed: int) -> None:
    """Their keys are cut finer, or not at all."""
    shape = LLAMA._replace(block_size=64)
    _check(device_case(shape, [Context(length) for length in lengths], seed), device_backend(shape))


@pytest.mark.parametrize("window", [1, 500, 1100])
def test_windows(window: int, seed: int) -> None:
    case = device_case(LLAMA, mixed_contexts(16, 512), seed)
    _check(case, device_backend(LLAMA, window), window)


@pytest.mark.parametrize("block_size", [32, 48])
def test_block_sizes(block_size: int, seed: int) -> None:
    shape = LLAMA._replace(block_size=block_size)
    backend = device_backend(shape)
    case = device_case(shape, mixed_contexts(block_size, backend._policy.cuts.chunk), seed)
    _check(case, backend)


@pytest.mark.parametrize(
    ("dtype", "wide_min_bytes", "window"),
    [(BF16, 0, None), (BF16, 10**12, None), (BF16, 0, 700), (FP32, 0, None)],
)
def test_shared_prefixes(
    dtype: torch.dtype, wide_min_bytes: int, window: int | None, seed: int
) -> None:
    shape = AttentionShape(16, 2, 128, 16)
    case = device_case(shape, shared_contexts(16, 512), seed, dtype)
    backend = device_backend(shape, window, dtype, wide_min_bytes=wide_min_bytes)
    if window is None:
        assert bool(len(backend.plan(case.rows).work[None].wide)) == (wide_min_bytes == 0)
    _check(case, backend, window)


@pytest.mark.parametrize("contexts", [mixed_contexts, shared_contexts])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_whole_tiles_of_keys(head_dim: int, contexts: Any, seed: int) -> None:
    """On GPUs from Hopper on these come through the copy engine."""
    shape = AttentionShape(32, 8, head_dim, 64)
    case = device_case(shape, contexts(64, 512), seed)
    _check(case, device_backend(shape, wide_min_bytes=0))


@pytest.mark.parametrize("shared", [2048, 6144, 5632])
def test_many_sharers_fill_several_wide_tiles(shared: int, seed: int) -> None:
    """With 6,144 an item spans two chunks, with 5,632 the last one does not."""
    contexts = [Context(shared)] + [Context(shared + own, 1, 0, shared) for own in range(1, 100)]
    backend = device_backend(LLAMA, wide_min_bytes=0)
    _check(device_case(LLAMA, contexts, seed), backend)


def test_short_rows_behind_a_long_context_are_split(seed: int) -> None:
    contexts = [Context(4000, 64), Context(3000, 33), Context(2500, 9), Context(2049, 5)]
    case = device_case(LLAMA, contexts, seed)
    backend = device_backend(LLAMA)
    assert not len(backend.plan(case.rows).work[None].tiles)
    _check(case, backend)


def test_long_contexts(seed: int) -> None:
    contexts = [Context(20_000), Context(9_000, 300), Context(0, 2_500), Context(511)]
    _check(device_case(LLAMA, contexts, seed), device_backend(LLAMA))


def test_sharing_changes_no_bit_among_narrow_items(seed: int) -> None:
    case = device_case(LLAMA, shared_contexts(16, 512), seed)
    shared = case.run(device_backend(LLAMA, wide_min_bytes=10**12, cuts=Cuts(512)))
    alone = case.run(device_backend(LLAMA, share_prefixes=False, cuts=Cuts(512)))
    assert torch.equal(shared, alone)


def test_a_row_gets_the_same_bits_alone(seed: int) -> None:
    """Where keys are cut the same for all steps."""
    contexts = mixed_contexts(16, 512)
    case = device_case(LLAMA, contexts, seed)
    backend = device_backend(LLAMA, cuts=Cuts(512))
    together = case.run(backend)
    rows, query, key, value = case.rows, case.query, case.key, case.value
    token = 0
    for index, context in enumerate(contexts):
        span = slice(token, token + context.new)
        case.rows = rows[index : index + 1]
        case.query, case.key, case.value = query[span], key[span], value[span]
        assert torch.equal(case.run(backend), together[span])
        token += context.new


def test_the_same_twice(seed: int) -> None:
    case = device_case(LLAMA, shared_contexts(16, 512), seed)
    backend = device_backend(LLAMA, wide_min_bytes=0)
    first = case.run(backend)
    assert all(torch.equal(case.run(backend), first) for _ in range(5))


def test_offsets_beyond_32_bits(seed: int) -> None:
    """Blocks at the end of a cache of more than 2^31 elements a layer."""
    case = device_case(LLAMA, [Context(700), Context(100, 40), Context(530, 3)], seed)
    small = case.layer_kv
    blocks = 2**31 // (8 * 16 * 128) + small.shape[1]
    offset = blocks - small.shape[1]
    big = torch.empty((2, blocks, 8, 16, 128), dtype=BF16, device="cuda")
    big[:, offset:] = small
    for row in case.rows:
        row.block_table[:] = [block + offset for block in row.block_table]
    backend = device_backend(LLAMA)
    out = backend.forward(
        case.query, case.key, case.value, big, backend.plan(case.rows), window=None, scale=0.2
    )
    assert relative_error(out, case.expected()) < BOUNDS[BF16]


def test_lengths_compile_nothing_new(seed: int) -> None:
    """Triton would compile again for a length of 1, or one that 16 divides, if it could see it."""
    backend = device_backend(LLAMA, wide_min_bytes=0)
    kernels = (split_attention, merge_splits, prefill_attention, hopper_prefill)

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    device_case(LLAMA, mixed_contexts(16, 512) + shared_contexts(16, 512)[:1], seed).run(backend)
    device_case(LLAMA, shared_contexts(16, 512), seed).run(backend)
    # Few rows over many splits are merged by another variant.
    device_case(LLAMA, [Context(3000), Context(2)], seed).run(backend)
    before = compiled()
    for contexts in (
        [Context(0)],
        [Context(0, 16)],
        [Context(1600), Context(1)],
        [Context(31, 17), Context(16), Context(4096)],
        [Context(1024), *(Context(1024 + own, 1, 0, 1024) for own in range(1, 30))],
    ):
        device_case(LLAMA, contexts, seed).run(backend)
    assert compiled() == before


# -- controls: the comparisons above must notice these


def test_control_natural_log_sum_exp(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    run_merge = launch.run_merge

    def natural(call: launch.AttentionCall, *args: Any, **kw: Any) -> None:
        partials = call.partials._replace(lse2=call.partials.lse2 * 0.6931471805599453)
        run_merge(call._replace(partials=partials), *args, **kw)

    monkeypatch.setattr(launch, "run_merge", natural)
    with pytest.raises(AssertionError):
        _check(device_case(LLAMA, mixed_contexts(16, 512), seed), device_backend(LLAMA))


def test_control_mask_off_by_one(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    def shifted(*args: Any, **kw: Any) -> work_list.WorkList:
        work = work_list.build(*args, **kw)
        return work._replace(member_positions=work.member_positions - 1)

    monkeypatch.setattr(host_plan, "build_decodes", shifted)
    with pytest.raises(AssertionError):
        _check(device_case(LLAMA, mixed_contexts(16, 512), seed), device_backend(LLAMA))
