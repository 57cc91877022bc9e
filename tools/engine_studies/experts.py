"""Mixtures of experts on a GPU: `python tools/engine_study.py experts`.

Three parts, in bf16 with random weights and every expert as probable as another:

- the kernels of one layer, each alone, and the share of the device's bandwidth that the two
  products reach: bytes are those of the experts met, read once;
- whole steps of the shape of Qwen3-30B-A3B up to the largest logit, replayed from a CUDA graph, and
  the time of each kind of kernel in them; `bound` reads the weights of the experts met once;
- with `--sweep` kernels and tiles for both products instead: the best of all tried.

With `--format` experts, and the other products of the steps, are codes and scales; times of tiles
then include x being put into numbers of 8 bits.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.launch import device_limits
from parrot_engine.bench.device import Bounds, Limits, Segment, measure_limits, time_s
from parrot_engine.bench.formats import FORMATS
from parrot_engine.kernels import rowwise
from parrot_engine.kernels.experts import grouped_product, packed_experts
from parrot_engine.kernels.experts.expert_routing import Chosen, Tiles, align, choose
from parrot_engine.kernels.experts.grouped_tuning import (
    ExpertWeights,
    Mixture,
    MixtureTuning,
    PackedExperts,
    mixture_tuning,
    packed_mixture_tuning,
)
from parrot_engine.kernels.matmul.quantized_tuning import fit
from parrot_engine.kernels.matmul.skinny_tuning import Product, Tuning
from parrot_engine.models.ops import Affine
from parrot_engine.models.triton_ops import TritonOps
from parrot_engine.quantization.packed import PackedWeight, above_each_other, pack_stacked
from parrot_engine.quantization.registry import METHODS
from torch import Tensor

from engine_studies.harness import emit
from engine_studies.kernels import decode_load, prefill_load
from engine_studies.steps import decoder_of, dummy_runner, time_device

#: Experts of a token, experts, row and inner row.
SHAPES = {
    "qwen3-30b-a3b": (8, 128, 2048, 768),
    "olmoe": (8, 64, 2048, 1024),
    "mixtral": (2, 8, 4096, 14_336),
}
_TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 8192)
#: Routings that are timed in turn, so that what one has read is not there for the next.
_ROUTINGS = 8
_BLOCK_SIZE = 64


class Layer(NamedTuple):
    """A mixture's weights and some inputs for them."""

    mixture: Mixture
    x: Tensor
    inner: Tensor
    parts: Tensor
    router: Tensor
    experts: ExpertWeights
    logits: list[Tensor]

    @property
    def num_pairs(self) -> int:
        return self.mixture.num_tokens * self.mixture.top_k


def draw_layer(mixture: Mixture, router: Tensor, experts: ExpertWeights) -> Layer:
    """Random inputs."""
    tokens, pairs = mixture.num_tokens, mixture.num_tokens * mixture.top_k

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=mixture.dtype)

    logits = [torch.randn(tokens, mixture.num_experts, device="cuda") for _ in range(_ROUTINGS)]
    return Layer(
        mixture,
        normal(tokens, mixture.hidden_size),
        normal(pairs, mixture.size),
        normal(pairs, mixture.hidden_size),
        router,
        experts,
        logits,
    )


def draw_weights(
    shape: tuple[int, int, int, int], form: str | None
) -> tuple[Tensor, ExpertWeights]:
    """Router and experts, the latter in a format where one is named."""
    _, experts, hidden, size = shape
    router = torch.randn(experts, hidden, device="cuda", dtype=torch.bfloat16).mul_(0.02)
    sizes = ((experts, 2 * size, hidden), (experts, hidden, size))
    if form is None:
        gate_up, down = (
            torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_(std=0.02)
            for size in sizes
        )
        return router, ExpertWeights(gate_up, down)
    gate_up, down = (torch.empty(size, device="meta", dtype=torch.bfloat16) for size in sizes)
    packed = PackedExperts(*(draw_packed(form, *size) for size in sizes))
    return router, ExpertWeights(gate_up, down, packed=packed)


def draw_packed(form: str, experts: int, rows: int, columns: int) -> PackedWeight:
    """One product of all experts."""
    quantization = METHODS[FORMATS[form]["quant_method"]](FORMATS[form])
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    drawn = (quantization.draw(rows, columns, generator) for _ in range(experts))
    parts = (pack_stacked([weight], device, quantization.activations) for weight in drawn)
    packed = above_each_other(parts, experts)
    assert packed is not None
    return packed


