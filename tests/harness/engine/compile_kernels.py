"""Compiles every kernel for GPUs that need not be there; a program, run by its test.

Prints a line of JSON for each variant of the sets that its arguments name: the set, its name, the
target, the shared memory it takes and whether it uses Hopper's matrix instructions. Must not run in
the interpreter's process.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from parrot_engine.attention import launch
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.storage import tile_rows
from parrot_engine.kernels.attention import hopper_fetch
from parrot_engine.kernels.attention.hopper_prefill import hopper_prefill
from parrot_engine.kernels.attention.prefill_attention import prefill_attention
from parrot_engine.kernels.attention.rotary_write import rotate_and_write, write_kv
from parrot_engine.kernels.attention.split_attention import merge_splits, split_attention
from parrot_engine.kernels.experts.expert_routing import align_pairs, choose_experts
from parrot_engine.kernels.experts.grouped_product import sum_experts, vector_down, vector_gate_up
from parrot_engine.kernels.experts.grouped_product import tile_product as grouped_product
from parrot_engine.kernels.experts.grouped_tuning import (
    Mixture,
    PackedExperts,
    mixture_tuning,
    packed_mixture_tuning,
)
from parrot_engine.kernels.experts.mixture import blocks_of, layout_of
from parrot_engine.kernels.experts.packed_experts import (
    packed_tile_product,
    packed_vector_down,
    packed_vector_gate_up,
)
from parrot_engine.kernels.matmul.hopper_product import BOX_LAYOUT as RING_LAYOUT
from parrot_engine.kernels.matmul.hopper_product import (
    hopper_product,
    product_constants,
    register_limit,
)
from parrot_engine.kernels.matmul.lora_product import expand_kernel, shrink_kernel
from parrot_engine.kernels.matmul.quantized_matmul import quantized_tiles
from parrot_engine.kernels.matmul.quantized_tuning import STEP_COLUMNS, quantized_tuning
from parrot_engine.kernels.matmul.quantized_vectors import vector_of_bytes, vector_of_words
from parrot_engine.kernels.matmul.skinny_matmul import tile_product, vector_product
from parrot_engine.kernels.matmul.skinny_tuning import MAX_NORM_TOKENS, tuning_for
from parrot_engine.kernels.matmul.split_rows import split_groups_kernel, split_rows_kernel
from parrot_engine.kernels.rowwise import rms_norm_kernel, swiglu_kernel
from parrot_engine.kernels.sampling import draw
from parrot_engine.kernels.sampling.logits import largest_of_parts, largest_of_rows
from parrot_engine.kernels.sum_ranks import BOXES, sum_ranks
from parrot_engine.kernels.tuning import GROUP_ROWS, Product
from parrot_engine.quantization.packed import PackedWeight
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
#: Shared memory of a program by compute capability, in KiB.
SHARED_KIB = {80: 163, 89: 99, 90: 227}


class Variant(NamedTuple):
    """A kernel, what it is compiled for, and how it is launched."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    dtype: torch.dtype
    options: dict[str, int | None]
    #: Of arguments that are none of activations, and not named in `_SCALARS`.
    types: dict[str, str] = {}  # noqa: RUF012 -- read only

    @property
    def cache(self) -> str:
        """The type of the elements of an argument that is of the KV cache."""
        constants = self.constants.get("C")
        quantized = self.constants.get("QUANTIZED", getattr(constants, "quantized", False))
        if not quantized:
            return NAMES[self.dtype]
        return "i16" if getattr(constants, "pairs", False) else "u8"


#: Arguments that are no pointers to activations.
_SCALARS = {
    **dict.fromkeys(["query_stride", "qkv_stride", "key_stride", "value_stride", "window"], "i32"),
    **dict.fromkeys(["scale_log2", "eps"], "fp32"),
    **dict.fromkeys(["num_tokens", "num_pairs", "max_rows"], "i32"),
    **dict.fromkeys(["partial", "lse2"], "*fp32"),
    **dict.fromkeys(
        ["key_scales", "value_scales", "key_scale_tiles", "value_scale_tiles"], "*fp32"
    ),
    **dict.fromkeys(["parts", "tokens", "checked", "rows", "top_k", "addresses"], "*i64"),
    **dict.fromkeys(["temperatures", "points", "floors", "top_p"], "*fp64"),
    **dict.fromkeys(
        [
            *(
                "items",
                "num_items",
                "tiles",
                "num_tiles",
                "merges",
                "num_merges",
                "block_ids",
                "slots",
            ),
            *("member_tokens", "member_positions", "member_slots", "arrivals", "turns"),
        ],
        "*i32",
    ),
    **dict.fromkeys(["experts", "pairs", "tile_experts"], "*i32"),
    **dict.fromkeys(["factors", "logits"], "*fp32"),
}

