"""Vectors and scores equal those of transformers on the same weights, alone and batched."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.pooling_checkpoints import VOCAB, change_config, write_model, write_modules
from parrot_engine.exceptions import PoolingModelError
from parrot_engine.loading.factory import EngineOptions, load_engine_alone
from parrot_engine.models.families import modernbert
from parrot_engine.protocol import Engine, Pool, Pooled
from safetensors.torch import load_file
from transformers import PreTrainedModel

_RANDOM = random.Random(3)
#: Token ids of texts, several of one length.
TEXTS = [[_RANDOM.randrange(2, len(VOCAB)) for _ in range(n)] for n in (7, 1, 30, 7, 12, 7, 2)]


def load(folder: Path, **options: Any) -> Engine:
    return load_engine_alone(EngineOptions(str(folder), device="cpu", dtype="float32", **options))


def run(engine: Engine, *pools: Pool) -> dict[int, np.ndarray]:
    engine.submit(pools)
    values: dict[int, np.ndarray] = {}
    while len(values) < len(pools):
        for event in engine.step().events:
            assert isinstance(event, Pooled), event
            values[event.context_id] = np.frombuffer(event.values, "<f4")
    return values


def states(model: PreTrainedModel, ids: list[int], types: list[int] | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0]


def pooled(hidden: torch.Tensor, mode: str) -> torch.Tensor:
    """Pool one text as sentence-transformers does."""
    if mode == "mean":
        return hidden.sum(0) / len(hidden)
    if mode == "max":
        return hidden.max(0).values
    return hidden[0] if mode == "cls" else hidden[-1]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("bert", "mean"),
        ("bert", "cls"),
        ("bert", "max"),
        ("xlm-roberta", "cls"),
        ("distilbert", "mean"),
        ("mpnet", "mean"),
        ("modernbert", "mean"),
        ("nomic-bert", "mean"),
        ("qwen3", "lasttoken"),
        ("qwen3-window", "mean"),
    ],
)
def test_vectors_are_those_of_transformers(name: str, mode: str, tmp_path: Path) -> None:
    model = write_model(name, tmp_path)
    write_modules(tmp_path, mode=mode)
    engine = load(tmp_path)
    together = run(engine, *(Pool(i, ids) for i, ids in enumerate(TEXTS)))
    for number, ids in enumerate(TEXTS):
        wanted = torch.nn.functional.normalize(pooled(states(model, ids), mode), dim=0).numpy()
        assert np.abs(together[number] - wanted).max() < 1e-5
        alone = run(engine, Pool(100 + number, ids))[100 + number]
        assert np.abs(alone - wanted).max() < 1e-5
    assert engine.stats().steps < 2 * len(TEXTS)


def test_biases_of_distant_tokens(tmp_path: Path) -> None:
    """Texts of more tokens than there are buckets, and than there are different distances."""
    model = write_model("mpnet", tmp_path)
    texts = [[_RANDOM.randrange(2, len(VOCAB)) for _ in range(n)] for n in (300, 40)]
    vectors = run(load(tmp_path), *(Pool(i, ids) for i, ids in enumerate(texts)))
    for number, ids in enumerate(texts):
        wanted = pooled(states(model, ids), "mean").numpy()
        assert np.abs(vectors[number] - wanted).max() < 1e-5


def test_nomic_bert_as_it_was_first_published(tmp_path: Path) -> None:
    """The keys of the code that came with it mean the same, and its switches are known."""
    model = write_model("nomic-bert", tmp_path)
    write_modules(tmp_path)
    path = tmp_path / "config.json"
    given = json.loads(path.read_text())
    published = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": len(VOCAB),
        "n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": 256,
        "max_trained_positions": 64, "layer_norm_epsilon": given["layer_norm_eps"],
        "activation_function": "swiglu", "causal": False, "mlp_fc1_bias": False,
        "mlp_fc2_bias": False, "parallel_block": False, "prenorm": False, "qkv_proj_bias": False,
        "rotary_emb_base": 7, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "type_vocab_size": 2,
        "use_rms_norm": False, "scale_attn_by_inverse_layer_idx": False,
    }  # fmt: skip
    path.write_text(json.dumps(published))
    engine = load(tmp_path)
    assert engine.info.max_context_tokens == 64
    wanted = torch.nn.functional.normalize(states(model, TEXTS[2]).mean(0), dim=0).numpy()
    assert np.abs(run(engine, Pool(1, TEXTS[2]))[1] - wanted).max() < 1e-5
    for switch in ({"moe_every_n_layers": 2}, {"qkv_proj_bias": True}, {"prenorm": True}):
        path.write_text(json.dumps({**published, **switch}))
        with pytest.raises(PoolingModelError, match=next(iter(switch))):
            load(tmp_path)


def test_modernbert_as_it_is_published() -> None:
    """Before transformers 5 its layers and angles were described by other keys."""
    shared = {
        "architectures": ["ModernBertModel"], "vocab_size": 30, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }  # fmt: skip
    old = {"global_attn_every_n_layers": 3, "global_rope_theta": 9e4, "local_rope_theta": 1e3}
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    angles = {
        "full_attention": {"rope_type": "default", "rope_theta": 9e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    }
    new = {"layer_types": kinds, "rope_parameters": angles, "local_attention": 128}
    config = modernbert.read_config({**shared, **old})
    assert config == modernbert.read_config({**shared, **new})
    assert config.windows == (None, 65, 65, None)
    assert (config.full_rope.theta, config.window_rope.theta) == (9e4, 1e3)


def test_products_behind_the_pooling_and_dimensions(tmp_path: Path) -> None:
    model = write_model("bert", tmp_path)
    write_modules(tmp_path, dense=24)
    weights = load_file(tmp_path / "2_Dense" / "model.safetensors")
    engine = load(tmp_path)
    assert engine.info.pooling is not None
    assert engine.info.pooling.dimensions == 24
    values = run(engine, Pool(1, TEXTS[0]), Pool(2, TEXTS[0], dimensions=8))
    dense = torch.nn.functional.linear(
        pooled(states(model, TEXTS[0]), "mean"), weights["linear.weight"], weights["linear.bias"]
    ).tanh()
    for number, size in ((1, 24), (2, 8)):
        wanted = torch.nn.functional.normalize(dense[:size], dim=0).numpy()
        assert np.abs(values[number] - wanted).max() < 1e-5


def test_without_files_a_vector_is_the_mean_and_has_its_length(tmp_path: Path) -> None:
    model = write_model("bert", tmp_path)
    vector = run(load(tmp_path), Pool(1, TEXTS[2]))[1]
    assert np.abs(vector - pooled(states(model, TEXTS[2]), "mean").numpy()).max() < 1e-5


def test_a_decoder_that_is_not_causal_sees_later_tokens(tmp_path: Path) -> None:
    write_model("qwen3", tmp_path)
    write_modules(tmp_path, mode="cls")
    first, other = [5, 6, 7], [5, 9, 8]
    causal = run(load(tmp_path), Pool(1, first), Pool(2, other))
    assert np.array_equal(causal[1], causal[2])
    change_config(tmp_path, is_causal=False)
    seeing = run(load(tmp_path), Pool(1, first), Pool(2, other))
    assert np.abs(seeing[1] - seeing[2]).max() > 1e-3


@pytest.mark.parametrize(
    "name", ["bert-score", "modernbert-score", "roberta-score", "xlm-roberta-score", "qwen3-score"]
)
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = write_model(name, tmp_path)
    engine = load(tmp_path)
    pairs = [(ids, min(4, len(ids) - 1)) for ids in TEXTS if len(ids) > 1]
    values = run(engine, *(Pool(i, ids, second) for i, (ids, second) in enumerate(pairs)))
    has_types = name == "bert-score" or name == "roberta-score"
    for number, (ids, second) in enumerate(pairs):
        types = [int(place >= second) for place in range(len(ids))]
        given = {"token_type_ids": torch.tensor([types])} if has_types else {}
        with torch.no_grad():
            logits = model(torch.tensor([ids]), **given).logits
        assert values[number].shape == (1,)
        assert abs(values[number][0] - logits.sigmoid().item()) < 1e-5


def test_scores_without_the_logistic_function(tmp_path: Path) -> None:
    model = write_model("bert-score", tmp_path)
    change_config(
        tmp_path, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"}
    )
    score = run(load(tmp_path), Pool(1, TEXTS[0], 3))[1][0]
    with torch.no_grad():
        types = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
        logit = model(torch.tensor([TEXTS[0]]), token_type_ids=types).logits.item()
    assert abs(score - logit) < 1e-5
