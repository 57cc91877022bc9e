"""A cache of float8 on a GPU: kernels against float64, the engine with graphs, the host tier.

Needs torch, triton and pytest alone. The reference reads what the cache holds, so that bounds are
those of a cache that is not rounded.
"""

from __future__ import annotations

import json
from pathlib import Path
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
from harness.engine.device_attention import BF16, BOUNDS, FP16, FP32, device_backend
from harness.engine.dummy_engine import dummy_engine
from harness.engine_checks import greedy, run_until_idle, tokens_of
from parrot_engine.attention import launch, storage
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.policy import Cuts
from parrot_engine.attention.triton_backend import TritonAttention
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.kernels.selection import MIN_FP8_CAPABILITY
from parrot_engine.kv_cache.host_copies import make_copies
from parrot_engine.protocol import Fill, FreeContext, Generate
from parrot_engine.runner.model_runner import ModelRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poison"),
    pytest.mark.skipif(
        torch.cuda.get_device_capability() < MIN_FP8_CAPABILITY, reason="needs float8 conversions"
    ),
]

LLAMA = AttentionShape(32, 8, 128, 64)
#: Rounding the result to bfloat16 takes 1.7e-3, and weights in float16 add next to nothing.
SHARED_BOUND = 2.2e-3


@pytest.fixture(params=[0])
def seed(request: pytest.FixtureRequest) -> int:
    """The same numbers each time, so that a failure can be looked at."""
    return int(request.param)