_CACHE = ("key_cache", "value_cache", "key_tiles", "value_tiles")


def attention_variants(
    shape: AttentionShape,
    dtype: torch.dtype,
    capability: int,
    *,
    has_window: bool,
    quantized: bool = False,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> Iterator[Variant]:
    """The three tile classes of one model."""
    limits = launch.DeviceLimits(
        100, SHARED_KIB[capability] * 1024, capability >= 90, hopper=capability == 90
    )
    tunings = launch.tunings(shape, dtype, limits, quantized=quantized)
    rows = tile_rows(shape.block_size, shape.head_dim, quantized=quantized)
    for kind, tuning in tunings._asdict().items():
        constants: Any
        if tuning.specialized and not has_window:
            constants = launch.hopper_constants(shape, quantized=quantized, tile_rows=rows)
            name = f"{kind} d{shape.head_dim} {NAMES[dtype]} specialized fp8={quantized}"
            yield Variant(name, hopper_prefill, {"C": constants}, dtype, {"num_warps": 4})
            continue
        constants = launch.attention_constants(
            shape,
            tuning,
            has_window=has_window,
            quantized=quantized,
            tile_rows=rows,
            softcap=softcap,
            has_sinks=has_sinks,
        )
        yield Variant(
            f"{kind} d{shape.head_dim} {NAMES[dtype]} window={has_window} fp8={quantized}",
            prefill_attention if kind == "prefill" else split_attention,
            {"C": constants},
            dtype,
            {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages},
        )


def write_variants(
    shape: AttentionShape, dtype: torch.dtype, *, quantized: bool = False
) -> Iterator[Variant]:
    """Yield variants of the kernels that write keys and values."""
    heads, kv_heads, head_dim, block_size = shape
    half = head_dim // 2
    kind = f"d{head_dim} {NAMES[dtype]} fp8={quantized}"
    cache = {
        "QUANTIZED": quantized,
        "NUM_KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "TILE_ROWS": tile_rows(block_size, head_dim, quantized=quantized),
    }
    block_d = triton.next_power_of_2(head_dim)
    for qk_norm in (False, True):
        constants = {
            **cache,
            "QK_NORM": qk_norm,
            "NUM_HEADS": heads,
            "HALF": half,
            "ROTATED": half // 2 if qk_norm else half,
            "INTERLEAVED": False,
            "BLOCK_HALF": block_d // 2,
            "BLOCK_H": 8,
        }
        yield Variant(f"rotate {kind}", rotate_and_write, constants, dtype, {"num_warps": 2})
    constants = {**cache, "BLOCK_D": block_d, "BLOCK_H": 8}
    yield Variant(f"write {kind}", write_kv, constants, dtype, {"num_warps": 4})


def other_variants(shape: AttentionShape, dtype: torch.dtype) -> Iterator[Variant]:
    """Everything but attention and what writes for it."""
    heads, _, head_dim, _ = shape
    kind = f"d{head_dim} {NAMES[dtype]}"
    block_d = triton.next_power_of_2(head_dim)
    for num_queries in (1, 100):
        tuning = launch.merge_tuning(num_queries)
        constants = {
            "HAS_SINKS": False,
            "NUM_HEADS": heads,
            "HEAD_DIM": head_dim,
            "BLOCK_D": block_d,
            "BLOCK_C": tuning.block,
            "PARTS": tuning.parts,
        }
        options: dict[str, int | None] = {"num_warps": tuning.num_warps}
        yield Variant(f"merge {kind}", merge_splits, constants, dtype, options)
    for has_delta in (False, True):
        constants = {"HAS_DELTA": has_delta, "SIZE": 4096, "BLOCK": 4096}
        yield Variant(f"norm {kind}", rms_norm_kernel, constants, dtype, {"num_warps": 8})
    for has_norm in (False, True):
        constants = {"HAS_NORM": has_norm, "SIZE": 4096, "BLOCK": 4096, "BOXES": BOXES}
        constants |= {"RANK": 1, "RANKS": 4}
        yield Variant(f"sum of ranks {kind}", sum_ranks, constants, dtype, {"num_warps": 16})
    constants = {"SIZE": 14336, "BLOCK": 1024}
    yield Variant(f"swiglu {kind}", swiglu_kernel, constants, dtype, {"num_warps": 4})


def lora_variants(dtype: torch.dtype) -> Iterator[Variant]:
    """Low-rank products of q, k and v, few tokens of small ranks and many of large ones."""
    types = {**dict.fromkeys(["used", "order"], "*i32"), "inner": "*fp32"}
    for tile, max_rank in ((16, 16), (64, 256)):
        constants = {
            "PROJECTIONS": 3,
            "MAX_RANK": max_rank,
            "TILE": tile,
            "BLOCK_RANK": min(64, max_rank),
            "SPLITS": 4,
            "EXACT": dtype is torch.float32,
        }
        name, options = f"lora {tile} {max_rank} {NAMES[dtype]}", {"num_warps": 4}
        own = {**constants, "IN": 4096, "BLOCK_IN": 128}
        yield Variant(f"{name} shrink", shrink_kernel, own, dtype, {**options}, types)
        own = {**constants, "SIZE_0": 4096, "SIZE_1": 1024, "SIZE_2": 1024, "BLOCK_OUT": 64}
        yield Variant(f"{name} expand", expand_kernel, own, dtype, {**options}, types)


#: Products of Llama-3.1-8B (norm, gated, outputs, columns) and the narrowest of Qwen2.5-0.5B.
_PRODUCTS = [
    (True, False, 6144, 4096),
    (True, True, 14336, 4096),
    (False, False, 4096, 14336),
    (False, False, 896, 4864),
    # Takes a tile that was measured without the gate, and cannot be fetched by descriptor.
    (True, True, 77, 130),
]


def product_variants(dtype: torch.dtype, capability: int) -> Iterator[Variant]:
    """Products of few tokens, as the table has them for the device."""
    for num_tokens, (norm, gated, out_size, in_size) in itertools.product(
        (1, 16, 64, 128), _PRODUCTS
    ):
        norm = norm and num_tokens <= MAX_NORM_TOKENS
        case = Product(num_tokens, out_size, in_size, dtype, gated, norm)
        shared_memory = SHARED_KIB[capability] * 1024
        tuning = tuning_for(case, shared_memory, copy_engine=capability >= 90)
        if tuning is None:
            continue
        constants = {
            "HAS_NORM": norm,
            "GATED": gated,
            "HAS_BIAS": norm,
            "HAS_RESIDUAL": not norm,
            "IN": in_size,
            "OUT": out_size,
            "TOKENS": tuning.tokens,
            "BLOCK_OUT": tuning.block_out,
            "BLOCK_IN": tuning.block_in,
            "STAGES": tuning.num_stages,
        }
        name = f"product of {num_tokens} {NAMES[dtype]}"
        options: dict[str, int | None] = {"num_warps": tuning.num_warps}
        if tuning.kind == "vector":
            yield Variant(name, vector_product, constants, dtype, options)
            continue
        constants |= {"SPLITS": tuning.splits, "DOT_IN_FLOAT32": False}
        constants["DESCRIPTORS"] = tuning.descriptors
        yield Variant(name, tile_product, constants, dtype, options)


def expert_variants(dtype: torch.dtype, capability: int) -> Iterator[Variant]:
    """The mixtures of Qwen3-30B-A3B, for one token, some and many."""
    choice = {"EXPERTS": 128, "BLOCK": 128, "TOP_K": 8, "TOP_K_BLOCK": 8, "NORMALIZE": True}
    choice |= {"FIRST": 64, "HELD": 64}
    yield Variant("experts chosen", choose_experts, choice, dtype, {"num_warps": 1})
    yield Variant("pairs", align_pairs, {"TILE": 16, "BLOCK": 1024}, dtype, {"num_warps": 4})
    sums = {"HAS_RESIDUAL": True, "PARTIAL": True, "TOP_K": 8, "SIZE": 2048, "BLOCK": 1024}
    yield Variant("experts summed", sum_experts, sums, dtype, {"num_warps": 4})
    # What only differs in tiles is compiled for the target that has the most of them.
    for num_tokens in (1, 64, 4096) if capability == 90 else (64,):
        mixture = Mixture(num_tokens, 8, 128, 2048, 768, dtype)
        shared_memory = SHARED_KIB[capability] * 1024
        tunings = mixture_tuning(mixture, shared_memory, copy_engine=capability >= 90)
        for part, tuning in tunings._asdict().items():
            gated = part == "gate_up"
            constants: dict[str, Any] = {
                "TOP_K": 8,
                "IN": 2048 if gated else 768,
                "OUT": 768 if gated else 2048,
                "BLOCK_OUT": tuning.block_out,
                "BLOCK_IN": tuning.block_in,
                "STAGES": tuning.num_stages,
                "HAS_BIAS": num_tokens == 64,
            }
            if gated or tuning.kind == "tile":
                constants |= {"ALPHA": 1.702, "LIMIT": 7.0 if num_tokens == 64 else 0.0}
            name = f"experts' {part} of {num_tokens} {NAMES[dtype]}"
            options: dict[str, int | None] = {"num_warps": tuning.num_warps}
            if tuning.kind == "vector":
                constants["PARTIAL"] = False
                if not gated:
                    constants["HAS_RESIDUAL"] = True
                kernel = vector_gate_up if gated else vector_down
                yield Variant(name, kernel, constants, dtype, options)
                continue
            constants |= {"GATED": gated, "HAS_FACTORS": not gated, "TILE": tuning.tokens}
            constants |= {"DESCRIPTORS": tuning.descriptors, "DOT_IN_FLOAT32": False}
            yield Variant(name, grouped_product, constants, dtype, options)


def largest_variants(vocab_size: int) -> Iterator[Variant]:
    """Both passes over rows of logits."""
    constants = {"VOCAB": vocab_size, "PART": 2048}
    yield Variant("parts", largest_of_parts, constants, torch.float32, {"num_warps": 4})
    constants = {"VOCAB": vocab_size, "NUM_PARTS": 63, "BLOCK": 64}
    yield Variant("rows", largest_of_rows, constants, torch.float32, {"num_warps": 1})


def draw_variants(vocab_size: int) -> Iterator[Variant]:
    """Draws with and without top-k and top-p."""
    for has in (False, True):
        constants = {f"HAS_{name}": has for name in ("ROWS", "FLOORS", "TOP_K", "TOP_P")}
        constants |= draw.tiles(vocab_size)
        options: dict[str, int | None] = {"num_warps": draw.NUM_WARPS}
        yield Variant("draw", draw.draw_tokens, constants, torch.float32, options)


#: Codes, whether x is split, columns of a group, rows with one scale.
_PACKED = [("fp8", True, 0, 1), ("fp8", True, 128, 128), ("int8", False, 0, 1)]
_PACKED += [("int4", False, 128, 1), ("fp8", False, 0, 1)]
_CODES = {"fp8": "fp8e4nv", "int8": "i8", "int4": "u8"}


def packed_variants(dtype: torch.dtype, capability: int) -> Iterator[Variant]:
    """Products with packed weights, by tile and for one token."""
    streams = capability >= 90
    for kind, splits_x, group, rows in _PACKED:
        # Triton converts no float8 before 8.9; x is split where codes are multiplied as they are.
        if kind == "fp8" and (capability < 89 or splits_x != streams):
            continue
        types = {"codes": f"*{_CODES[kind]}", "words": "*i32", "order": "*i32"}
        types |= {"x_scales": "*fp32", "scales": "*fp32", "zeros": "*fp32"}
        name = f"packed {kind} {NAMES[dtype]}"
        for norm, gated, out_size, in_size in _PRODUCTS[1:2]:
            sizes = {
                "HAS_NORM": norm,
                "GATED": gated,
                "HAS_BIAS": norm,
                "HAS_RESIDUAL": not norm,
                "IN": in_size,
                "OUT": out_size,
                "GROUP": group or in_size,
            }
            vector = {**sizes, "BLOCK_OUT": 4, "BLOCK_IN": 4096, "STAGES": 1}
            if kind == "int4":
                vector |= {"HAS_ZEROS": True, "INTERPRETED": False}
                yield Variant(name, vector_of_words, vector, dtype, {"num_warps": 4}, types)
            else:
                vector |= {"GROUPED": group > 0, "SCALE_ROWS": rows}
                yield Variant(name, vector_of_bytes, vector, dtype, {"num_warps": 8}, types)
            tile = {
                **sizes,
                "HAS_NORM": norm and not splits_x,
                "BITS": 4 if kind == "int4" else 8,
                "X_PARTS": 2 if splits_x else 0,
                "GROUPED": group > 0,
                "HAS_ZEROS": kind == "int4",
                "HAS_ORDER": False,
                "SCALE_ROWS": rows,
                "TOKENS": 16,
                "BLOCK_OUT": 64,
                "BLOCK_IN": 128,
                "STAGES": 3,
                "SPLITS": 1,
                "DESCRIPTORS": streams,
                "INTERPRETED": False,
            }
            own = {**types, "code_tiles": types["codes"]}
            if streams:
                box = 64 if kind == "int4" else 128
                own["code_tiles"] = f"tensordesc<{_CODES[kind]}[64,{box}]>"
            if splits_x:
                own["x"] = types["codes"]
            yield Variant(name, quantized_tiles, tile, dtype, {"num_warps": 4}, own)
    if streams:
        for norm in (False, True):
            constants = {"HAS_NORM": norm, "SIZE": 4096, "BLOCK": 4096, "LETS_NEXT_START": norm}
            types = {"parts": "*fp8e4nv", "scales": "*fp32", "rows": "i32"}
            yield Variant("split", split_rows_kernel, constants, dtype, {"num_warps": 8}, types)
        groups = {"SIZE": 14336, "GROUPS": 128, "HAS_LEFT": True, "GROUP": 128}
        yield Variant("groups", split_groups_kernel, groups, dtype, {"num_warps": 16}, types)


#: Some of what the table has: two groups of warps, and one with columns cut.
_RINGS = [("fp8 in groups", True, 14336, 4096, 128), ("fp8", False, 4096, 14336, 64)]


def ring_variants(dtype: torch.dtype) -> Iterator[Variant]:
    """Yield variants of the kernels whose warps are of different kinds."""
    for kind, gated, out_size, in_size, tokens in _RINGS:
        group, rows = (128, 128) if kind == "fp8 in groups" else (in_size, 1)
        height = out_size * (2 if gated else 1)
        codes = torch.empty((height, in_size), dtype=torch.float8_e4m3fn, device="meta")
        scales = torch.empty((in_size // group, -(-height // rows)), device="meta")
        weight = PackedWeight("fp8", codes, scales, None, None, group, rows, "none")
        product = Product(tokens, out_size, in_size, dtype, gated)
        tuning = quantized_tuning(
            product, weight, SHARED_KIB[90] * 1024, copy_engine=True, hopper=True
        )
        assert tuning is not None
        constants = product_constants(
            weight, tuning, gated=gated, has_bias=gated, has_residual=not gated
        )
        types = dict.fromkeys(("x_scales", "scales", "partial"), "*fp32")
        for name, box in (("x_boxes", tokens), ("code_boxes", GROUP_ROWS)):
            types[name] = f"tensordesc<fp8e4nv[{box},{STEP_COLUMNS}],{RING_LAYOUT!r}>"
        yield Variant(
            f"{kind} by a ring, {out_size} x {in_size}, {tokens} tokens",
            hopper_product,
            {"C": constants},
            dtype,
            {"num_warps": 4, "maxnreg": register_limit(constants)},
            types,
        )


#: Codes, columns of a group, tokens, the product and the target of packed experts.
_PACKED_EXPERTS = [("fp8", 128, 1, "gate_up", 90), ("fp8", 128, 1, "down", 90)]
_PACKED_EXPERTS += [("fp8", 128, 64, "gate_up", 90), ("fp8", 0, 4096, "down", 90)]
_PACKED_EXPERTS += [("int4", 128, 64, "gate_up", 90), ("fp8", 128, 64, "down", 89)]


def packed_expert_variants(dtype: torch.dtype) -> Iterator[tuple[Variant, int]]:
    """Packed experts of Qwen3-30B-A3B, as the table has them, and the targets."""
    for kind, group, num_tokens, part, capability in _PACKED_EXPERTS:
        weights = []
        for rows, columns in ((128 * 1536, 2048), (128 * 2048, 768)):
            height, width = (128 if group and kind == "fp8" else 1), group or columns
            codes = torch.empty(
                (rows, columns // 2 if kind == "int4" else columns),
                dtype=torch.uint8 if kind == "int4" else torch.float8_e4m3fn,
                device="meta",
            )
            scales = torch.empty(columns // width, rows // height, device="meta")
            zeros = scales if kind == "int4" else None
            weights.append(PackedWeight(kind, codes, scales, zeros, None, width, height, "dynamic"))
        tuning = getattr(
            packed_mixture_tuning(
                Mixture(num_tokens, 8, 128, 2048, 768, dtype),
                PackedExperts(*weights),
                SHARED_KIB[capability] * 1024,
                copy_engine=capability >= 90,
            ),
            part,
        )
        gated = part == "gate_up"
        weight = weights[0 if gated else 1]
        constants: dict[str, Any] = {
            **layout_of(weight),
            **blocks_of(tuning),
            "HAS_BIAS": False,
            "TOP_K": 8,
            "OUT": 768 if gated else 2048,
        }
        options: dict[str, int | None] = {"num_warps": constants.pop("num_warps")}
        types = {"codes": f"*{_CODES[kind]}", "num_rows": "i32"}
        types |= {"scales": "*fp32", "zeros": "*fp32", "x_scales": "*fp32"}
        if tuning.kind == "vector":
            constants |= {"ALPHA": 1.0, "LIMIT": 0.0} if gated else {"HAS_RESIDUAL": True}
            constants["PARTIAL"] = gated
            kernel = packed_vector_gate_up if gated else packed_vector_down
        else:
            kernel = packed_tile_product
            parts = {"split": 2, "rounded": 1}.get(tuning.kind, 0)
            constants |= {"ALPHA": 1.0, "LIMIT": 0.0, "X_PARTS": parts, "GROUPED": group > 0}
            constants |= {"GATED": gated, "HAS_FACTORS": not gated, "TILE": tuning.tokens}
            constants |= {"DESCRIPTORS": tuning.descriptors, "INTERPRETED": False}
            columns = tuning.block_in // (2 if kind == "int4" else 1)
            types["code_tiles"] = types["codes"]
            if tuning.descriptors:
                types["code_tiles"] = f"tensordesc<{_CODES[kind]}[{tuning.block_out},{columns}]>"
            if parts:
                types["x"] = types["codes"]
        name = f"packed {kind} experts' {part} of {num_tokens} {NAMES[dtype]}"
        yield Variant(name, kernel, constants, dtype, options, types), capability


def compile_variant(variant: Variant, capability: int) -> dict[str, Any]:
    """Compile one variant for `capability`; what there is to know of the result."""
    names = variant.kernel.arg_names
    signature = {}
    for name in names:
        if name in variant.constants:
            signature[name] = "constexpr"
        else:
            own = variant.cache if name in _CACHE else NAMES[variant.dtype]
            signature[name] = variant.types.get(name) or _SCALARS.get(name, f"*{own}")
    if variant.kernel is tile_product and variant.constants["DESCRIPTORS"]:
        columns = variant.constants["BLOCK_IN"]
        for name, rows in (("x_tiles", "TOKENS"), ("weight_tiles", "BLOCK_OUT")):
            tile = f"{NAMES[variant.dtype]}[{variant.constants[rows]},{columns}]"
            signature[name] = f"tensordesc<{tile}>"
    elif variant.kernel is grouped_product and variant.constants["DESCRIPTORS"]:
        tile = f"{variant.constants['BLOCK_OUT']},{variant.constants['BLOCK_IN']}"
        signature["weight_tiles"] = f"tensordesc<{NAMES[variant.dtype]}[{tile}]>"
    elif variant.kernel is hopper_prefill:
        layout = (
            hopper_fetch.CODE_LAYOUT
            if variant.constants["C"].quantized
            else hopper_fetch.BOX_LAYOUT
        )
        box = f"{hopper_fetch.BOX_KEYS},{hopper_fetch.BOX_COLUMNS}"
        tile = f"tensordesc<{variant.cache}[{box}],{layout!r}>"
        signature |= {"key_boxes": tile, "value_boxes": tile}
    elif variant.kernel in (prefill_attention, split_attention):
        constants = variant.constants["C"]
        if constants.descriptors:
            columns = constants.block_d // (2 if constants.pairs else 1)
            tile = f"tensordesc<{variant.cache}[{constants.block_n},{columns}]>"
            signature |= {"key_tiles": tile, "value_tiles": tile}
            scales = constants.head_dim // 4
            if constants.quantized and constants.block_n % scales == 0:
                tile = f"tensordesc<fp32[{constants.block_n // scales},{scales}]>"
                signature |= {"key_scale_tiles": tile, "value_scale_tiles": tile}
    attrs = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith("stride")
    }
    language = GluonASTSource if variant.kernel.is_gluon() else ASTSource
    source = language(variant.kernel, signature, variant.constants, attrs)
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), variant.options)
    return {
        "name": variant.name,
        "capability": capability,
        "shared": compiled.metadata.shared,
        "limit": SHARED_KIB[capability] * 1024,
        "wgmma": "wgmma" in compiled.asm["ptx"],
        "cubin": len(compiled.asm["cubin"]),
    }


#: A cache of float8, from compute capability 8.9 on.
_QUANTIZED = [(AttentionShape(32, 8, 128, 16), 89), (AttentionShape(32, 8, 128, 64), 90)]


def quantized_cache_variants() -> Iterator[tuple[Variant, int]]:
    """Yield variants of the kernels that read or write a cache of float8, and their targets."""
    for shape, capability in _QUANTIZED:
        for variant in itertools.chain(
            attention_variants(shape, torch.bfloat16, capability, has_window=False, quantized=True),
            write_variants(shape, torch.bfloat16, quantized=True),
        ):
            yield variant, capability


def packed_weight_variants() -> Iterator[tuple[Variant, int]]:
    """Yield variants of the kernels that multiply packed weights, and their targets."""
    for variant in ring_variants(torch.bfloat16):
        yield variant, 90
    for capability in SHARED_KIB:
        for variant in packed_variants(torch.bfloat16, capability):
            yield variant, capability
    yield from packed_expert_variants(torch.bfloat16)


def dense_variants(*, rare: bool) -> Iterator[tuple[Variant, int]]:
    """All other kernels, `rare` head sizes and dtypes or none, and the targets."""
    every = tuple(SHARED_KIB)
    shapes = [
        (AttentionShape(32, 8, 128, 16), torch.bfloat16, every),
        (AttentionShape(32, 8, 128, 64), torch.bfloat16, (90,)),
    ]
    if rare:
        shapes += [(AttentionShape(28, 4, dim, 64), torch.bfloat16, every) for dim in (64, 96, 256)]
        shapes += [(AttentionShape(32, 8, 128, 16), torch.float16, every)]
        shapes += [(AttentionShape(8, 8, dim, 16), torch.float32, every) for dim in (64, 128, 256)]
    gemma = AttentionShape(8, 4, 256, 16)
    for variant in attention_variants(
        gemma, torch.bfloat16, 89, has_window=True, softcap=50.0, has_sinks=True
    ):
        yield variant, 89
    for capability in every:
        for variant in itertools.chain(
            product_variants(torch.bfloat16, capability),
            expert_variants(torch.bfloat16, capability) if capability != 89 else (),
            lora_variants(torch.bfloat16) if capability != 89 else (),
            largest_variants(128_256),
            draw_variants(151_936),
        ):
            yield variant, capability
    for shape, dtype, capabilities in shapes:
        for capability in capabilities:
            for has_window in (False, True):
                for variant in attention_variants(shape, dtype, capability, has_window=has_window):
                    yield variant, capability
            for variant in itertools.chain(
                write_variants(shape, dtype), other_variants(shape, dtype)
            ):
                yield variant, capability


#: What can be asked for by name.
SETS: dict[str, Callable[[], Iterator[tuple[Variant, int]]]] = {
    "common": partial(dense_variants, rare=False),
    "all": partial(dense_variants, rare=True),
    "fp8": quantized_cache_variants,
    "packed": packed_weight_variants,
}


def main() -> None:
    """All variants of the sets that are named."""
    for name in sys.argv[1:]:
        for variant, capability in SETS[name]():
            entry = {"set": name, **compile_variant(variant, capability)}
            print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
