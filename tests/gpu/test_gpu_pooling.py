"""Vectors and scores on a GPU: those of a CPU in float32, within what 16 bits lose."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.pooling_checkpoints import VOCAB, write_logit_score, write_model, write_modules
from parrot_engine.attention.packed import PackedAttention
from parrot_engine.loading.factory import EngineOptions, load_engine_alone
from parrot_engine.protocol import Engine, Pool, Pooled

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
LENGTHS = (1, 5, 5, 17, 64, 64, 130)


def run(engine: Engine, texts: list[list[int]]) -> np.ndarray:
    engine.submit([Pool(number, ids) for number, ids in enumerate(texts)])
    values: dict[int, np.ndarray] = {}
    while len(values) < len(texts):
        for event in engine.step().events:
            assert isinstance(event, Pooled), event
            values[event.context_id] = np.frombuffer(event.values, "<f4")
    return np.array([values[number] for number in range(len(texts))])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_packed_attention(causal: bool, window: int | None, kv_heads: int) -> None:
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    shapes = ((tokens, 8, 64), (tokens, kv_heads, 64), (tokens, kv_heads, 64))
    heads = [torch.randn(shape, device=CUDA, dtype=torch.bfloat16) for shape in shapes]
    exact = [part.double().cpu() for part in heads]
    outs = []
    for device, parts in ((CUDA, heads), (torch.device("cpu"), exact)):
        attention = PackedAttention(device, causal=causal)
        plan = attention.plan(LENGTHS)
        out = attention.forward(*parts, parts[0], plan, window=window, scale=0.125)
        outs.append(out.double().cpu())
    assert torch.allclose(*outs, atol=2e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "name",
    [
        *("bert", "xlm-roberta", "mpnet", "modernbert", "nomic-bert", "qwen3", "qwen3-window"),
        *("bert-score", "qwen3-rerank"),
    ],
)
def test_vectors_and_scores(name: str, dtype: str, tmp_path: Path) -> None:
    write_model(name, tmp_path)
    if name.endswith("rerank"):
        write_logit_score(tmp_path)
    elif not name.endswith("score"):
        write_modules(tmp_path)
    draw = random.Random(1)
    texts = [[draw.randrange(2, len(VOCAB)) for _ in range(n)] for n in (7, 1, 30, 7, 12, 2, 60)]
    exact, there = (
        run(load_engine_alone(EngineOptions(str(tmp_path), device=device, dtype=each)), texts)
        for device, each in (("cpu", "float32"), ("cuda", dtype))
    )
    assert np.abs(there - exact).max() < (1e-4 if dtype == "float32" else 6e-2)