def _check(outs: list[torch.Tensor], expected: torch.Tensor, bound: float) -> None:
    """All of `outs`, results of the same work, have the same bits and are right.

    What is wrong is named: tokens, heads and their errors.
    """
    heads = expected.view(len(expected), -1, LLAMA.head_dim)
    wrong = []
    for number, out in enumerate(outs):
        difference = (out.double().view_as(heads) - heads).norm(dim=2) / heads.norm(dim=2)
        worst = difference.nan_to_num(float("inf")).flatten().topk(8)
        places = [(int(place) // heads.shape[1], int(place) % heads.shape[1]) for place in worst[1]]
        error = relative_error(out, expected)
        print(f"error {error:.2e}")
        if error >= bound or not torch.equal(out, outs[0]):
            wrong.append((number, error, list(zip(places, worst[0].tolist(), strict=True))))
    assert not wrong


def _backend(
    shape: AttentionShape, dtype: torch.dtype = BF16, window: int | None = None, **kw: Any
) -> TritonAttention:
    return device_backend(shape, window, dtype, quantized=True, **kw)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype", "window"),
    [
        # Through the copy engine where there is one, then through pointers.
        (128, 64, BF16, None),
        (128, 16, BF16, None),
        (96, 16, FP16, None),
        (64, 64, FP32, None),
        (128, 64, BF16, 700),
    ],
)
def test_attention(
    head_dim: int, block_size: int, dtype: torch.dtype, window: int | None, seed: int
) -> None:
    shape = AttentionShape(16, 4, head_dim, block_size)
    contexts = mixed_contexts(block_size, 512)
    case = PagedCase(shape, contexts, dtype=dtype, device="cuda", seed=seed, quantized=True)
    error = relative_error(case.run(_backend(shape, dtype, window), window), case.expected(window))
    print(f"error {error:.2e}")
    assert error < BOUNDS[dtype]
    case.quantized = False
    assert relative_error(
        case.expected(window), case.run(_backend(shape, dtype, window), window)
    ) > (1e-2), "control: keys and values as they were"


@pytest.mark.parametrize("wide_min_bytes", [0, 10**12])
@pytest.mark.parametrize("seed", range(8), indirect=True)
def test_shared_prefixes(wide_min_bytes: int, seed: int) -> None:
    """Over several seeds and often: an error of 6.4e-3 was seen once, and not explained."""
    case = PagedCase(
        LLAMA, shared_contexts(64, 512), dtype=BF16, device="cuda", seed=seed, quantized=True
    )
    backend = _backend(LLAMA, wide_min_bytes=wide_min_bytes)
    assert bool(len(backend.plan(case.rows).work[None].wide)) == (wide_min_bytes == 0)
    _check([case.run(backend) for _ in range(4)], case.expected(), SHARED_BOUND)


def test_small_values_in_float16(seed: int) -> None:
    """Scales so small that float16 has no digits left for them."""
    shape = AttentionShape(16, 4, 128, 64)
    case = PagedCase(
        shape, [Context(700), Context(0, 90)], dtype=FP16, device="cuda", seed=seed, quantized=True
    )
    plain = case.run(_backend(shape, FP16))
    scales = case.layer_kv[1].view(FP32).flatten(2)[..., 64 * 128 // 4 :]
    scales *= 2.0**-9
    case.value = (case.value.float() * 2.0**-9).half()
    small = case.run(_backend(shape, FP16))
    assert relative_error(small.float() * 2**9, plain) < 5e-3


def test_sharing_changes_no_bit(seed: int) -> None:
    case = PagedCase(
        LLAMA, shared_contexts(64, 512), dtype=BF16, device="cuda", seed=seed, quantized=True
    )
    # Where keys are cut the same for all steps.
    shared = case.run(_backend(LLAMA, wide_min_bytes=10**12, cuts=Cuts(512)))
    assert torch.equal(shared, case.run(_backend(LLAMA, share_prefixes=False, cuts=Cuts(512))))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_what_is_written_is_what_torch_writes(dtype: torch.dtype) -> None:
    shape = AttentionShape(3, 2, 64, 8)
    size = torch.logspace(-12, 12, 40, device="cuda")[:, None, None]
    heads = (torch.randn(40, 7, 64, device="cuda") * size).to(dtype)
    heads[3, 4] = 0
    rows = storage.tile_rows(8, 64, quantized=True)
    cache = torch.full((2, 6, 2, rows, 64), 255, dtype=torch.uint8, device="cuda")
    slots = torch.randperm(48, device="cuda")[:40].int()
    slots[::7] = -1
    written = slots >= 0
    places = slots.long()[written, None] // 8 * 2 + torch.arange(2, device="cuda")
    places = places * rows + slots[written, None] % 8
    expected = cache.clone()
    query, key, value = heads.split((3, 2, 2), dim=1)
    for part, new in zip(expected, (key, value), strict=True):
        stored, scales = storage.quantize(new[written])
        part_rows = places.reshape(-1)
        storage.write_quantized(part, part_rows, stored.flatten(0, 1), scales.reshape(-1))
    angles = (
        torch.ones(40, 32, dtype=dtype, device="cuda"),
        torch.zeros(40, 32, dtype=dtype, device="cuda"),
    )
    fused, plain = cache.clone(), cache.clone()
    out = launch.run_rotate_and_write(
        heads.view(40, -1), *angles, None, slots, launch.cache_view(fused), shape=shape
    )
    assert torch.equal(out, query)
    launch.run_write_kv(key, value, slots, launch.cache_view(plain), shape=shape)
    for found in (fused, plain):
        # -0 and 0 are the same to who reads them.
        differ = (found != expected) & ~((found | expected) == 128)
        assert not bool(differ.any())


def test_what_is_not_finite_fails_its_row_alone(seed: int) -> None:
    contexts = [Context(700), Context(64), Context(5), Context(0, 80)]
    case = PagedCase(LLAMA, contexts, dtype=BF16, device="cuda", seed=seed, quantized=True)
    sound = case.run(_backend(LLAMA))
    for sick in (float("nan"), float("inf")):
        case.value[1, 0, 7] = sick
        out = case.run(_backend(LLAMA))
        assert bool(out[1].isnan().any())
        others = [token for token in range(len(out)) if token != 1]
        assert torch.equal(out[others], sound[others])


# -- the engine


def _engine(folder: Path, **values: Any) -> BuiltinEngine:
    defaults = {
        "dtype": "bfloat16",
        "num_blocks": 200,
        "kv_cache_dtype": "fp8_e4m3",
        "cuda_graphs": "lazy",
    }
    return dummy_engine(folder, **{**defaults, **values})


def _prompt(number: int, length: int) -> list[int]:
    return [(7 * number + 3 * position) % 1000 + 5 for position in range(length)]


def _said(engine: BuiltinEngine, rounds: int = 1) -> list[list[int]]:
    """Return what twelve contexts generate, four at a time, several with a common beginning."""
    said = []
    for first in [*range(0, 12, 4)] * rounds:
        ids = range(first, first + 4)
        work: list[Any] = []
        for number in ids:
            work += [
                Fill(number, _prompt(number // 2, 150 + 40 * number)),
                Generate(number, greedy(16)),
            ]
        events = run_until_idle(engine, *work)
        said += [tokens_of(events, number) for number in ids]
        run_until_idle(engine, *(FreeContext(number) for number in ids))
        engine.check_integrity()
    assert all(len(tokens) == 16 for tokens in said)
    return said


def test_the_engine_says_the_same_with_graphs_and_without(tmp_path: Path) -> None:
    said = {}
    for graphs in ("off", "lazy"):
        for overlap in ("off", "on"):
            engine = _engine(tmp_path, dtype="float32", cuda_graphs=graphs, overlap=overlap)
            said[graphs, overlap] = _said(engine)
            engine.close()
    assert len({json.dumps(tokens) for tokens in said.values()}) == 1


def test_drafts_change_nothing(tmp_path: Path) -> None:
    said = []
    for count in (0, 4):
        engine = _engine(
            tmp_path, dtype="float32", speculative_tokens=count, speculative_min_ngram=1
        )
        said.append(_said(engine))
        assert (engine.stats().proposed_tokens > 0) == (count > 0)
        engine.close()
    assert said[0] == said[1]


def test_blocks_come_back_from_the_host(tmp_path: Path) -> None:
    whole = _engine(tmp_path, num_blocks=400, dtype="float32")
    expected = _said(whole, rounds=2)
    whole.close()
    engine = _engine(tmp_path, num_blocks=28, host_blocks=300, host_min_tokens=1, dtype="float32")
    assert _said(engine, rounds=2) == expected
    assert engine.stats().blocks_from_host > 0
    engine.close()


def test_the_host_tier_keeps_all_bits(tmp_path: Path) -> None:
    engine = _engine(tmp_path, num_blocks=32)
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    assert runner.kv_cache.dtype is torch.uint8
    runner.kv_cache.random_(0, 256)
    before = runner.kv_cache.clone()
    torch.cuda.synchronize()
    copies = make_copies(runner.kv_cache, 4)
    out = copies.store([3, 7, 4], [1, 2, 0])
    torch.cuda.synchronize()
    runner.kv_cache[:, :, [3, 7, 4]] = 0
    copies.load([1, 2, 0], [9, 10, 4], after=0, behind=[out])
    torch.cuda.synchronize()
    assert torch.equal(runner.kv_cache[:, :, [9, 10, 4]], before[:, :, [3, 7, 4]])
    copies.close()
    engine.close()


def test_the_cache_holds_nearly_twice_as_much(tmp_path: Path) -> None:
    blocks = []
    for kind in ("auto", "fp8_e4m3"):
        engine = _engine(tmp_path, num_blocks=None, kv_cache_bytes=50_000_000, kv_cache_dtype=kind)
        blocks.append(engine.info.num_blocks)
        engine.close()
    # Heads of 64 in blocks of 64: four rows of scales.
    assert blocks[1] / blocks[0] == pytest.approx(2 * 64 / 68, rel=1e-2)
