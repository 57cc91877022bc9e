"""Whole models on the device against transformers on the same device and weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.engine.checkpoints import CONFIGS, VOCAB_SIZE, load_reference, make_checkpoint
from harness.engine.paged import PagedHarness, PagedSequence
from parrot_engine import LLM, SamplingParams
from parrot_engine.attention.triton_backend import TritonAttention
from parrot_engine.batch import StepBatch
from parrot_engine.loading.hub import DEMO_MODEL, resolve_model
from parrot_engine.runner.loader import load_runner
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.settings import BuiltinSettings
from parrot_engine.text import Tokenizer
from parrot_engine.text.loading import load_text_assets
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

pytestmark = pytest.mark.gpu

LENGTHS = (1, 15, 16, 17, 53, 300)
_SIZES = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
#: Heads of the sizes that real models have.
LARGER = {"llama": LlamaConfig(**_SIZES, head_dim=64), "qwen3": Qwen3Config(**_SIZES, head_dim=128)}


def _runner(path: Path, dtype: str, num_blocks: int = 256) -> ModelRunner:
    settings = BuiltinSettings(device="cuda", dtype=dtype, num_blocks=num_blocks, cuda_graphs="off")
    runner = load_runner(path, settings)
    assert isinstance(runner._attention, TritonAttention)
    return runner


def _reference(path: Path, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    return load_reference(path, dtype, attention).to("cuda")


@torch.inference_mode()
def _logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([token_ids], device="cuda")).logits[0].float()
    return logits


def _prompt(length: int, vocab_size: int = VOCAB_SIZE - 1, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(1, vocab_size, (length,), generator=generator).tolist()


@pytest.mark.parametrize("name", list(CONFIGS))
def test_float32_is_transformers(name: str, tmp_path: Path) -> None:
    """Identical greedy tokens in a mixed batch, and close logits."""
    path = make_checkpoint(tmp_path / name, CONFIGS[name])
    # Some versions take SDPA on a GPU, which has neither soft caps nor sinks.
    reference = _reference(path, torch.float32, "eager")
    longest = _runner(path, "float32").max_position - 36
    prompts = [_prompt(length) for length in LENGTHS if length <= longest]
    for chunk in (13, 10_000) if name in ("llama", "qwen2-windows") else (53,):
        harness = PagedHarness(_runner(path, "float32"))
        tokens, logits = harness.generate(prompts, 36, chunk=chunk)
        for prompt, generated, ours in zip(prompts, tokens, logits, strict=True):
            theirs = _logits(reference, prompt + generated[:-1])[len(prompt) - 1 :]
            assert generated == theirs.argmax(dim=-1).tolist()
            assert float((ours - theirs).abs().max()) < 1e-4


class _Rounded(NamedTuple):
    """bfloat16 against float32 of transformers, and against transformers in bfloat16."""

    #: Root mean square errors of the logits against float32, texts added up.
    error: float
    their_error: float
    #: Shares of places with the same most probable token.
    ours_theirs: float
    ours_exact: float
    theirs_exact: float


def _round(path: Path, texts: Sequence[list[int]], num_decoded: int, chunk: int) -> _Rounded:
    """Teacher forcing: texts are filled in chunks, and the last tokens come one by one."""
    runner = _runner(path, "bfloat16", num_blocks=600)
    exact, rounded = _reference(path, torch.float32), _reference(path, torch.bfloat16)
    harness = PagedHarness(runner)
    errors, places, same = torch.zeros(2), 0, torch.zeros(3)
    for text in texts:
        sequence = PagedSequence()
        filled = harness.fill(sequence, text[:-num_decoded], chunk=chunk)
        decoded = [
            runner.execute(StepBatch([harness.row(sequence, [token])]))
            for token in text[-num_decoded:]
        ]
        logits = (torch.cat([filled, *decoded]), _logits(rounded, text), _logits(exact, text))
        errors += torch.tensor(
            [float((own - logits[2]).square().mean().sqrt()) for own in logits[:2]]
        )
        ours, theirs, expected = (own.argmax(dim=-1) for own in logits)
        same += torch.tensor(
            [int((a == b).sum()) for a, b in ((ours, theirs), (ours, expected), (theirs, expected))]
        )
        places += len(text)
    result = _Rounded(*errors.tolist(), *(same / places).tolist())
    print(path.name, places, "places", result)
    return result


@pytest.mark.parametrize("name", list(LARGER))
def test_bfloat16_is_as_close_as_transformers(name: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / name, LARGER[name])
    result = _round(path, [_prompt(1500, 2048, seed) for seed in range(4)], 100, chunk=600)
    assert result.error < 1.2 * result.their_error
    # Random weights tie often; what counts is that no more is lost than rounding takes anyway.
    assert result.ours_exact > result.theirs_exact - 0.01


def test_trained_weights_in_bfloat16_choose_the_tokens_of_float32() -> None:
    """The demo model on passages of books that it was not trained on."""
    path = resolve_model(DEMO_MODEL)
    tokenizer = Tokenizer(load_text_assets(path))
    passages = Path(__file__).parents[1] / "engine" / "held_out_passages.txt"
    texts = passages.read_text(encoding="utf-8").strip().split("\n\n***\n\n")
    result = _round(path, [tokenizer.encode(text) for text in texts], 50, chunk=100)
    assert result.error < 1.2 * result.their_error
    assert result.ours_exact > 0.97
    assert result.ours_exact > result.theirs_exact - 0.01


def test_forks_share_blocks_and_continue_alike(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "qwen3", LARGER["qwen3"])
    runner = _runner(path, "float32", num_blocks=600)
    reference = _reference(path, torch.float32)
    harness = PagedHarness(runner)
    parent = PagedSequence()
    prompt = _prompt(1100, 2048)
    harness.fill(parent, prompt, chunk=700)
    children, copies = [], []
    for _ in range(40):
        child, copied = harness.fork(parent)
        children.append(child)
        copies += copied
    endings = [_prompt(5, 2048, seed) for seed in range(len(children))]
    got: list[list[Tensor]] = [[] for _ in children]
    for step in range(5):
        rows = [
            harness.row(child, [ending[step]])
            for child, ending in zip(children, endings, strict=True)
        ]
        out = runner.execute(StepBatch(rows, copies if step == 0 else []))
        for index, row in enumerate(out):
            got[index].append(row)
    for ending, logits in zip(endings, got, strict=True):
        theirs = _logits(reference, prompt + ending)[len(prompt) :]
        assert float((torch.stack(logits) - theirs).abs().max()) < 2e-4


def test_a_checkpoint_gets_triton_by_default_and_torch_on_request(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "llama", CONFIGS["llama"])
    settings = BuiltinSettings(device="cuda", num_blocks=64, kernels="torch")
    prompts = [_prompt(length) for length in LENGTHS]
    plain, _ = PagedHarness(load_runner(path, settings)).generate(prompts, 8)
    ours, _ = PagedHarness(_runner(path, "float32", 64)).generate(prompts, 8)
    assert ours == plain


def test_the_offline_api_gives_what_it_gives_on_a_cpu(tmp_path: Path) -> None:
    """The whole engine: batching, caching, forks, sampling, with prompts that begin alike."""
    path = make_checkpoint(tmp_path / "mistral", CONFIGS["mistral"])
    head = "The parrot said to the gateway, and said it again: " * 4
    prompts = [head + ending for ending in ("one", "two", "three, and four", "", "five")]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    texts = []
    for device in ("cuda", "cpu"):
        with LLM(str(path), device=device, dtype="float32", num_blocks=200) as llm:
            outputs = llm.generate([head], params) + llm.generate(prompts, params, n=2)
            texts.append([[o.token_ids for o in output.outputs] for output in outputs])
            assert llm.stats().cached_tokens > 0
    assert texts[0] == texts[1]