def in_turn(work: Callable[[int], Any]) -> float:
    """Seconds of `work` of a routing."""

    def all_of_them() -> None:
        for index in range(_ROUTINGS):
            work(index)

    seconds: float = time_s(all_of_them, repeats=10)
    return seconds / _ROUTINGS


def route(layer: Layer) -> list[Chosen]:
    """The experts of all routings."""
    return [choose(logits, layer.mixture.top_k, normalize=True) for logits in layer.logits]


def products(
    layer: Layer, chosen: list[Chosen], tiles: list[Tiles] | None
) -> tuple[Callable[[Tuning, int], Tensor], Callable[[Tuning, int], Tensor]]:
    """Both products by tuning and routing: over vectors, or over `tiles`."""
    count = layer.num_pairs
    kernels: Any = (
        grouped_product.gate_up_vectors,
        grouped_product.down_vectors,
        grouped_product.tiled,
    )
    if layer.experts.packed is not None:
        kernels = (
            packed_experts.packed_gate_up_vectors,
            packed_experts.packed_down_vectors,
            packed_experts.packed_tiled,
        )
    gate_up_vectors, down_vectors, tiled = kernels

    def gate_up(tuning: Tuning, index: int) -> Any:
        if tiles is None:
            return gate_up_vectors(layer.x, layer.experts, chosen[index], tuning)
        return tiled(layer.x, layer.experts, tiles[index], tuning, num_pairs=count)

    def down(tuning: Tuning, index: int) -> Any:
        if tiles is None:
            return down_vectors(layer.inner, layer.experts, chosen[index], tuning, layer.x)
        factors = chosen[index].factors
        return tiled(
            layer.inner, layer.experts, tiles[index], tuning, num_pairs=count, factors=factors
        )

    return gate_up, down


def bytes_met(layer: Layer, chosen: list[Chosen]) -> float:
    """Bytes of gate and up of the experts met, on average; those of down are half as many."""
    met = sum(len(one.experts.unique()) for one in chosen) / len(chosen)
    packed = layer.experts.packed
    whole: int = (
        layer.experts.gate_up.nbytes
        if packed is None
        else packed.gate_up.codes.nbytes + packed.gate_up.scales.nbytes
    )
    return met * whole / layer.mixture.num_experts


def chosen_tuning(layer: Layer) -> MixtureTuning:
    """What the engine takes."""
    limits, packed = device_limits(torch.device("cuda")), layer.experts.packed
    memory, copy_engine = limits.shared_memory, limits.copy_engine
    if packed is None:
        return mixture_tuning(layer.mixture, memory, copy_engine=copy_engine)
    return packed_mixture_tuning(layer.mixture, packed, memory, copy_engine=copy_engine)


def measure_layer(layer: Layer) -> None:
    """A line of JSON: microseconds of each kernel."""
    mixture = layer.mixture
    tuning = chosen_tuning(layer)
    chosen, tiles = route(layer), None
    ops, norm = TritonOps(), layer.x[0].clone()
    router = Affine(layer.router)
    times = {
        "norm": in_turn(lambda _: rowwise.add_rms_norm(layer.x, layer.x, norm, 1e-6)),
        "router": in_turn(lambda _: ops._wide(layer.x, router)),
        "choose": in_turn(lambda i: choose(layer.logits[i], mixture.top_k, normalize=True)),
    }
    if tuning.gate_up.kind != "vector":
        tiles = [align(one, mixture.num_experts, tuning.gate_up.tokens) for one in chosen]

        def aligned(index: int) -> None:
            chosen[index].num_tiles.zero_()
            align(chosen[index], mixture.num_experts, tuning.gate_up.tokens)

        times["zero and align"] = in_turn(aligned)
        times["sum"] = in_turn(lambda i: grouped_product.sum_pairs(layer.parts, chosen[i], layer.x))
    gate_up, down = products(layer, chosen, tiles)
    times["gate_up"] = in_turn(lambda index: gate_up(tuning.gate_up, index))
    times["down"] = in_turn(lambda index: down(tuning.down, index))
    moved = bytes_met(layer, chosen)
    entry: dict[str, Any] = {name: round(1e6 * seconds, 2) for name, seconds in times.items()}
    for name, amount in (("gate_up", moved), ("down", moved / 2)):
        entry[f"{name}_tb_per_s"] = round(amount / times[name] / 1e12, 2)
    emit({"tokens": mixture.num_tokens, "tile": tuning.gate_up.tokens, **entry})


