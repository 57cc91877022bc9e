"""LoRA adapters against transformers with the same weights merged, in float32 on a CPU.

Tokens are those of greedy decoding: by induction each is the reference's choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from harness.engine.checkpoints import CONFIGS, VOCAB_SIZE, load_reference, make_checkpoint
from harness.engine.quantized_checkpoints import write_checkpoint
from harness.lora_folders import make_adapter
from parrot_engine import LLM, SamplingParams
from parrot_engine.protocol import TokenLogprobs
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

TOLERANCE = 2e-4


class Case(NamedTuple):
    llm: LLM
    #: By adapter, None for the base.
    references: dict[str | None, PreTrainedModel]


class Given(NamedTuple):
    """How an adapter is made, and the factors on B A that this stands for."""

    options: dict[str, Any]
    scales: dict[str, float]


_ALPHA, _ROOT = 6.0, 8**-0.5
_PATTERNS = {"ranks": {"v_proj": 2}, "alpha_pattern": {"layers.*v_proj": 3.0}}
FAMILIES: dict[str, dict[str, Given]] = {
    "llama": {
        "one": Given({}, {"": _ALPHA / 4}),
        "two": Given(
            {"rank": 8, "use_rslora": True, "targets": ("q_proj", "v_proj"), **_PATTERNS},
            {"q_proj": _ALPHA * _ROOT, "": 3.0 * 2**-0.5},
        ),
        "three": Given({"rank": 16, "target_modules": "all-linear"}, {"": _ALPHA / 16}),
    },
    "phi3": {
        "one": Given(
            {"targets": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}, {"": _ALPHA / 4}
        ),
        "two": Given({"rank": 8, "targets": ("qkv_proj",)}, {"": _ALPHA / 8}),
        "three": Given(
            {
                "targets": ("gate_up_proj", "down_proj"),
                "target_modules": r".*\.mlp\.(gate_up|down)_proj",
            },
            {"": _ALPHA / 4},
        ),
    },
    "qwen3-moe": {
        "one": Given({"targets": ("q_proj", "k_proj", "v_proj", "o_proj")}, {"": _ALPHA / 4}),
        "two": Given({"rank": 8, "targets": ("o_proj",)}, {"": _ALPHA / 8}),
        "three": Given({"targets": ("k_proj",), "fan_in_fan_out": True}, {"": _ALPHA / 4}),
    },
}


def merged(base: Path, adapter: Path | None, scales: Mapping[str, float]) -> PreTrainedModel:
    """The base with B A added to its weights, times a factor by the ends of names, or `""`."""
    model = load_reference(base, torch.float32)
    if adapter is not None:
        tensors = load_file(adapter / "adapter_model.safetensors")
        for name, module in model.named_modules():
            prefix = f"base_model.model.{name}.lora_"
            if f"{prefix}A.weight" in tensors:
                scale = scales.get(name.rpartition(".")[2], scales[""])
                added = scale * tensors[f"{prefix}B.weight"] @ tensors[f"{prefix}A.weight"]
                assert isinstance(module, nn.Linear)
                module.weight.data += added
    return model


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("adapters")
    base = folder / "base"
    make_checkpoint(base, CONFIGS[request.param])
    chosen = FAMILIES[request.param]
    paths = {
        name: make_adapter(folder / name, base, seed=number, **given.options)
        for number, (name, given) in enumerate(chosen.items())
    }
    references: dict[str | None, PreTrainedModel] = {
        name: merged(base, path, chosen[name].scales) for name, path in paths.items()
    }
    references[None] = merged(base, None, {})
    with LLM(
        str(base), kind="builtin", skip_tokenizer=True, device="cpu", dtype="float32",
        num_blocks=96, max_batch_tokens=48, speculative_tokens=3, speculative_min_ngram=1,
        adapters={name: str(path) for name, path in paths.items()}, max_loras=2,
    ) as llm:  # fmt: skip
        yield Case(llm, references)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE - 1, (length,), generator=generator).tolist()


@torch.inference_mode()
def logits_of(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def check(
    reference: PreTrainedModel,
    prompt: list[int],
    tokens: list[int],
    logprobs: Sequence[TokenLogprobs] | None = None,
) -> None:
    theirs = logits_of(reference, prompt + tokens[:-1])[len(prompt) - 1 :]
    assert tokens == theirs.argmax(dim=-1).tolist()
    expected = theirs.log_softmax(dim=-1)
    for entry, row in zip(logprobs or (), expected, strict=bool(logprobs)):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=TOLERANCE)


def test_adapters_and_the_base_in_one_batch(case: Case) -> None:
    """More adapters than slots, prompts in chunks; every answer is that of its own weights."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
    names: list[str | None] = ["one", None, "two", "three", "one", None, "three", "two"]
    prompts = [prompt_of(5 + 17 * number, seed=number) for number in range(len(names))]
    for prompt, name, output in zip(
        prompts, names, case.llm.generate(prompts, params, adapter=names), strict=True
    ):
        [completion] = output.outputs
        check(case.references[name], prompt, completion.token_ids, completion.logprobs)


def test_adapters_do_something(case: Case) -> None:
    prompt = prompt_of(40, seed=50)
    last = [logits_of(model, prompt)[-1] for model in case.references.values()]
    for index, one in enumerate(last):
        assert all(float((one - other).abs().max()) > 1e-2 for other in last[:index])


def test_cached_prefixes_belong_to_an_adapter(case: Case) -> None:
    prompt = prompt_of(70, seed=60)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    for name in ("one", None, "two"):
        [first] = case.llm.generate([prompt], params, adapter=name)
        [again] = case.llm.generate([prompt], params, adapter=name)
        assert (first.cached_tokens, again.cached_tokens) == (0, 64)
        check(case.references[name], prompt, again.outputs[0].token_ids)


def test_forks_keep_the_adapter(case: Case) -> None:
    head, params = prompt_of(37, seed=70), SamplingParams(max_tokens=6, temperature=0)
    for name in ("three", "two"):
        with case.llm.context(adapter=name) as context:
            context.fill(head)
            for seed in (71, 72):
                with context.fork() as child:
                    tail = prompt_of(9, seed=seed)
                    child.fill(tail)
                    check(case.references[name], head + tail, child.generate(params).token_ids)


def test_draft_tokens_are_verified_with_the_adapter(case: Case) -> None:
    """A repeated text is drafted; outputs are those without drafts."""
    prompt = prompt_of(6, seed=80) * 8
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    before = case.llm.stats().proposed_tokens
    for name in ("one", "two"):
        [output] = case.llm.generate([prompt], params, adapter=name)
        check(case.references[name], prompt, output.outputs[0].token_ids)
    assert case.llm.stats().proposed_tokens > before


@pytest.mark.parametrize("form", ["awq", "fp8-blocks"])
def test_on_quantised_weights(form: str, tmp_path: Path) -> None:
    """The same as on the dense weights that the codes stand for."""
    path, dense = write_checkpoint(tmp_path, form)
    adapter = make_adapter(tmp_path / "adapter", dense)
    prompt, params = prompt_of(20), SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    answers = []
    for base in (path, dense):
        with LLM(
            str(base), kind="builtin", skip_tokenizer=True, device="cpu", dtype="float32",
            num_blocks=16, adapters={"a": str(adapter)},
        ) as llm:  # fmt: skip
            outputs = llm.generate([prompt, prompt], params, adapter=["a", None])
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]
