"""Quantised checkpoints on the device: every kernel and format beside the dense weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.engine.attention_cases import relative_error
from harness.engine.paged import PagedHarness
from harness.engine.quantized_cases import KINDS, QuantizedCase, compute, draw, reference
from harness.engine.quantized_checkpoints import FORMS, write_checkpoint
from parrot_engine import LLM, SamplingParams
from parrot_engine.attention.launch import device_limits
from parrot_engine.kernels.matmul.dequantize import dequantize
from parrot_engine.kernels.matmul.quantized_tuning import quantized_tuning
from parrot_engine.kernels.tuning import Product, Tuning
from parrot_engine.models.loader import load_model
from parrot_engine.models.ops import Affine
from parrot_engine.models.parts import Linear
from parrot_engine.models.triton_ops import TritonOps
from parrot_engine.quantization.packed import PackedWeight, pack
from parrot_engine.quantization.weights import QuantizedWeight
from parrot_engine.runner.loader import load_runner
from parrot_engine.settings import BuiltinSettings
from transformers import LlamaConfig

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
BOUND = 6e-3
CONFIG = LlamaConfig(
    vocab_size=257,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    eos_token_id=256,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Checkpoints are written by many small operations, beside other processes of a test run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _chosen(case: QuantizedCase, weight: PackedWeight) -> Tuning | None:
    limits = device_limits(DEVICE)
    sizes = (case.num_tokens, case.out_size, case.in_size, case.dtype)
    product = Product(*sizes, "g" in case.fused, "n" in case.fused)
    return quantized_tuning(
        product, weight, limits.shared_memory, copy_engine=limits.copy_engine, hopper=limits.hopper
    )


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 64])
def test_products(kind: str, num_tokens: int, seed: int) -> None:
    """Use places from the table and by pointer, with the smallest groups and with usual ones."""
    for fused in ("br", "ng" if num_tokens <= 16 else "g"):
        for out_size, in_size, group in ((256, 512, 128), (1000, 1024, 0)):
            case = QuantizedCase(kind, num_tokens, out_size, in_size, fused, group=group)
            operands = draw(case, "cuda", seed)
            tuning = _chosen(case, operands.weight)
            assert tuning is not None
            # Sums of four products in two bytes.
            bound = BOUND * (2 if tuning.kind == "vector" and "int4" in kind else 1)
            if out_size == 1000:
                tuning = tuning._replace(descriptors=False)
            out = compute(case, operands, tuning)
            assert relative_error(out, reference(case, operands)) < bound, (case, tuning)


@pytest.mark.parametrize("kind", list(KINDS))
def test_products_of_many_tokens(kind: str, seed: int) -> None:
    """Compare with torch; x is in 8 bits where the checkpoint says so."""
    for num_tokens, activations in ((100, "none"), (300, "none"), (300, "dynamic")):
        case = QuantizedCase(kind, num_tokens, 256, 512, "b", group=128)
        operands = draw(case, "cuda", seed)
        weight = operands.weight._replace(activations=activations)
        linear = Affine(operands.dense.bfloat16(), operands.bias, weight)
        out = TritonOps().linear(operands.x, linear)
        bound = 4e-2 if activations == "dynamic" and weight.kind == "fp8" else BOUND
        assert relative_error(out, reference(case, operands)) < bound, case


@pytest.mark.skipif(
    torch.cuda.get_device_capability() != (9, 0), reason="for compute capability 9.0"
)
@pytest.mark.parametrize("num_tokens", [129, 130, 131, 192, 255, 256, 257, 1000])
def test_blocks_of_128_by_128(num_tokens: int, seed: int) -> None:
    """In 8 bits by cuBLAS; x in two numbers of 8 bits, or in one where the checkpoint says so."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for out_size, in_size in ((256, 384), (1280, 2048), (128, 14336)):
        codes = (32 * torch.randn(out_size, in_size, generator=generator, device="cuda")).to(
            torch.float8_e4m3fn
        )
        scales = torch.rand(out_size // 128, in_size // 128, generator=generator, device="cuda")
        weight = QuantizedWeight(codes, scales / in_size, (128, 128))
        x = torch.randn(num_tokens, in_size, generator=generator, device="cuda").bfloat16()
        bias = torch.randn(out_size, generator=generator, device="cuda").bfloat16()
        exact = torch.nn.functional.linear(x.double(), weight.dense().double(), bias.double())
        for activations, bound in (("none", BOUND), ("dynamic", 4e-2)):
            packed = pack(weight, DEVICE, activations)
            assert packed is not None
            assert packed.block_scales is not None
            linear = Affine(torch.empty(out_size, in_size, device="meta"), bias, packed)
            assert relative_error(TritonOps().linear(x, linear), exact) < bound, activations


@pytest.mark.parametrize("kind", ["fp8-rows", "int4", "int4-zeros"])
def test_columns_in_parts(kind: str, seed: int) -> None:
    for splits in (2, 4):
        case = QuantizedCase(kind, 16, 512, 2048, "br", group=128)
        operands = draw(case, "cuda", seed)
        tuning = Tuning("tile", 16, 64, 128, 4, 4, splits, descriptors=True)
        for _ in range(3):
            out = compute(case, operands, tuning)
            assert relative_error(out, reference(case, operands)) < BOUND


@pytest.mark.skipif(
    torch.cuda.get_device_capability() != (9, 0), reason="for compute capability 9.0"
)
@pytest.mark.parametrize("kind", ["fp8-tensor", "fp8-rows", "fp8-blocks"])
@pytest.mark.parametrize("num_tokens", [1, 16, 37, 64, 100, 128])
@pytest.mark.usefixtures("poison")
def test_products_by_warps_of_different_kinds(kind: str, num_tokens: int, seed: int) -> None:
    """Outputs in whole programs and not, columns whole and in parts that differ."""
    tokens = max(16, 1 << (num_tokens - 1).bit_length())
    for block_out, splits, fused, dtype in (
        (64, 1, "ng", torch.bfloat16),
        (128, 1, "bg", torch.float16),
        (64, 2, "nb", torch.bfloat16),
        (128, 3, "br", torch.bfloat16),
        (64, 5, "r", torch.bfloat16),
    ):
        for out_size in (512, 1000):
            case = QuantizedCase(kind, num_tokens, out_size, 1280, fused, dtype, group=128)
            operands = draw(case, "cuda", seed)
            tuning = Tuning(
                "specialized", tokens, block_out, 128, block_out // 16, 3, splits, descriptors=True
            )
            for _ in range(2):
                out = compute(case, operands, tuning)
                assert relative_error(out, reference(case, operands)) < BOUND, (case, tuning)


@pytest.mark.parametrize("kind", list(KINDS))
def test_float16(kind: str, seed: int) -> None:
    for num_tokens in (1, 16, 64):
        case = QuantizedCase(kind, num_tokens, 256, 512, "br", torch.float16)
        operands = draw(case, "cuda", seed)
        tuning = _chosen(case, operands.weight)
        assert tuning is not None
        out = compute(case, operands, tuning)
        assert relative_error(out, reference(case, operands)) < BOUND


@pytest.mark.parametrize("form", list(FORMS))
def test_packed_weights_of_a_checkpoint(form: str, tmp_path: Path) -> None:
    path, dense = write_checkpoint(tmp_path, form, CONFIG)
    ours, theirs = (
        load_model(folder, DEVICE, dtype, kernels="triton").model
        for folder, dtype in ((path, "bfloat16"), (dense, "float32"))
    )
    expected = dict(theirs.named_modules())
    num_packed = 0
    for name, module in ours.named_modules():
        if isinstance(module, Linear) and module.packed is not None:
            other = expected[name]
            assert isinstance(other, Linear)
            for weight in (
                module.packed.dense(torch.float32),
                dequantize(module.packed, torch.float32),
            ):
                torch.testing.assert_close(weight, other.weight.data, rtol=1e-5, atol=1e-6)
            num_packed += 1
    assert num_packed == 4 * CONFIG.num_hidden_layers


@pytest.mark.parametrize("form", ["fp8-blocks", "w8a8-fp8", "w4a16"])
def test_logits_are_as_close_as_those_of_the_dense_model(form: str, tmp_path: Path) -> None:
    path, dense = write_checkpoint(tmp_path, form, CONFIG)
    settings = BuiltinSettings(device="cuda", dtype="bfloat16", num_blocks=64, cuda_graphs="off")
    exact_settings = replace(settings, dtype="float32", kernels="torch")
    exact, ours, theirs = (
        load_runner(folder, of)
        for folder, of in ((dense, exact_settings), (path, settings), (dense, settings))
    )
    for prompt in ([5, 6, 7], list(range(1, 60)), [200] * 300):
        [reference] = PagedHarness(exact).generate([prompt], 1)[1]
        errors = []
        for runner in (ours, theirs):
            [logits] = PagedHarness(runner).generate([prompt], 1)[1]
            errors.append(relative_error(logits[:1], reference[:1]))
        # Activations of many tokens are rounded to 8 bits where the checkpoint says so.
        rounded = form == "w8a8-fp8" and len(prompt) > 128
        assert errors[0] < (0.15 if rounded else 1.5 * errors[1] + 2e-3), errors


@pytest.mark.parametrize("form", ["fp8-blocks", "w4a16"])
def test_graphs_give_the_tokens_of_launches(form: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, form, CONFIG).path
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    tokens = []
    for graphs in ("off", "lazy"):
        with LLM(
            str(path),
            device="cuda",
            dtype="bfloat16",
            num_blocks=100,
            max_batch_size=2,
            max_batch_tokens=64,
            cuda_graphs=graphs,
        ) as llm:
            outputs = llm.generate(["a parrot"], params)
            tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]