def vector_candidates() -> Iterator[Tuning]:
    """Kernels of single pairs."""
    for block_out, (warps, columns), stages in itertools.product(
        (1, 2, 4, 8), ((2, 256), (2, 512), (4, 512), (4, 1024), (8, 1024), (8, 2048)), (1, 2, 4)
    ):
        if block_out * columns // warps <= 1024:
            yield Tuning("vector", 1, block_out, columns, warps, stages)


def tile_candidates(tile: int, halves: int, shared_memory: int) -> Iterator[Tuning]:
    """Tiles of `tile` pairs that fit into a multiprocessor, with few programs and with several."""
    wide = (64, 128) if halves == 2 or tile > 16 else (64, 128, 256)
    columns = (64, 128, 256) if tile <= 32 else (64, 128)
    for block_out, block_in, warps in itertools.product(wide, columns, (4, 8)):
        if warps == 8 and block_out == 64 and tile < 64:
            continue
        stage = (block_out * halves + tile) * block_in * 2
        most = (shared_memory - 4096) // stage
        for stages in sorted({most, most // 2, 3, 4}):
            if 2 <= stages <= min(most, 8):
                yield Tuning("tile", tile, block_out, block_in, warps, stages, descriptors=True)


def packed_candidates(layer: Layer, tile: int | None, product: str) -> Iterator[Tuning]:
    """The same for packed experts, fewer: `num_stages` of vectors are steps unrolled."""
    assert layer.experts.packed is not None
    if tile is None:
        for block_out, (warps, columns), unrolled in itertools.product(
            (1, 2), ((1, 256), (1, 512), (2, 1024)), (4, 8, 24)
        ):
            if product == "down" or unrolled * columns <= 2 * layer.mixture.hidden_size:
                yield Tuning("vector", 1, block_out, columns, warps, unrolled)
        return
    found = set()
    weight = getattr(layer.experts.packed, product)
    mixture, gated = layer.mixture, product == "gate_up"
    out_size = mixture.size if gated else mixture.hidden_size
    case = Product(mixture.num_tokens, out_size, weight.in_size, mixture.dtype, gated)
    shared_memory = device_limits(torch.device("cuda")).shared_memory
    is_few = tile <= 32
    for (block_out, warps), columns, stages in itertools.product(
        ((64, 4), (128, 4), (128, 8)) if is_few else ((64, 4), (128, 8)),
        (128, 256) if is_few else (128,),
        (3, 5, 8) if is_few else (2, 3, 4),
    ):
        kind: Any = "tile"
        if weight.kind == "fp8":
            kind = getattr(chosen_tuning(layer), product).kind
            kind = "split" if kind == "vector" else kind
        tuning = Tuning(kind, tile, block_out, columns, warps, stages, descriptors=True)
        found.add(fit(tuning, case, weight, shared_memory, copy_engine=True))
    yield from sorted(found)


def sweep(layer: Layer, name: str, names: list[str]) -> None:
    """A line of JSON for the best of each product, the next ones behind it."""
    mixture = layer.mixture
    chosen = route(layer)
    moved = bytes_met(layer, chosen)
    shared_memory = device_limits(torch.device("cuda")).shared_memory
    average = mixture.num_tokens * mixture.top_k / mixture.num_experts
    sizes = [size for size in (16, 32, 64, 128) if average / 2 <= size < 4 * average + 16]
    kinds: list[int | None] = [*([None] if mixture.num_tokens <= 8 else []), *sizes[:2]]
    for kind in kinds:
        tiles = None
        if kind is not None:
            tiles = [align(one, mixture.num_experts, kind) for one in chosen]
        for product, amount in zip(products(layer, chosen, tiles), (moved, moved / 2), strict=True):
            if product.__name__ not in names:
                continue
            halves = 2 if product.__name__ == "gate_up" else 1
            found = []
            candidates: Iterator[Tuning]
            if layer.experts.packed is not None:
                candidates = packed_candidates(layer, kind, product.__name__)
            elif kind is None:
                candidates = vector_candidates()
            else:
                candidates = tile_candidates(kind, halves, shared_memory)
            for tuning in candidates:
                try:
                    seconds = in_turn(lambda index, p=product, t=tuning: p(t, index))  # type: ignore[misc]
                except Exception as error:  # a tile that does not compile
                    emit({"failed": str(tuning), "error": str(error)[:200]})
                    continue
                found.append((seconds, tuning))
            found.sort(key=lambda one: one[0])
            emit(
                {
                    "shape": name,
                    "tokens": mixture.num_tokens,
                    "tile": kind or 1,
                    "product": product.__name__,
                    "us": round(1e6 * found[0][0], 2),
                    "tb_per_s": round(amount / found[0][0] / 1e12, 2),
                    "best": [
                        [round(1e6 * seconds, 2), *tuning[2:6]] for seconds, tuning in found[:6]
                    ],
                }
            )
        for one in chosen:
            one.num_tiles.zero_()


def measure_steps(limits: Limits, batches: list[int], form: str | None) -> None:
    """A line of JSON for each step, with the experts that its mixtures met."""
    runner = dummy_runner(_BLOCK_SIZE, 4096, shape="qwen3-30b-a3b", form=form)
    config = decoder_of(runner).config
    assert config.experts is not None
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, _BLOCK_SIZE)
    bounds = Bounds(config, torch.bfloat16, limits)
    for batch in batches:
        load = decode_load(batch, 576, shape)
        generator = torch.Generator().manual_seed(batch)
        ids = torch.randint(config.vocab_size, (batch,), generator=generator).tolist()
        rows = [row._replace(token_ids=[token]) for row, token in zip(load.rows, ids, strict=True)]
        seconds = time_device(runner, rows)
        bound = bounds.step_s(batch, batch * 576, batch * 576)
        emit(
            {
                "step": batch,
                "ms": round(1000 * seconds, 3),
                "bound_ms": round(1000 * bound, 3),
                "of_bound": round(bound / seconds, 3),
                "experts_if_even": round(bounds.experts_met(batch), 1),
                "kernels_us": _by_kernel(lambda r=rows: time_device(runner, r)),  # type: ignore[misc]
            }
        )
    load = prefill_load(8192, 0, shape)
    ids = torch.randint(config.vocab_size, (8192,)).tolist()
    rows = [load.rows[0]._replace(token_ids=ids)]
    seconds, bound = time_device(runner, rows), bounds.prefill_s([Segment(0, 8192)], 1)
    entry = {"prefill": 8192, "ms": round(1000 * seconds, 2), "bound_ms": round(1000 * bound, 2)}
    emit(entry | {"kernels_us": _by_kernel(lambda: time_device(runner, rows))})


def _by_kernel(work: Callable[[], Any], limit: int = 16) -> dict[str, list[float]]:
    """By name: calls and microseconds of all of them in one replay of the step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    by_name: dict[str, tuple[int, float]] = {}
    for event in events:
        calls, total = by_name.get(event.name, (0, 0.0))
        by_name[event.name] = (calls + 1, total + event.device_time)
    # Steps in the graph and before it are alike: the head is computed once a step.
    steps = max(1, min(calls for calls, _ in by_name.values() if calls >= 20))
    rows = sorted(by_name.items(), key=lambda one: -one[1][1])[:limit]
    return {
        name[:48]: [round(calls / steps, 1), round(total / steps, 1)]
        for name, (calls, total) in rows
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `harness.Study`."""
    parser.add_argument("--shapes", nargs="*", choices=sorted(SHAPES), default=["qwen3-30b-a3b"])
    parser.add_argument("--tokens", type=int, nargs="*", default=list(_TOKENS))
    parser.add_argument("--format", choices=sorted(FORMATS), help="of the weights; else bf16")
    parser.add_argument("--sweep", action="store_true", help="kernels and tiles, nothing else")
    parser.add_argument("--products", nargs="*", default=["gate_up", "down"], help="of a sweep")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64, 256])


@torch.inference_mode()
def run(options: argparse.Namespace) -> None:
    """See `harness.Study`."""
    limits = measure_limits()
    torch.cuda.empty_cache()
    emit(limits._asdict())
    for name in options.shapes:
        router, experts = draw_weights(SHAPES[name], options.format)
        for tokens in options.tokens:
            mixture = Mixture(tokens, *SHAPES[name], torch.bfloat16)
            layer = draw_layer(mixture, router, experts)
            if options.sweep:
                sweep(layer, name, options.products)
            else:
                measure_layer(layer)
        del router, experts, layer
        torch.cuda.empty_cache()
    if not options.sweep and options.batches:
        measure_steps(limits, options.batches, options.format)
