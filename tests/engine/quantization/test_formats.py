"""Checkpoints in every format compute what the weights that their codes stand for compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.engine.checkpoints import CONFIGS
from harness.engine.paged import PagedHarness
from harness.engine.quantized_checkpoints import FORMS, Written, write_checkpoint
from parrot_engine import LLM, SamplingParams
from parrot_engine.exceptions import CheckpointError, UnsupportedModelError
from parrot_engine.models.loader import load_model, read_model_config
from parrot_engine.models.parts import Linear, TensorSpec, weight_bytes
from parrot_engine.models.sharding import Shard
from parrot_engine.quantization.packed import pack
from parrot_engine.quantization.registry import METHODS
from parrot_engine.quantization.weights import QuantizedWeight, stack
from parrot_engine.runner.loader import load_runner
from parrot_engine.settings import BuiltinSettings
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig

CPU = torch.device("cpu")
SETTINGS = BuiltinSettings(device="cpu", dtype="float32", num_blocks=16)
PROMPTS = [[5, 6, 7], list(range(1, 30)), [200] * 17]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    made: dict[str, Written] = {}

    def get(form: str) -> Written:
        if form not in made:
            made[form] = write_checkpoint(tmp_path_factory.mktemp(form), form)
        return made[form]

    return get


def _generate(path: Path) -> tuple[list[list[int]], list[Tensor]]:
    return PagedHarness(load_runner(path, SETTINGS)).generate(PROMPTS, 12)


@pytest.mark.parametrize("form", list(FORMS))
def test_tokens_and_logits_are_those_of_the_dense_model(
    form: str, written: Callable[[str], Written]
) -> None:
    path, dense = written(form)
    tokens, logits = _generate(path)
    expected, expected_logits = _generate(dense)
    assert tokens == expected
    for ours, theirs in zip(logits, expected_logits, strict=True):
        assert float((ours - theirs).abs().max()) < 1e-4


def test_blocks_of_fp8_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads FP8 with it")
    # Whole blocks: transformers takes others for equally large ones.
    config = LlamaConfig(**{**CONFIGS["llama"].to_dict(), "intermediate_size": 128})
    path = write_checkpoint(tmp_path, "fp8-blocks", config).path
    reference = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        quantization_config=FineGrainedFP8Config(dequantize=True, weight_block_size=(64, 64)),
    ).eval()
    for prompt, tokens, logits in zip(PROMPTS, *_generate(path), strict=True):
        ids = torch.tensor([prompt + tokens[:-1]])
        with torch.inference_mode():
            theirs = reference(ids).logits[0, len(prompt) - 1 :]
        assert tokens == theirs.argmax(dim=-1).tolist()
        assert float((logits - theirs).abs().max()) < 1e-4


def test_forks_and_prefix_hits(written: Callable[[str], Written]) -> None:
    path, dense = written("awq")
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    texts = []
    for folder in (path, dense):
        with LLM(str(folder), device="cpu", dtype="float32", num_blocks=60) as llm:
            head = llm.generate(["a head that both share, "], params)
            outputs = llm.generate(["a head that both share, and ends"], params, n=2)
            texts.append([o.token_ids for output in head + outputs for o in output.outputs])
            assert llm.stats().cached_tokens > 0
    assert texts[0] == texts[1]


class _Rank:
    """A collective for loading only."""

    def __init__(self, rank: int) -> None:
        self.shard = Shard(rank, 2)


@pytest.mark.parametrize("form", list(FORMS))
def test_ranks_hold_parts_of_the_dense_weights(
    form: str, written: Callable[[str], Written]
) -> None:
    path, dense = written(form)
    for rank in range(2):
        ours, theirs = (
            load_model(folder, CPU, "float32", collective=_Rank(rank))  # type: ignore[arg-type]
            for folder in (path, dense)
        )
        for (name, part), expected in zip(
            ours.model.named_parameters(), theirs.model.parameters(), strict=True
        ):
            torch.testing.assert_close(part, expected, msg=name)


@pytest.mark.parametrize("form", list(FORMS))
def test_packed_weights_are_the_dense_ones(form: str) -> None:
    """The layout of the kernels, stacked as q, k and v are, and cut as ranks do."""
    generator = torch.Generator().manual_seed(3)
    weights, expected = [], []
    quantization = METHODS[FORMS[form].config["quant_method"]](FORMS[form].config)
    for rows in (128, 64, 64):
        stored, dense = FORMS[form].write(torch.randn(rows, 192, generator=generator))
        weight = quantization.read("p", stored)
        assert isinstance(weight, QuantizedWeight)
        weights.append(weight)
        expected.append(dense)
    for columns in (slice(0, 192), slice(64, 128)):
        stacked = stack([weight.part(slice(0, len(weight.codes)), columns) for weight in weights])
        assert stacked is not None
        torch.testing.assert_close(stacked.dense(), torch.cat(expected)[:, columns])
        packed = pack(stacked, CPU)
        if packed is None:
            # Parts of groups in an order of their own are not all equally large.
            assert columns.start > 0
            assert "act-order" in form
            continue
        assert packed.in_size == columns.stop - columns.start
        spec = TensorSpec(CPU, torch.float32, packed=True)
        linear = Linear(packed.in_size, {"p": 256}, bias=False, spec=spec)
        assert weight_bytes(linear) == 0
        linear.packed = packed
        assert packed.codes.nbytes < weight_bytes(linear) < linear.weight.nbytes / 2
        torch.testing.assert_close(
            packed.dense(torch.float32), torch.cat(expected)[:, columns], rtol=1e-5, atol=1e-6
        )


def test_dummy_weights_take_the_format(written: Callable[[str], Written]) -> None:
    drawn = load_model(written("awq").path, CPU, "float32", dummy_seed=1).model
    assert torch.isfinite(next(drawn.parameters())).all()


# -- refused


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization 'bitsandbytes'.*supported: awq"),
        ({"quant_method": "awq", "bits": 3}, "AWQ of 3 bits.*supported: 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'.*gemm"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "without zero points"),
        ({"quant_method": "gptq", "bits": 2}, "GPTQ of 2 bits.*4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:x": {"bits": 8}}}, "dynamic"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2'.*e4m3"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme 'none'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'NVFP4'.*FP8"),
    ],
)
def test_formats_that_are_not_supported_are_named(
    config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    raw = {
        **CONFIGS["llama"].to_dict(),
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": config,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match=named):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_bits": 3}, "int of 3 bits"),
        ({"strategy": "tensor_group"}, "'tensor_group'.*channel"),
        ({"type": "float"}, "float of 4 bits"),
    ],
)
def test_kinds_of_compressed_tensors_that_are_not_supported(
    changes: dict[str, Any], named: str
) -> None:
    config = json.loads(json.dumps(FORMS["w4a16"].config))
    config["config_groups"]["group_0"]["weights"] |= changes
    with pytest.raises(UnsupportedModelError, match=named):
        METHODS["compressed-tensors"](config)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "awq"}, "`w_bit` must be an integer"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "`group_size` cannot be 0"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "`weight_block_size`"),
        ({"quant_method": "compressed-tensors"}, "`config_groups`"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "must list names"),
    ],
)
def test_contradictions_are_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        METHODS[config["quant_method"]](config)


Change = Callable[[dict[str, Tensor]], object]
UP = "model.layers.1.mlp.up_proj."


@pytest.mark.parametrize(
    ("form", "change", "named"),
    [
        ("fp8-rows", lambda t: t.pop(f"{UP}weight_scale"), f"lacks {UP}weight_scale"),
        ("awq", lambda t: t.pop(f"{UP}scales"), f"lacks {UP}scales"),
        ("gptq", lambda t: t.pop(f"{UP}qzeros"), f"lacks {UP}qzeros"),
        ("w4a16", lambda t: t.pop(f"{UP}weight_packed"), f"lacks {UP}weight"),
        ("w4a16", lambda t: t.pop(f"{UP}weight_shape"), f"lacks {UP}weight_shape"),
        ("awq", lambda t: t[f"{UP}scales"][0, 0].fill_(float("nan")), "no finite numbers"),
        ("fp8-blocks", lambda t: t[f"{UP}weight_scale_inv"].zero_(), "scales of 0"),
        (
            "fp8-blocks",
            lambda t: t.update({f"{UP}weight_scale_inv": torch.ones(1, 2)}),
            r"weight_scale_inv has shape \[1, 2\]",
        ),
        (
            "gptq",
            lambda t: t.update({f"{UP}scales": t[f"{UP}scales"][:1].clone()}),
            r"scales has shape \[1, 96\]",
        ),
        ("gptq", lambda t: t[f"{UP}g_idx"].add_(9), "groups that are not there"),
        (
            "awq",
            lambda t: t.update({f"{UP}qweight": t[f"{UP}qweight"][:, :6].clone()}),
            "scales has shape|asks for",
        ),
        ("awq", lambda t: t.update({f"{UP}qweight": torch.ones(64, 12)}), "int32 words"),
        (
            "w8a8-int8",
            lambda t: t.update({f"{UP}weight": t[f"{UP}weight"].to(torch.int32)}),
            "holds torch.int32; int8 can be read",
        ),
    ],
)
def test_broken_weights_are_named(
    form: str, change: Change, named: str, written: Callable[[str], Written], tmp_path: Path
) -> None:
    path = written(form).path
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=named):
        load_model(tmp_path, CPU, "float32")
