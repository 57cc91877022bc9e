"""Whole models on Triton's kernels, in the interpreter, against the same models on torch."""

from __future__ import annotations

from pathlib import Path

import harness.engine.interpreted  # noqa: F401 -- skips this module where it cannot run
import pytest
import torch
from harness.engine.checkpoints import CONFIGS, VOCAB_SIZE, make_checkpoint
from harness.engine.paged import PagedHarness
from parrot_engine.attention.triton_backend import TritonAttention
from parrot_engine.kernels.experts.grouped_tuning import MixtureTuning
from parrot_engine.kernels.selection import resolve_kernels
from parrot_engine.kernels.tuning import Tuning
from parrot_engine.models import triton_ops
from parrot_engine.runner.loader import load_runner
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.settings import BuiltinSettings

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")


def _runner(path: Path, kernels: str) -> ModelRunner:
    settings = BuiltinSettings(device="cpu", dtype="float32", num_blocks=32, kernels=kernels)
    return load_runner(path, settings)


@pytest.mark.parametrize(
    "name", ["llama-biases-mha", "mistral-window", "qwen2-windows", "qwen3", "qwen3-moe", "glm4"]
)
def test_greedy_tokens_and_logits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Few large programs, which the interpreter is fastest with.
    tile = Tuning("tile", 16, 64, 64, 4, 2)
    monkeypatch.setattr(triton_ops, "mixture_tuning", lambda *_, **__: MixtureTuning(tile, tile))
    path = make_checkpoint(tmp_path / name, CONFIGS[name])
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(0, VOCAB_SIZE - 1, (length,), generator=generator).tolist()
        for length in (1, 15, 30)
    ]
    triton = _runner(path, "triton")
    assert isinstance(triton._attention, TritonAttention)
    tokens, logits = PagedHarness(triton).generate(prompts, 4, chunk=13)
    expected, expected_logits = PagedHarness(_runner(path, "torch")).generate(prompts, 4, chunk=13)
    assert tokens == expected
    for ours, theirs in zip(logits, expected_logits, strict=True):
        assert float((ours - theirs).abs().max()) < 1e-4


def test_a_cpu_gets_torch() -> None:
    assert resolve_kernels("auto", torch.device("cpu")) == "torch"
