"""Products of few tokens with FP8 weights on Hopper GPUs with specialised warps, in Gluon.

It computes `quantized_matmul`'s products with x in two 8-bit numbers (`split_rows`), for columns in
whole steps of 128. One warp lets the copy engine fill a ring of buffers with codes and x. Groups of
four warps have 64 outputs each and do not wait for each other: 8-bit products lose precision in
long sums, so while one group adds a step's sums in float32, the others multiply.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from parrot_engine.kernels.matmul.quantized_tuning import STEP_COLUMNS, is_grouped, takes_ring
from parrot_engine.kernels.matmul.split_rows import split_rows
from parrot_engine.kernels.tuning import GROUP_ROWS, Tuning, num_counters
from parrot_engine.quantization.packed import PackedWeight

#: Layout of codes and x in shared memory.
BOX_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)

_ROWS = gl.constexpr(GROUP_ROWS)
_COLUMNS = gl.constexpr(STEP_COLUMNS)
_BOX = gl.constexpr(BOX_LAYOUT)
_BARRIER = gl.constexpr(mbarrier.MBarrierLayout())
#: Registers per thread: 65,536 in total, minus a reserve.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24
#: Registers per thread with which two one-group programs fit a multiprocessor.
_HALF_OF_REGISTERS = 128


@dataclass(frozen=True, slots=True)
class ProductConstants:
    """Constants that `hopper_product` is compiled for."""

    gated: bool
    has_bias: bool
    has_residual: bool
    in_size: int
    out_size: int
    #: True if scales differ along a row, and the columns per scale; then the rows that share a
    #: scale, and their blocks.
    grouped: bool
    group: int
    scale_rows: int
    scale_blocks: int
    #: Sizes of a program: tokens, groups of four warps (one or two), buffers of the ring.
    tokens: int
    groups: int
    stages: int
    #: Number of parts that the columns are split into.
    splits: int
    consumer_registers: int
    producer_registers: int


# Triton 3.7 and later renamed some functions of 3.6.
_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit(do_not_specialize=["num_tokens"])
def hopper_product(
    x_boxes,
    x_scales,
    code_boxes,
    scales,
    bias,
    residual,
    out,
    partial,
    arrivals,
    num_tokens,
    C: gl.constexpr,
):
    """Compute `C.groups` x 64 outputs of `C.tokens` tokens over part of the columns: program (t, i,
    s).

    Columns are split as in `quantized_tiles`. The kernel takes four warps besides those that it
    starts itself.
    """
    STAGES: gl.constexpr = C.stages
    HALVES: gl.constexpr = 2 if C.gated else 1
    BOXES: gl.constexpr = STAGES * C.groups * HALVES
    codes = gl.allocate_shared_memory(gl.float8e4nv, [BOXES, _ROWS, _COLUMNS], _BOX)
    values = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, C.tokens, _COLUMNS], _BOX)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], _BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], _BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=C.groups)
    ring = (codes, values, full, empty)
    results = (bias, residual, out, partial, arrivals)
    arguments = (x_scales, scales, results, num_tokens)
    boxes = (x_boxes, code_boxes)
    if C.groups == 1:
        gl.warp_specialize(
            [(_multiply, (arguments, ring, 0, C)), (_fetch_steps, (boxes, num_tokens, ring, C))],
            [1],
            [C.producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (arguments, ring, 0, C)),
                (_multiply, (arguments, ring, 1, C)),
                (_fetch_steps, (boxes, num_tokens, ring, C)),
            ],
            [4, 1],
            [C.consumer_registers, C.producer_registers],
        )


@gluon.jit
def _steps(C: gl.constexpr):
    """Return the program's first step and the step after its last."""
    STEPS: gl.constexpr = C.in_size // _COLUMNS
    PART: gl.constexpr = (STEPS + C.splits - 1) // C.splits
    first = gl.program_id(2) * PART
    return first, gl.minimum(first + PART, STEPS)


