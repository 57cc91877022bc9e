"""A deterministic engine says the same to the bit: beside others, behind a cached prefix, anew."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.engine.checkpoints import CONFIGS, VOCAB_SIZE, make_checkpoint
from parrot_engine import LLM, SamplingParams
from transformers import LlamaConfig

pytestmark = pytest.mark.gpu

_LLAMA = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    bos_token_id=None,
    eos_token_id=None,
)
_DRAW = random.Random(7)
PROMPTS = [[_DRAW.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 5, 90, 300, 513, 1200)]
OTHERS = [[_DRAW.randrange(VOCAB_SIZE) for _ in range(n % 200 + 1)] for n in range(0, 4000, 97)]
TOKENS = 48


def _params(seed: int | None) -> SamplingParams:
    temperature = 0.0 if seed is None else 1.0
    return SamplingParams(
        max_tokens=TOKENS,
        temperature=temperature,
        top_p=0.95,
        seed=seed,
        logprobs=2,
        ignore_eos=True,
    )


def _said(llm: LLM, prompts: list[list[int]], params: SamplingParams, **more: Any) -> list[Any]:
    outputs = llm.generate(prompts, params, **more)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs[: len(PROMPTS)]]


@pytest.mark.parametrize("config", [_LLAMA, CONFIGS["gemma2"], CONFIGS["qwen3"]], ids=type)
@pytest.mark.parametrize("seed", [None, 11])
def test_the_same_to_the_bit(config: Any, seed: int | None, tmp_path: Path) -> None:
    path = str(make_checkpoint(tmp_path, config))
    options: dict[str, Any] = {
        "device": "cuda", "dtype": "bfloat16", "num_blocks": 2000, "skip_tokenizer": True,
        "deterministic": True,
    }  # fmt: skip
    params = _params(seed)
    limit = min(len(p) for p in PROMPTS[3:]) if config is not _LLAMA else 4096
    prompts = [p for p in PROMPTS if len(p) <= limit]
    with LLM(path, **options) as llm:
        alone = [_said(llm, [prompt], params, detokenize=False)[0] for prompt in prompts]
        # Now their prefixes are cached.
        again = [_said(llm, [prompt], params, detokenize=False)[0] for prompt in prompts]
        assert again == alone
    with LLM(path, **options, prefix_caching=False, cuda_graphs="off", overlap="off") as llm:
        beside = _said(llm, [*prompts, *OTHERS], params, detokenize=False)
        assert beside[: len(prompts)] == alone
        if seed is not None:
            return
        # An engine that goes on with what another one said.
        half = TOKENS // 2
        texts = [prompt + said[:half] for prompt, (said, _) in zip(prompts, alone, strict=True)]
        rest = _said(llm, texts, params, detokenize=False)
        for (said, scores), (_, (tokens, logprobs)) in zip(rest, enumerate(alone), strict=False):
            assert said[: TOKENS - half] == tokens[half:]
            assert scores is not None
            assert logprobs is not None
            assert scores[: TOKENS - half] == logprobs[half:]
