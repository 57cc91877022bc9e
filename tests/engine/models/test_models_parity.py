"""The builtin models against transformers, on the same weights, in float32.

Token-identical greedy decoding and logits within 1e-4, whatever the chunks, the batch, and the
place of the blocks. The controls at the end show that the comparison notices a broken part.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from harness.engine.checkpoints import CONFIGS, VOCAB_SIZE, load_reference, make_checkpoint
from harness.engine.paged import PagedHarness, PagedSequence
from parrot_engine import LLM, SamplingParams
from parrot_engine.attention.torch_backend import TorchAttention
from parrot_engine.batch import StepBatch
from parrot_engine.models import self_attention
from parrot_engine.models.ops import Angles
from parrot_engine.runner.loader import load_runner
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.runner.sampler import prompt_logprobs
from parrot_engine.settings import BuiltinSettings
from torch import Tensor
from transformers import PreTrainedModel

BLOCK = 16
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)
TOLERANCE = 1e-4


class Pair(NamedTuple):
    """One checkpoint in both engines."""

    runner: ModelRunner
    reference: PreTrainedModel


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp("checkpoints") / name for name in CONFIGS}


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Pair:
    return _pair(request.param, checkpoints[request.param])


@pytest.fixture(scope="module")
def windowed(checkpoints: dict[str, Path]) -> Pair:
    """A model in which every mask matters."""
    return _pair("mistral-window", checkpoints["mistral-window"])


def _pair(name: str, path: Path) -> Pair:
    if not path.exists():
        make_checkpoint(path, CONFIGS[name])
    return Pair(
        load_runner(path, BuiltinSettings(device="cpu", dtype="float32", num_blocks=64)),
        load_reference(path, torch.float32),
    )


def _prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCAB_SIZE - 1, (length,), generator=generator).tolist()


@torch.inference_mode()
def _reference_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def _worst(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max().nan_to_num(float("inf")))


def test_logits_of_whole_prompts(pair: Pair) -> None:
    harness = PagedHarness(pair.runner)
    rows = [harness.row(PagedSequence(), _prompt(length), "all") for length in LENGTHS]
    logits = pair.runner.execute(StepBatch(rows)).split(list(LENGTHS))
    for length, ours in zip(LENGTHS, logits, strict=True):
        theirs = _reference_logits(pair.reference, _prompt(length))
        assert _worst(ours, theirs) < TOLERANCE, length


@pytest.mark.parametrize("chunk", [1, 7, BLOCK])
def test_logits_of_prompts_filled_in_chunks(pair: Pair, chunk: int) -> None:
    prompt = _prompt(LENGTHS[-1])
    ours = PagedHarness(pair.runner).fill(PagedSequence(), prompt, chunk)
    assert _worst(ours, _reference_logits(pair.reference, prompt)) < TOLERANCE


@pytest.mark.parametrize("chunk", [7, 10_000])
def test_greedy_tokens_in_a_mixed_batch(pair: Pair, chunk: int) -> None:
    prompts = [_prompt(length) for length in LENGTHS]
    tokens, logits = PagedHarness(pair.runner).generate(prompts, 36, chunk=chunk)
    for prompt, generated, ours in zip(prompts, tokens, logits, strict=True):
        theirs = _reference_logits(pair.reference, prompt + generated[:-1])[len(prompt) - 1 :]
        # Every token is the reference's choice after the tokens before it: by induction the
        # whole text is what the reference would have generated.
        assert generated == theirs.argmax(dim=-1).tolist()
        assert _worst(ours, theirs) < TOLERANCE


def test_greedy_tokens_equal_generate(pair: Pair) -> None:
    prompt = _prompt(BLOCK + 1, seed=1)
    [tokens], _ = PagedHarness(pair.runner).generate([prompt], 32)
    inputs = torch.tensor([prompt])
    theirs = pair.reference.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=32,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert tokens == theirs[0, len(prompt) :].tolist()


def test_greedy_tokens_do_not_depend_on_the_batch(pair: Pair) -> None:
    prompts = [_prompt(length, seed=2) for length in LENGTHS]
    together, _ = PagedHarness(pair.runner, seed=1).generate(prompts, 24, chunk=5)
    alone = [PagedHarness(pair.runner).generate([prompt], 24)[0][0] for prompt in prompts]
    assert together == alone


@pytest.mark.parametrize("length", LENGTHS)
def test_forks_continue_like_their_parent(pair: Pair, length: int) -> None:
    harness = PagedHarness(pair.runner)
    parent, prompt = PagedSequence(), _prompt(length)
    harness.fill(parent, prompt, chunk=9)
    child, copies = harness.fork(parent)
    grandchild, more_copies = harness.fork(child)
    endings = [_prompt(6, seed=seed) for seed in (3, 4, 5)]
    rows = [
        harness.row(sequence, ending, "all")
        for sequence, ending in zip((parent, child, grandchild), endings, strict=True)
    ]
    logits = pair.runner.execute(StepBatch(rows, copies + more_copies)).split(6)
    for ending, ours in zip(endings, logits, strict=True):
        theirs = _reference_logits(pair.reference, prompt + ending)[length:]
        assert _worst(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "gemma3", "smollm3", "glm4", "olmo2"])
def test_what_the_prefix_cache_gives_is_what_was_computed(
    name: str, checkpoints: dict[str, Path]
) -> None:
    """The whole engine: prompts with one beginning, one after the other and all at once."""
    reference = _pair(name, checkpoints[name]).reference
    head = _prompt(3 * BLOCK + 5, seed=7)
    prompts = [head + _prompt(length, seed=8) for length in (1, 9, BLOCK)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM(str(checkpoints[name]), device="cpu", dtype="float32", num_blocks=64) as llm:
        outputs = [llm.generate(prompts[0], params)[0], *llm.generate(prompts, params)]
        assert llm.stats().cached_tokens >= 3 * (3 * BLOCK)
    for prompt, output in zip([prompts[0], *prompts], outputs, strict=True):
        tokens = output.outputs[0].token_ids
        theirs = _reference_logits(reference, prompt + tokens[:-1])[len(prompt) - 1 :]
        assert tokens == theirs.argmax(dim=-1).tolist()


def test_prompt_logprobs(pair: Pair) -> None:
    prompt = _prompt(LENGTHS[-1])
    logits = PagedHarness(pair.runner).fill(PagedSequence(), prompt, chunk=11)
    ours = prompt_logprobs(logits[:-1], prompt[1:], num_top=3)
    theirs = _reference_logits(pair.reference, prompt).log_softmax(dim=-1)
    for position, entry in enumerate(ours):
        assert entry.token_id == prompt[position + 1]
        assert entry.logprob == pytest.approx(float(theirs[position, entry.token_id]), abs=1e-4)
        values, ids = theirs[position].topk(3)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["llama-llama3", "qwen3"])
def test_bfloat16_is_as_close_as_transformers(name: str, checkpoints: dict[str, Path]) -> None:
    exact = _pair(name, checkpoints[name]).reference
    settings = BuiltinSettings(device="cpu", dtype="bfloat16", num_blocks=64)
    runner = load_runner(checkpoints[name], settings)
    rounded = load_reference(checkpoints[name], torch.bfloat16)
    prompt = _prompt(LENGTHS[-1])
    ours = PagedHarness(runner).fill(PagedSequence(), prompt, chunk=20)
    reference = _reference_logits(exact, prompt)
    error = (ours - reference).square().mean().sqrt()
    allowed = 2 * (_reference_logits(rounded, prompt).float() - reference).square().mean().sqrt()
    assert error < allowed


# -- controls: the comparisons above must notice these


def _error_of_mixed_batch(pair: Pair) -> float:
    prompts = [_prompt(length) for length in LENGTHS]
    tokens, logits = PagedHarness(pair.runner).generate(prompts, 4, chunk=7)
    return max(
        _worst(ours, _reference_logits(pair.reference, prompt + generated[:-1])[len(prompt) - 1 :])
        for prompt, generated, ours in zip(prompts, tokens, logits, strict=True)
    )


def test_control_nothing_broken(windowed: Pair) -> None:
    assert _error_of_mixed_batch(windowed) < TOLERANCE


def test_control_masks(windowed: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchAttention, "_mask", lambda self, excluded: torch.zeros(excluded.shape))
    assert _error_of_mixed_batch(windowed) > 100 * TOLERANCE


def test_control_tail_of_blocks(windowed: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_writes = TorchAttention._plan_writes
    monkeypatch.setattr(
        TorchAttention,
        "_plan_writes",
        lambda self, rows: plan_writes(self, rows)._replace(cleared=None),
    )
    assert _error_of_mixed_batch(windowed) == float("inf")


def test_control_window_off_by_one(windowed: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_decodes = TorchAttention._plan_decodes
    monkeypatch.setattr(
        TorchAttention,
        "_plan_decodes",
        lambda self, rows, offsets, group, window, num_tokens: plan_decodes(
            self, rows, offsets, group, window + 1, num_tokens=num_tokens
        ),
    )
    assert _error_of_mixed_batch(windowed) > 100 * TOLERANCE


def test_control_rotation(windowed: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = self_attention.rotate
    monkeypatch.setattr(
        self_attention,
        "rotate",
        lambda heads, angles, *rest: rotate(heads, Angles(angles.cos, 0.9 * angles.sin), *rest),
    )
    assert _error_of_mixed_batch(windowed) > 100 * TOLERANCE


def test_control_copies(windowed: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "_copy_blocks", lambda self, copies: None)
    with pytest.raises(AssertionError):
        test_forks_continue_like_their_parent(windowed, LENGTHS[-1])