@gluon.jit
def _fetch_steps(boxes, num_tokens, ring, C: gl.constexpr):
    """Fetch codes and x for all steps of the program, in one warp."""
    x_boxes, code_boxes = boxes
    codes, values, full, empty = ring
    HALVES: gl.constexpr = 2 if C.gated else 1
    GROUPS: gl.constexpr = C.groups
    BOXES: gl.constexpr = GROUPS * HALVES
    BYTES: gl.constexpr = (BOXES * _ROWS + 2 * C.tokens) * _COLUMNS
    row = gl.program_id(1) * (C.groups * _ROWS)
    token = gl.program_id(0) * C.tokens
    first, end = _steps(C)
    # First fill of the ring: codes depend on nothing, x on the kernel that splits it.
    ready = gl.minimum(first + C.stages, end)
    for step in range(first, ready):
        mbarrier.expect(full.index(step - first), BYTES)
        _fetch_codes(code_boxes, codes, full, row, step, step - first, C)
    gdc_wait()
    for step in range(first, ready):
        _fetch_values(x_boxes, values, full, token, num_tokens, step, step - first, C)
    for step in range(ready, end):
        count = step - first
        stage = count % C.stages
        mbarrier.wait(empty.index(stage), ((count // C.stages) & 1) ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        _fetch_codes(code_boxes, codes, full, row, step, stage, C)
        _fetch_values(x_boxes, values, full, token, num_tokens, step, stage, C)


@gluon.jit
def _fetch_codes(code_boxes, codes, full, row, step, stage, C: gl.constexpr):
    HALVES: gl.constexpr = 2 if C.gated else 1
    GROUPS: gl.constexpr = C.groups
    for half in gl.static_range(HALVES):
        for group in gl.static_range(GROUPS):
            place = [row + half * C.out_size + group * _ROWS, step * _COLUMNS]
            box = codes.index((stage * HALVES + half) * GROUPS + group)
            _fetch(code_boxes, place, full.index(stage), box)


@gluon.jit
def _fetch_values(x_boxes, values, full, token, num_tokens, step, stage, C: gl.constexpr):
    # Data beyond the last token is foreign or missing; it is not stored.
    for part in gl.static_range(2):
        place = [token + part * num_tokens, step * _COLUMNS]
        _fetch(x_boxes, place, full.index(stage), values.index(stage * 2 + part))


@gluon.jit
def _load_scales(scales, rows, step, C: gl.constexpr):
    """Load the scales of `rows` of W in a step."""
    group = step * _COLUMNS // C.group
    last: gl.constexpr = (C.in_size - 1) // C.group
    return gl.load(scales + gl.minimum(group, last) * C.scale_blocks + rows // C.scale_rows)


@gluon.jit
def _begin_product(codes, values, stage, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Start the product of a box of codes with both numbers of x."""
    TOKENS: gl.constexpr = C.tokens
    product = gl.zeros([_ROWS, TOKENS], gl.float32, LAYOUT)
    nearest = values.index(stage * 2).permute((1, 0))
    left = values.index(stage * 2 + 1).permute((1, 0))
    product = warpgroup_mma(codes, nearest, product, use_acc=False, is_async=True)
    return warpgroup_mma(codes, left, product, is_async=True)


@gluon.jit
def _multiply(arguments, ring, GROUP: gl.constexpr, C: gl.constexpr):
    """Compute the outputs of a group of warps."""
    x_scales, scales, results, num_tokens = arguments
    _bias, _residual, _out, partial, arrivals = results
    codes, values, full, empty = ring
    TOKENS: gl.constexpr = C.tokens
    HALVES: gl.constexpr = 2 if C.gated else 1
    BOXES: gl.constexpr = C.groups * HALVES
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32])
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    first_row = (gl.program_id(1) * C.groups + GROUP) * _ROWS
    rows = gl.minimum(first_row + gl.arange(0, _ROWS, layout=ROWS), C.out_size - 1)
    total = gl.zeros([_ROWS, TOKENS], gl.float32, LAYOUT)
    upper = total
    first, end = _steps(C)
    scale = gl.full([_ROWS], 1.0, gl.float32, ROWS)
    up_scale = scale
    if C.grouped:
        scale = _load_scales(scales, rows, first, C)
        if C.gated:
            up_scale = _load_scales(scales, rows + C.out_size, first, C)
    for step in range(first, end):
        count = step - first
        stage = count % C.stages
        next_scale = scale
        next_up_scale = up_scale
        if C.grouped:
            next_scale = _load_scales(scales, rows, step + 1, C)
            if C.gated:
                next_up_scale = _load_scales(scales, rows + C.out_size, step + 1, C)
        mbarrier.wait(full.index(stage), (count // C.stages) & 1)
        box = stage * BOXES + GROUP
        part = _begin_product(codes.index(box), values, stage, LAYOUT, C)
        if C.gated:
            # Sums of that many tokens leave no registers for both.
            ONE_BY_ONE: gl.constexpr = TOKENS > 64
            if ONE_BY_ONE:
                part = warpgroup_mma_wait(0, deps=[part])
                total += part * scale[:, None]
            up_part = _begin_product(codes.index(box + C.groups), values, stage, LAYOUT, C)
            if ONE_BY_ONE:
                up_part = warpgroup_mma_wait(0, deps=[up_part])
            else:
                part, up_part = warpgroup_mma_wait(0, deps=[part, up_part])
            mbarrier.arrive(empty.index(stage))
            if not ONE_BY_ONE:
                total += part * scale[:, None]
            upper += up_part * up_scale[:, None]
        else:
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(empty.index(stage))
            total += part * scale[:, None]
        scale = next_scale
        up_scale = next_up_scale
    # A part without columns has not waited yet.
    gdc_wait()
    if not C.grouped:
        total *= gl.load(scales + rows // C.scale_rows)[:, None]
        if C.gated:
            upper *= gl.load(scales + (rows + C.out_size) // C.scale_rows)[:, None]
    if C.splits == 1:
        _finish(total, upper, first_row, x_scales, results, num_tokens, C)
    else:
        SIZE: gl.constexpr = _ROWS * TOKENS
        SPLITS: gl.constexpr = C.splits
        lines = gl.arange(0, _ROWS, layout=ROWS)[:, None] * TOKENS
        lines = lines + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        place = gl.program_id(1) * C.groups + GROUP
        parts = partial + place * (C.splits * SIZE) + lines
        gl.store(parts + gl.program_id(2) * SIZE, total)
        # All threads must have stored before the count is raised.
        _thread_barrier()
        arrived = gl.atomic_add(arrivals + place, 1, sem="acq_rel")
        if arrived == C.splits - 1:
            gl.store(arrivals + place, 0)
            total = gl.load(parts)
            for other in gl.static_range(1, SPLITS):
                total += gl.load(parts + other * SIZE)
            _finish(total, total, first_row, x_scales, results, num_tokens, C)


@gluon.jit
def _finish(total, upper, first_row, x_scales, results, num_tokens, C: gl.constexpr):
    """Scale, gate, add bias and residual, and write a group's outputs."""
    bias, residual, out, _partial, _arrivals = results
    LAYOUT: gl.constexpr = total.type.layout
    OUT: gl.constexpr = C.out_size
    tokens = gl.program_id(0) * C.tokens + gl.arange(0, C.tokens, layout=gl.SliceLayout(0, LAYOUT))
    factor = gl.load(x_scales + tokens, mask=tokens < num_tokens, other=0.0)[None, :]
    total = total * factor
    rows = gl.minimum(first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LAYOUT)), OUT - 1)
    if C.has_bias:
        total += gl.load(bias + rows).to(gl.float32)[:, None]
    if C.gated:
        upper = upper * factor
        if C.has_bias:
            upper += gl.load(bias + OUT + rows).to(gl.float32)[:, None]
        total = total / (1.0 + gl.exp(-total)) * upper
    # A warp writes all rows of a token at once.
    LINES: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    total = gl.convert_layout(total, LINES)
    rows = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LINES))
    tokens = gl.program_id(0) * C.tokens + gl.arange(0, C.tokens, layout=gl.SliceLayout(0, LINES))
    places = tokens[None, :] * OUT + rows[:, None]
    stored = (rows < OUT)[:, None] & (tokens < num_tokens)[None, :]
    if C.has_residual:
        total += gl.load(residual + places, mask=stored, other=0.0).to(gl.float32)
    gl.store(out + places, total.to(out.dtype.element_ty), mask=stored)


def product_constants(
    weight: PackedWeight, tuning: Tuning, *, gated: bool, has_bias: bool, has_residual: bool
) -> ProductConstants:
    """Return the kernel's constants for a product with `weight`."""
    return ProductConstants(
        gated=gated,
        has_bias=has_bias,
        has_residual=has_residual,
        in_size=weight.in_size,
        out_size=len(weight.codes) // (2 if gated else 1),
        grouped=is_grouped(weight),
        group=weight.group,
        scale_rows=weight.rows,
        scale_blocks=weight.scales.shape[1],
        tokens=tuning.tokens,
        groups=tuning.block_out // GROUP_ROWS,
        stages=tuning.num_stages,
        splits=tuning.splits,
        consumer_registers=_CONSUMER_REGISTERS,
        producer_registers=_PRODUCER_REGISTERS,
    )


def register_limit(constants: ProductConstants) -> int | None:
    """Return the registers per thread, averaged over all warps; None: as many as exist."""
    return _HALF_OF_REGISTERS if constants.groups == 1 else None


def specialized_product(
    x: Tensor,
    weight: PackedWeight,
    tuning: Tuning,
    *,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    arrivals: Tensor | None = None,
) -> Tensor:
    """Do the work of `quantized_matmul.quantized_product` for specialised tunings."""
    assert takes_ring(weight)
    assert tuning.block_in == STEP_COLUMNS
    num_tokens, _ = x.shape
    constants = product_constants(
        weight, tuning, gated=gated, has_bias=bias is not None, has_residual=residual is not None
    )
    parts, x_scales = split_rows(x, norm, lets_next_start=True)
    out = torch.empty((num_tokens, constants.out_size), dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(constants.out_size, tuning.block_out)
    token_blocks = triton.cdiv(num_tokens, tuning.tokens)
    partial, counts = x, x
    if tuning.splits > 1:
        assert arrivals is not None
        assert not gated
        assert token_blocks == 1
        size = blocks * tuning.block_out * tuning.splits * tuning.tokens
        assert len(arrivals) >= num_counters(tuning, constants.out_size)
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        counts = arrivals
    hopper_product[(token_blocks, blocks, tuning.splits)](
        TensorDescriptor.from_tensor(
            parts.view(-1, weight.in_size), [tuning.tokens, STEP_COLUMNS], BOX_LAYOUT
        ),
        x_scales,
        TensorDescriptor.from_tensor(weight.codes, [GROUP_ROWS, STEP_COLUMNS], BOX_LAYOUT),
        weight.scales,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        partial,
        counts,
        num_tokens,
        C=constants,
        num_warps=4,
        maxnreg=register_limit(constants),
        launch_pdl=True,
    )
    return out
