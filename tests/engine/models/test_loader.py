"""Checkpoints as files: both forms of the configuration, shards, and everything refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.engine.checkpoints import CONFIGS, make_checkpoint
from harness.engine.paged import PagedHarness, PagedSequence
from parrot_engine.exceptions import CheckpointError, SettingsError, UnsupportedModelError
from parrot_engine.models import loader
from parrot_engine.models.config import ModelConfig, read_generation_defaults
from parrot_engine.models.families.registry import FAMILIES, family_of
from parrot_engine.models.loader import read_model_config, resolve_device, resolve_dtype
from parrot_engine.models.rope import frequencies
from parrot_engine.runner import memory
from parrot_engine.runner.loader import load_runner
from parrot_engine.runner.memory import free_memory_bytes
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.settings import BuiltinSettings
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SETTINGS = BuiltinSettings(device="cpu", dtype="float32", num_blocks=8)
CPU = torch.device("cpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", CONFIGS["qwen2"])


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def _edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def _logits(runner: ModelRunner) -> Tensor:
    return PagedHarness(runner).fill(PagedSequence(), [5, 6, 7], chunk=3)


# -- configuration


def _raw(**changes: Any) -> dict[str, Any]:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 257,
        "max_position_embeddings": 4096,
    }
    raw.update(changes)
    return raw


def _read(**changes: Any) -> ModelConfig:
    raw = _raw(**changes)
    return family_of(raw).read_config(raw)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ({}, {"rope_parameters": {"rope_type": "default"}}),
        ({"rope_scaling": None}, {"rope_parameters": {"rope_theta": 10_000.0}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        ),
        ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "num_key_value_heads": 2,
                "use_sliding_window": True,
                "sliding_window": 32,
                "max_window_layers": 2,
            },
            {
                "architectures": ["Qwen2ForCausalLM"],
                "num_key_value_heads": 2,
                "use_sliding_window": True,
                "sliding_window": 32,
                "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            },
        ),
    ],
)
def test_both_forms_read_alike(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert _read(**old) == _read(**new)


def test_windows() -> None:
    qwen = {
        "architectures": ["Qwen2ForCausalLM"],
        "num_key_value_heads": 2,
        "sliding_window": 32,
        "max_window_layers": 1,
    }
    assert _read(**qwen, use_sliding_window=True).windows == (None, 32, 32)
    assert _read(**qwen, use_sliding_window=False).windows == (None, None, None)
    mistral = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert _read(**mistral, sliding_window=32).windows == (32, 32, 32)
    assert _read(**mistral, sliding_window=None).windows == (None, None, None)


def test_defaults_are_those_of_the_family() -> None:
    llama = _read(num_key_value_heads=None)
    assert (llama.num_kv_heads, llama.head_dim, llama.rope.theta) == (4, 16, 10_000.0)
    mistral = _read(architectures=["MistralForCausalLM"], num_attention_heads=16)
    assert (mistral.num_kv_heads, mistral.windows) == (8, (4096,) * 3)
    qwen3 = _read(architectures=["Qwen3ForCausalLM"], num_key_value_heads=2)
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias) == (128, True, False)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 1.0}}, "rope type 'mrope'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"hidden_act": "relu2"}, "activation 'relu2'"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization 'aqlm'"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clipped q, k and v"),
        (
            {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
            "attention to later tokens",
        ),
        (
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "hidden_act": "gelu",
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 8,
            },
            "experts with activation 'gelu'",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked_attention"] * 3},
            "layer type 'chunked_attention'",
        ),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            },
            "layer types other than",
        ),
    ],
)
def test_unsupported_features_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        _read(**changes)
    assert "huggingface engine" in str(caught.value)


_GLM4 = {"architectures": ["Glm4ForCausalLM"], "head_dim": 16}
_GRANITE = {"architectures": ["GraniteForCausalLM"]}
_GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16}
_MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": None}, "architectures"),
        ({"architectures": ["A", "B"]}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads"),
        ({"head_dim": 16.5}, "head_dim"),
        ({"rope_scaling": "linear"}, "rope parameters"),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "num_key_value_heads": 2,
                "sliding_window": 0,
            },
            "sliding_window",
        ),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "short factors"),
        ({**_GLM4, "partial_rotary_factor": "half"}, "partial_rotary_factor"),
        ({**_GLM4, "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({**_GRANITE, "logits_scaling": 0}, "logits_scaling"),
        ({**_GRANITE, "attention_multiplier": float("nan")}, "attention_multiplier"),
        ({**_GEMMA3, "query_pre_attn_scalar": "256"}, "query_pre_attn_scalar"),
        ({**_GEMMA3, "rope_parameters": {"full_attention": 5}}, "rope parameters"),
        ({**_GEMMA3, "layer_types": ["full_attention"]}, "1 layer types for 3 layers"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers"),
        ({**_MIXTRAL, "num_experts_per_tok": 9}, "9 experts a token, of 4"),
        ({**_MIXTRAL, "num_local_experts": None}, "num_local_experts"),
    ],
)
def test_broken_configurations_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        _read(**changes)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3", "longrope"])
def test_frequencies_equal_transformers(kind: str) -> None:
    config = CONFIGS[f"llama-{kind}"]
    raw = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    ours = family_of(raw).read_config(raw)
    inverse, attention_factor = frequencies(ours.rope, ours.head_dim)
    expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](config, CPU)
    torch.testing.assert_close(inverse, expected, atol=0, rtol=1e-6)
    assert attention_factor == pytest.approx(expected_factor)


def test_positions_end_where_frequencies_would_change() -> None:
    short = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    assert _read(rope_scaling=short, original_max_position_embeddings=512).max_position == 512
    assert _read(rope_scaling={"type": "dynamic", "factor": 4.0}).max_position == 4096
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert _read(rope_scaling=yarn).max_position == 16_384


@pytest.mark.parametrize(
    ("config", "generation", "eos", "sampling"),
    [
        ({"eos_token_id": 2}, None, [2], {}),
        ({"eos_token_id": [2, 3, 2]}, {}, [2, 3], {}),
        ({"eos_token_id": 2}, {"eos_token_id": [5, 6]}, [5, 6], {}),
        ({}, None, [], {}),
        (
            {},
            {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1},
            [],
            {"repetition_penalty": 1.1},
        ),
        (
            {},
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None},
            [],
            {"temperature": 0.6, "top_k": 20},
        ),
    ],
)
def test_generation_defaults(
    config: dict[str, Any],
    generation: dict[str, Any] | None,
    eos: list[int],
    sampling: dict[str, float],
) -> None:
    assert read_generation_defaults(config, generation) == (eos, sampling)


# -- tensors


def test_shards_load_like_one_file(checkpoint: Path, tmp_path: Path) -> None:
    sharded = make_checkpoint(tmp_path / "sharded", CONFIGS["qwen2"], max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(
        _logits(load_runner(checkpoint, SETTINGS)), _logits(load_runner(sharded, SETTINGS))
    )


def test_progress_counts_every_tensor(checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_runner(checkpoint, SETTINGS, lambda done, total: seen.append((done, total)))
    total = len(load_file(checkpoint / "model.safetensors"))
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_generation_config_reaches_the_runner(tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path / "model",
        CONFIGS["llama"],
        generation={"do_sample": True, "temperature": 0.6, "eos_token_id": [256, 10]},
    )
    runner = load_runner(path, SETTINGS)
    assert runner.eos_token_ids == [256, 10]
    assert runner.default_sampling == {"temperature": 0.6}


def test_tied_head_in_the_file_and_old_buffers_are_redundant(checkpoint: Path) -> None:
    expected = _logits(load_runner(checkpoint, SETTINGS))

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    _edit_tensors(checkpoint, change)
    assert torch.equal(_logits(load_runner(checkpoint, SETTINGS)), expected)


def test_missing_tensors_are_named(checkpoint: Path) -> None:
    _edit_tensors(checkpoint, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.bias"):
        load_runner(checkpoint, SETTINGS)


def test_an_untied_model_needs_its_head(checkpoint: Path) -> None:
    _edit(checkpoint / "config.json", lambda raw: raw.update(tie_word_embeddings=False))
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        load_runner(checkpoint, SETTINGS)


def test_unexpected_tensors_are_named(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    _edit_tensors(checkpoint, lambda tensors: tensors.update({name: torch.ones(16)}))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_runner(checkpoint, SETTINGS)


def test_wrong_shapes_are_named(checkpoint: Path) -> None:
    _edit(checkpoint / "config.json", lambda raw: raw.update(intermediate_size=100))
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight has shape \[96, 64\]"):
        load_runner(checkpoint, SETTINGS)


def test_quantized_tensors_are_refused(checkpoint: Path) -> None:
    name = "model.norm.weight"
    _edit_tensors(checkpoint, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(UnsupportedModelError, match="float8"):
        load_runner(checkpoint, SETTINGS)


def test_broken_files_are_named(checkpoint: Path) -> None:
    data = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_runner(checkpoint, SETTINGS)


def test_pickled_weights_are_never_read(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    torch.save(weights, checkpoint / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="other weight formats"):
        load_runner(checkpoint, SETTINGS)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", 5])
def test_an_index_cannot_lead_outside(checkpoint: Path, name: object) -> None:
    index = {"weight_map": {"model.norm.weight": name}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside"):
        load_runner(checkpoint, SETTINGS)


def test_an_index_that_promises_too_much(checkpoint: Path) -> None:
    index = {"weight_map": {"model.missing": "model.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.missing"):
        load_runner(checkpoint, SETTINGS)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_configuration_must_be_there_and_json(checkpoint: Path, content: str | None) -> None:
    path = checkpoint / "config.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_runner(checkpoint, SETTINGS)


# -- device, dtype, sizes


def test_dtype_of_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("float16", "bfloat16", CPU) is torch.float16
    monkeypatch.setattr(loader, "has_fast_bfloat16", lambda: True)
    assert resolve_dtype("auto", "bfloat16", CPU) is torch.bfloat16
    assert resolve_dtype("auto", "float16", CPU) is torch.float32
    assert resolve_dtype("auto", "float32", CPU) is torch.float32
    monkeypatch.setattr(loader, "has_fast_bfloat16", lambda: False)
    assert resolve_dtype("auto", "bfloat16", CPU) is torch.float32
    assert resolve_dtype("auto", "bfloat16", torch.device("cuda")) is torch.bfloat16
    with pytest.raises(SettingsError, match="int8"):
        resolve_dtype("int8", "bfloat16", CPU)


@pytest.mark.parametrize("name", ["tpu", "meta", "cuda:99"])
def test_devices_that_are_not_there(name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        resolve_device(name)


def test_stored_dtype_is_converted(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", CONFIGS["llama"], dtype=torch.bfloat16)
    runner = load_runner(path, SETTINGS)
    assert runner.dtype == "float32"
    exact = make_checkpoint(tmp_path / "exact", CONFIGS["llama"])
    error = (_logits(runner) - _logits(load_runner(exact, SETTINGS))).abs().max()
    assert 0 < error < 0.5


def test_cache_size_from_bytes(checkpoint: Path) -> None:
    per_block = load_runner(checkpoint, SETTINGS).kv_bytes_per_block
    settings = BuiltinSettings(device="cpu", dtype="float32", kv_cache_bytes=5 * per_block + 1)
    assert load_runner(checkpoint, settings).num_blocks == 5


def test_free_memory_is_plausible() -> None:
    assert 2**20 < free_memory_bytes(CPU) < 2**50


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    assert memory._container_available(tmp_path) is None
    (tmp_path / "memory.current").write_text("300\n")
    for limit, available in (("max\n", None), ("1000\n", 700), ("200\n", 0)):
        (tmp_path / "memory.max").write_text(limit)
        assert memory._container_available(tmp_path) == available


def test_the_configuration_can_be_read_alone(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert read_model_config(checkpoint).architecture == "Qwen2ForCausalLM"
    _edit(checkpoint / "config.json", lambda raw: raw.update(hidden_act="relu2"))
    with pytest.raises(UnsupportedModelError, match="relu2"):
        read_model_config(checkpoint)


def test_of_text_and_vision_the_text_model_is_read(tmp_path: Path) -> None:
    """With names as transformers 5 has them, and as old files do."""
    path = make_checkpoint(tmp_path / "model", CONFIGS["gemma3-vision"])
    expected = _logits(load_runner(path, SETTINGS))

    def turn(tensors: dict[str, Tensor]) -> None:
        old, new = "language_model.model.", "model.language_model."
        for name in list(tensors):
            for one, other in ((old, new), (new, old)):
                if name.startswith(one):
                    tensors[other + name.removeprefix(one)] = tensors.pop(name)
                    break

    _edit_tensors(path, turn)
    assert torch.equal(_logits(load_runner(path, SETTINGS)), expected)
    _edit(path / "config.json", lambda raw: raw.pop("text_config"))
    with pytest.raises(CheckpointError, match="text_config"):
        load_runner(path, SETTINGS)


def test_families_are_small() -> None:
    for family in FAMILIES.values():
        source = Path(sys.modules[family.read_config.__module__].__file__ or "").read_text()
        assert len(source.splitlines()) < 100


def test_serving_does_not_import_transformers() -> None:
    code = (
        "import sys, parrot_engine.runner.loader, parrot_engine.runner.sampler;"
        "bad = {'transformers', 'tokenizers', 'jinja2'} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
