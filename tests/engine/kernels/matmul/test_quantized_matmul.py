"""Products with packed weights in Triton's interpreter against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import harness.engine.interpreted  # noqa: F401 -- skips this module where it cannot run
import pytest
import torch
from harness.engine.attention_cases import relative_error
from harness.engine.paged import PagedHarness
from harness.engine.quantized_cases import KINDS, QuantizedCase, compute, draw, reference
from harness.engine.quantized_checkpoints import write_checkpoint
from parrot_engine.kernels.matmul.dequantize import dequantize
from parrot_engine.kernels.matmul.quantized_tuning import is_grouped, quantized_tuning, takes_ring
from parrot_engine.kernels.matmul.split_rows import split_groups, split_rows
from parrot_engine.kernels.tuning import Product, Tuning
from parrot_engine.quantization.packed import pack
from parrot_engine.quantization.weights import QuantizedWeight
from parrot_engine.runner.loader import load_runner
from parrot_engine.settings import BuiltinSettings

pytestmark = pytest.mark.usefixtures("poison")

TILE = Tuning("tile", 16, 32, 32, 4, 2)
VECTOR = Tuning("vector", 1, 4, 64, 4, 1)
FUSIONS = ["", "br", "nb", "ngb", "g"]
#: bfloat16 is looser than on a device: the interpreter cuts where a GPU rounds.
BOUND = 1.5e-2


def _check(case: QuantizedCase, tuning: Tuning) -> None:
    operands = draw(case)
    out = compute(case, operands, tuning)
    assert out.shape == (case.num_tokens, case.out_size)
    assert relative_error(out, reference(case, operands)) < BOUND, case


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("num_tokens", [1, 5, 16])
def test_tiles(kind: str, num_tokens: int) -> None:
    for fused in FUSIONS:
        _check(QuantizedCase(kind, num_tokens, 48, 96, fused), TILE)


@pytest.mark.parametrize("kind", ["fp8-rows", "fp8-blocks", "int8"])
def test_vectors(kind: str) -> None:
    for fused in FUSIONS:
        _check(QuantizedCase(kind, 1, 48, 192, fused), VECTOR)


@pytest.mark.parametrize("kind", ["int4", "int4-zeros"])
def test_vectors_of_words(kind: str) -> None:
    for fused in FUSIONS:
        _check(QuantizedCase(kind, 1, 46, 192, fused), VECTOR)


@pytest.mark.parametrize("kind", ["fp8-tensor", "fp8-rows", "fp8-blocks"])
def test_rows_in_two_numbers_of_8_bits(kind: str) -> None:
    for fused in FUSIONS:
        for num_tokens in (2, 18):
            case = QuantizedCase(kind, num_tokens, 48, 96, fused)
            _check(case, TILE._replace(kind="split", descriptors=num_tokens > 2))


def test_what_two_numbers_of_8_bits_keep() -> None:
    x = torch.randn(5, 1000).bfloat16()
    x[0, 0], x[1], x[2, 3] = 2000.0, 0.0, float("nan")
    parts, scales = split_rows(x)
    back = parts.float().sum(0) * scales[:, None]
    assert relative_error(back[[0, 1, 3, 4]], x[[0, 1, 3, 4]].double()) < 2e-3
    assert not torch.isfinite(back[2]).all()


# The interpreter cuts where a GPU rounds, which doubles the error.
@pytest.mark.parametrize(("has_left", "bound"), [(True, 1e-2), (False, 0.15)])
def test_groups_of_columns_in_8_bits(has_left: bool, bound: float) -> None:
    x = torch.randn(5, 3 * 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 0], x[1], x[2, 130], x[3, 256:] = 2000.0, 0.0, float("nan"), x[3, 256:] * 2.0**-20
    parts, scales = split_groups(x, has_left=has_left)
    # Whole fours of rows, and scales by group first.
    assert parts.shape == (2 if has_left else 1, 8, 3 * 128)
    assert scales.shape == (3, 8)
    back = parts.float().sum(0).unflatten(1, (3, 128)) * scales.t()[:, :, None]
    for row in (0, 1, 3, 4):
        # Each group has digits of its own.
        for group, expected in zip(back[row], x[row].double().unflatten(0, (3, 128)), strict=True):
            assert relative_error(group, expected) < bound or not expected.any()
    assert not torch.isfinite(back[2, 1]).any()
    assert torch.isfinite(back[2, [0, 2]]).all()


@pytest.mark.parametrize(
    ("block", "shape", "has_block_scales"),
    [
        ((128, 128), (256, 384), True),
        ((128, 128), (200, 384), False),
        ((1, 128), (256, 384), False),
    ],
)
def test_blocks_that_cublas_multiplies_have_scales_for_it(
    block: tuple[int, int], shape: tuple[int, int], has_block_scales: bool
) -> None:
    counts = [-(-size // each) for size, each in zip(shape, block, strict=True)]
    scales = torch.rand(counts)
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    packed = pack(QuantizedWeight(codes, scales, block), torch.device("cpu"))
    assert packed is not None
    assert (packed.block_scales is not None) == has_block_scales
    if packed.block_scales is not None:
        assert packed.block_scales.shape == (2, 4)
        assert torch.equal(packed.block_scales[:, :3], scales)
        # Up to 128 tokens our kernels multiply, beyond them cuBLAS.
        tunings = [
            quantized_tuning(
                Product(tokens, 256, 384, torch.bfloat16, gated=False, norm=False),
                packed, 200_000, copy_engine=True, hopper=hopper,
            )
            for tokens, hopper in ((128, True), (129, True), (129, False))
        ]  # fmt: skip
        assert [tuning is None for tuning in tunings] == [False, True, False]


@pytest.mark.parametrize("kind", ["fp8-rows", "int4-zeros"])
def test_columns_in_parts_and_edges(kind: str) -> None:
    for splits in (2, 4):
        _check(QuantizedCase(kind, 3, 48, 192, "br"), TILE._replace(splits=splits))
    _check(QuantizedCase(kind, 3, 7, 96, "br"), TILE)
    _check(QuantizedCase("fp8-rows", 3, 40, 96, "br"), TILE._replace(block_in=64))
    _check(QuantizedCase("int8", 1, 40, 96, "ng"), VECTOR)


@pytest.mark.parametrize("kind", list(KINDS))
def test_more_tokens_than_a_program_takes(kind: str) -> None:
    for fused in ("br", "g"):
        _check(QuantizedCase(kind, 18, 40, 64, fused), TILE)


@pytest.mark.parametrize("kind", ["fp8-blocks", "int4"])
def test_what_the_copy_engine_fetches(kind: str) -> None:
    for fused in ("br", "ng"):
        _check(QuantizedCase(kind, 3, 48, 96, fused), TILE._replace(descriptors=True))


def test_float16() -> None:
    for kind in KINDS:
        _check(QuantizedCase(kind, 5, 40, 64, "br", torch.float16), TILE)


@pytest.mark.parametrize("kind", list(KINDS))
def test_dequantized(kind: str) -> None:
    case = QuantizedCase(kind, 1, 20, 96)
    operands = draw(case)
    for dtype in (torch.float32, torch.bfloat16):
        dense = dequantize(operands.weight, dtype)
        torch.testing.assert_close(dense.float(), operands.dense, rtol=2e-2, atol=1e-6)
    torch.testing.assert_close(operands.weight.dense(torch.float32), operands.dense)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 64, 100, 128, 200])
def test_the_table_fits_every_weight(kind: str, num_tokens: int) -> None:
    """Tiles lie within groups, and cut columns only where that is allowed."""
    for fused, (in_size, hopper) in itertools.product(
        ("", "n", "g", "ng"), ((192, True), (256, False), (256, True))
    ):
        group = 128 if in_size == 256 else 0
        case = QuantizedCase(kind, num_tokens, 48, in_size, fused, group=group)
        weight = draw(case).weight
        product = Product(num_tokens, 48, in_size, torch.bfloat16, "g" in fused, "n" in fused)
        tuning = quantized_tuning(product, weight, 227 * 1024, copy_engine=True, hopper=hopper)
        if tuning is None:
            assert "n" in fused or num_tokens > 64
            continue
        if tuning.kind == "vector":
            assert (num_tokens, weight.order) == (1, None)
            continue
        assert tuning.tokens >= 16
        assert not is_grouped(weight) or weight.group % tuning.block_in == 0
        assert tuning.splits == 1 or "g" not in fused
        assert tuning.splits == 1 or "n" not in fused or tuning.kind in ("split", "specialized")
        whole = hopper and in_size == 256 and num_tokens <= 128
        assert (tuning.kind == "specialized") == (whole and takes_ring(weight))


def test_a_model_with_packed_weights(tmp_path: Path) -> None:
    """The same kernels around products with weights that are dequantised for each."""
    path, dense = write_checkpoint(tmp_path, "awq")
    settings = BuiltinSettings(device="cpu", dtype="bfloat16", num_blocks=8)
    ours = load_runner(path, replace(settings, kernels="triton"))
    [logits] = PagedHarness(ours).generate([[5, 6, 7]], 1)[1]
    plain = load_runner(dense, replace(settings, kernels="triton"))
    [theirs] = PagedHarness(plain).generate([[5, 6, 7]], 1)[1]
    assert relative_error(logits, theirs) < 2e-2
