"""Microbenchmarks of the kernels on a GPU: `parrot-gateway bench studies kernels`.

The attention shape is that of Llama-3.1-8B in bf16. Several layers' caches are used in turn, so
that none is found in the L2 cache. Every line gives its share of the device's measured limit.
`--sweep` times other tile sizes too; that is how the table in `kernels/launch.py` was found.
"""

from __future__ import annotations

import argparse
import itertools
import random
from typing import Any, NamedTuple

import torch
from parrot_engine.attention import launch, storage
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.policy import Cuts
from parrot_engine.attention.triton_backend import DEFAULT_CUTS, TritonAttention
from parrot_engine.batch import BatchRow
from parrot_engine.kernels import rowwise
from torch import Tensor

from parrot_bench.engine.device import Limits, measure_limits, time_s
from parrot_bench.engine.studies.harness import emit

LLAMA_8B = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16)
_DTYPE = torch.bfloat16
#: Decodes, keys of each, of them common: where cuts matter.
_CUT_CASES = (
    (1, 576, 0),
    (1, 4096, 0),
    (1, 32768, 0),
    (4, 576, 0),
    (8, 576, 0),
    (8, 4096, 0),
    (64, 576, 0),
    (64, 6400, 6144),
)


class Load(NamedTuple):
    """A batch and its least cost in a layer."""

    name: str
    rows: list[BatchRow]
    #: Bytes of keys and values, each read once.
    bytes_moved: int
    flops: int


def decode_load(
    batch: int, context: int, shape: AttentionShape, *, shared: int = 0, quantized: bool = False
) -> Load:
    """`batch` decodes of `context` keys, the first `shared` of them common to all."""
    size = shape.block_size
    num_blocks = shared // size + batch * -(-(context - shared) // size)
    free = list(range(num_blocks))
    random.Random(0).shuffle(free)
    prefix = [free.pop() for _ in range(shared // size)]
    rows = []
    for _ in range(batch):
        own = [free.pop() for _ in range(-(-(context - shared) // size))]
        rows.append(BatchRow([0], context - 1, prefix + own))
    tokens = shared + batch * (context - shared)
    bytes_moved = tokens * _token_bytes(shape, quantized=quantized)
    flops = 4 * batch * context * shape.num_heads * shape.head_dim
    name = f"decode {batch} x {context}" + (f", {shared} shared" if shared else "")
    return Load(name, rows, bytes_moved, flops)


def prefill_load(new: int, cached: int, shape: AttentionShape, *, quantized: bool = False) -> Load:
    """A row of `new` tokens behind `cached` ones."""
    blocks = list(range(-(-(new + cached) // shape.block_size)))
    random.Random(0).shuffle(blocks)
    pairs = new * cached + new * (new + 1) // 2
    return Load(
        f"prefill {new} behind {cached}",
        [BatchRow([0] * new, cached, blocks)],
        (new + cached) * _token_bytes(shape, quantized=quantized),
        4 * pairs * shape.num_heads * shape.head_dim,
    )


def _token_bytes(shape: AttentionShape, *, quantized: bool) -> int:
    return storage.token_bytes(shape.num_kv_heads, shape.head_dim, _DTYPE, quantized=quantized)


def make_cache(
    layers: int, num_blocks: int, shape: AttentionShape, *, quantized: bool = False
) -> Tensor:
    """Caches of some layers, filled with normal numbers."""
    heads = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    if not quantized:
        return torch.empty((layers, 2, *heads), device="cuda", dtype=_DTYPE).normal_()
    rows = storage.tile_rows(shape.block_size, shape.head_dim, quantized=True)
    tiles = torch.zeros((*heads[:2], rows, heads[3]), device="cuda", dtype=torch.uint8)
    bits, scales = storage.quantize(torch.randn(heads, device="cuda"))
    tiles[:, :, : heads[2]] = bits
    tiles.view(torch.float32).flatten(2)[:, :, bits[0, 0].numel() // 4 :][..., : heads[2]] = scales
    return tiles.expand(layers, 2, *tiles.shape).contiguous()


def _backend(shape: AttentionShape, *, quantized: bool = False, **settings: Any) -> TritonAttention:
    return TritonAttention(
        shape,
        windows=[None],
        device=torch.device("cuda"),
        dtype=_DTYPE,
        quantized=quantized,
        **settings,
    )


def time_attention(
    load: Load, shape: AttentionShape, *, layers: int = 4, quantized: bool = False, **settings: Any
) -> float:
    """Seconds of one layer's `forward` (writing the new keys included)."""
    backend = _backend(shape, quantized=quantized, **settings)
    num_blocks = 1 + max(max(row.block_table) for row in load.rows)
    cache = make_cache(layers, num_blocks, shape, quantized=quantized)
    count = sum(len(row.token_ids) for row in load.rows)

    def heads(number: int) -> Tensor:
        return torch.randn(count, number, shape.head_dim, device="cuda", dtype=_DTYPE)

    query, key, value = heads(shape.num_heads), heads(shape.num_kv_heads), heads(shape.num_kv_heads)
    plan = backend.plan(load.rows)
    scale = shape.head_dim**-0.5

    def work() -> None:
        for layer_kv in cache.unbind(0):
            backend.forward(query, key, value, layer_kv, plan, window=None, scale=scale)

    return time_s(work) / layers


def report(load: Load, seconds: float, limits: Limits, **more: Any) -> dict[str, Any]:
    """Print and return one result."""
    entry = {
        "case": load.name,
        "us": round(seconds * 1e6, 1),
        "tb_per_s": round(load.bytes_moved / seconds / 1e12, 2),
        "of_copy": round(load.bytes_moved / seconds / limits.bytes_per_s, 3),
        "tflops": round(load.flops / seconds / 1e12, 1),
        "of_matmul": round(load.flops / seconds / limits.flops_per_s, 3),
        **more,
    }
    emit(entry)
    return entry


def attention_cases(limits: Limits, block_size: int, *, quantized: bool = False) -> None:
    """Plain decode, prefill, and shared prefixes with and without sharing."""
    shape = LLAMA_8B._replace(block_size=block_size)
    labels: dict[str, Any] = {"block": block_size, "kv": "fp8_e4m3" if quantized else "bf16"}
    for batch, context in ((1, 512), (1, 4096), (1, 32768), (8, 512), (8, 4096), (64, 512)):
        load = decode_load(batch, context, shape, quantized=quantized)
        seconds = time_attention(load, shape, quantized=quantized)
        report(load, seconds, limits, **labels)
    for batch, context in ((64, 4096), (256, 512)):
        load = decode_load(batch, context, shape, quantized=quantized)
        seconds = time_attention(load, shape, quantized=quantized)
        report(load, seconds, limits, **labels)
    for new, cached in ((8192, 0), (2048, 0), (2048, 6144), (256, 6144), (64, 6144)):
        load = prefill_load(new, cached, shape, quantized=quantized)
        seconds = time_attention(load, shape, quantized=quantized)
        report(load, seconds, limits, **labels)
    for batch, shared, own in (
        (64, 6144, 256),
        (64, 5104, 256),
        (64, 2048, 256),
        (64, 1024, 256),
        (32, 6144, 256),
        (32, 2048, 256),
        (16, 6144, 256),
        (16, 1024, 256),
        (4, 6144, 256),
    ):
        shared -= shared % block_size
        load = decode_load(batch, shared + own, shape, shared=shared, quantized=quantized)
        alone = time_attention(load, shape, quantized=quantized, share_prefixes=False)
        for name, wide_min_bytes in (("wide", 0), ("rule", 40_000_000), ("narrow", 10**12)):
            seconds = time_attention(
                load, shape, quantized=quantized, wide_min_bytes=wide_min_bytes
            )
            gain = round(alone / seconds, 2)
            report(load, seconds, limits, **labels, items=name, gain=gain)


def rowwise_cases(limits: Limits) -> None:
    """The kernels over rows, as shares of copy bandwidth."""
    for rows in (64, 8192):
        _rowwise_cases(limits, rows)


def _rowwise_cases(limits: Limits, rows: int) -> None:
    x = torch.randn(rows, 4096, device="cuda", dtype=_DTYPE)
    weight = torch.randn(4096, device="cuda", dtype=_DTYPE)
    gate_up = torch.randn(rows, 2 * 14336, device="cuda", dtype=_DTYPE)
    qkv = torch.randn(rows, 6144, device="cuda", dtype=_DTYPE)
    angles = torch.rand(rows, 64, device="cuda").to(_DTYPE)
    slots = torch.randperm(rows, device="cuda", dtype=torch.int32)
    cache = torch.empty(2, -(-rows // 16), 8, 16, 128, device="cuda", dtype=_DTYPE)
    view = launch.cache_view(cache)

    def rotate() -> None:
        launch.run_rotate_and_write(qkv, angles, angles, None, slots, view, shape=LLAMA_8B)

    cases: list[tuple[str, int, Any]] = [
        ("add_rms_norm", 4 * x.nbytes, lambda: rowwise.add_rms_norm(x, x, weight, 1e-5)),
        ("swiglu", gate_up.nbytes * 3 // 2, lambda: rowwise.swiglu(gate_up)),
        ("rotate_and_write", 2 * qkv.nbytes, rotate),
    ]
    for name, moved, work in cases:
        report(Load(f"{name}, {rows} rows", [], moved, 0), time_s(work, calls=10), limits)


def sweep(limits: Limits, block_size: int) -> None:
    """Other tile sizes for the three classes."""
    shape = LLAMA_8B._replace(block_size=block_size)
    standard = launch.tunings(shape, _DTYPE, launch.device_limits(torch.device("cuda")))
    # A tile must lie within a block for the copy engine.
    ways = (False, True) if block_size % 64 == 0 else (False,)
    decode = decode_load(64, 4096, shape)
    small = decode_load(1, 4096, shape)
    for way, warps, stages, programs in itertools.product(ways, (4, 8), (3, 5, 7), (2, 4, 6)):
        tuning = launch.Tuning(16, 64, warps, stages, programs, way)
        _try("narrow", decode, shape, limits, standard._replace(narrow=tuning), tuning)
        if programs == 4:
            _try("narrow", small, shape, limits, standard._replace(narrow=tuning), tuning)
    prefill = prefill_load(8192, 0, shape)
    for way, block_m, block_n, warps, stages in itertools.product(
        ways, (64, 128), (64, 128), (4, 8), (2, 3, 5)
    ):
        if block_n == 128 and (stages == 5 or way):
            continue
        tuning = launch.Tuning(block_m, block_n, warps, stages, 1, way)
        _try("prefill", prefill, shape, limits, standard._replace(prefill=tuning), tuning)
    shared = decode_load(64, 6400, shape, shared=6144)
    for way, block_m, stages, programs in itertools.product(ways, (64, 128), (3, 5), (1, 2, 3)):
        tuning = launch.Tuning(block_m, 64, block_m // 16, stages, programs, way)
        _try("wide", shared, shape, limits, standard._replace(wide=tuning), tuning)
    for batch, context, common in _CUT_CASES:
        load = decode_load(batch, context, shape, shared=common)
        for cuts in (DEFAULT_CUTS, *map(Cuts, (64, 128, 192, 256, 384, 512, 768, 1024, 2048))):
            seconds = time_attention(load, shape, layers=2, cuts=cuts)
            report(load, seconds, limits, block=block_size, cuts=tuple(cuts))


def _try(
    kind: str,
    load: Load,
    shape: AttentionShape,
    limits: Limits,
    tunings: launch.Tunings,
    tuning: launch.Tuning,
) -> None:
    try:
        seconds = time_attention(load, shape, layers=2, tunings=tunings)
    except Exception as error:
        print(kind, tuple(tuning), type(error).__name__, flush=True)
        return
    report(load, seconds, limits, kind=kind, tuning=tuple(tuning), block=shape.block_size)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `harness.Study`."""
    parser.add_argument("--sweep", action="store_true", help="other tile sizes too")
    parser.add_argument("--block-sizes", type=int, nargs="*", default=[16, 64])
    parser.add_argument(
        "--kv-cache-dtype", choices=["auto", "fp8_e4m3"], default="auto", help="auto: bf16"
    )


def run(options: argparse.Namespace) -> None:
    """See `harness.Study`."""
    quantized = options.kv_cache_dtype != "auto"
    limits = measure_limits()
    emit(limits._asdict())
    rowwise_cases(limits)
    for block_size in options.block_sizes:
        attention_cases(limits, block_size, quantized=quantized)
    if options.sweep:
        for block_size in options.block_sizes:
            sweep(limits, block_size)
