"""Models of transformers over paged KV: transformers' own tokens, whatever runs beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from harness.engine.checkpoints import CONFIGS, load_reference, make_checkpoint
from harness.engine_checks import greedy, run_until_idle, tokens_of
from parrot_engine.exceptions import CheckpointError
from parrot_engine.huggingface import HuggingFaceEngine, HuggingFaceSettings
from parrot_engine.loading.factory import EngineOptions, load_engine
from parrot_engine.protocol import Event, Fill, Filled, Generate, Grammar, SamplingParams
from parrot_engine.text import Tokenizer

_TOKENS: dict[str, Any] = {
    "vocab_size": 257, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None,
}  # fmt: skip
_SMALL: dict[str, Any] = _TOKENS | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip
_GROUPED = _SMALL | {"num_key_value_heads": 2}

#: Families that the builtin engine does not know, and some of what it does know whose attention is
#: special: windows in some layers, bounded scores, sinks.
PAGED: dict[str, Any] = {
    "gpt2": transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, n_positions=256, scale_attn_by_inverse_layer_idx=True,
        **_TOKENS,
    ),
    "gpt-bigcode": transformers.GPTBigCodeConfig(
        n_embd=32, n_layer=2, n_head=2, n_positions=256, **_TOKENS
    ),
    "gpt-neox": transformers.GPTNeoXConfig(**_SMALL),
    "starcoder2": transformers.Starcoder2Config(**_GROUPED, sliding_window=13),
    "phi": transformers.PhiConfig(**_SMALL),
    "cohere": transformers.CohereConfig(**_SMALL, logit_scale=0.25),
    "nemotron": transformers.NemotronConfig(**_GROUPED, head_dim=16),
    "opt": transformers.OPTConfig(
        hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, word_embed_proj_dim=64, **_TOKENS,
    ),
    "exaone4": transformers.Exaone4Config(**_GROUPED, sliding_window=11, sliding_window_pattern=2),
    "granite-moe": transformers.GraniteMoeConfig(
        **_GROUPED, num_local_experts=4, num_experts_per_tok=2
    ),
    # Heads of values are smaller than those of keys.
    "deepseek-v2": transformers.DeepseekV2Config(
        **_SMALL, kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=16,
        v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1,
        moe_intermediate_size=32, n_shared_experts=1, n_group=1, topk_group=1,
    ),
    "gemma2": CONFIGS["gemma2"],
    "gpt-oss": CONFIGS["gpt-oss"],
}  # fmt: skip

#: Families that are refused, and why.
UNPAGED: dict[str, tuple[Any, str]] = {
    "falcon-alibi": (
        transformers.FalconConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True, **_TOKENS
        ),
        "cannot be replaced",
    ),
    "stablelm": (transformers.StableLmConfig(**_GROUPED), "cannot be replaced"),
    "mpt": (
        transformers.MptConfig(d_model=64, n_layers=2, n_heads=4, max_seq_len=256, **_TOKENS),
        "cannot be replaced",
    ),
    "lfm2": (
        transformers.Lfm2Config(**_GROUPED, layer_types=["conv", "full_attention"]),
        "of 2 layers 1 attend",
    ),
    "jamba": (
        transformers.JambaConfig(
            **_GROUPED, num_experts=2, mamba_d_state=8, use_mamba_kernels=False,
            attn_layer_period=2, attn_layer_offset=1,
        ),
        "cannot be replaced",
    ),
    "rwkv": (
        transformers.RwkvConfig(
            hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, context_length=64,
            **_TOKENS,
        ),
        "cannot be replaced",
    ),
    "dynamic": (CONFIGS["llama-dynamic"], "dynamic"),
    # Its chunks of attention are shorter than its contexts.
    "llama4": (
        transformers.Llama4TextConfig(
            **_GROUPED, head_dim=16, intermediate_size_mlp=96, num_local_experts=2,
            attention_chunk_size=32,
        ),
        "other keys than the last ones",
    ),
}  # fmt: skip

SETTINGS = HuggingFaceSettings(
    device="cpu", dtype="float32", num_blocks=96, block_size=8, max_batch_tokens=48
)

BASE = list(range(90, 127))
PROMPTS = {1: [5], 2: list(range(1, 60)), 3: [7, 7, 200, 3], 4: [*BASE, 1, 2]}


class Model:
    """A checkpoint, and what transformers computes with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reference = load_reference(folder, torch.float32)

    def open(self, settings: HuggingFaceSettings = SETTINGS) -> HuggingFaceEngine:
        return HuggingFaceEngine.load(self.folder, settings, model="m")

    @torch.inference_mode()
    def check_greedy(self, prompt: list[int], generated: list[int]) -> None:
        """Check that each token is the likeliest behind those before it, in one forward pass."""
        logits = self._reference(torch.tensor([prompt + generated]), use_cache=False).logits[0]
        assert generated == logits[len(prompt) - 1 : -1].argmax(1).tolist()


@pytest.fixture(scope="module", params=PAGED)
def paged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), PAGED[request.param]))


def cached_tokens(events: list[Event], context_id: int) -> int:
    return sum(
        e.cached_tokens for e in events if isinstance(e, Filled) if e.context_id == context_id
    )


def test_tokens_are_those_of_transformers(paged: Model) -> None:
    """Alone, in a batch with prompts in chunks, forked, and behind a prefix that is cached."""
    engine = paged.open()
    assert engine.info.kind == "huggingface"
    assert engine.info.reports_blocks
    alone = tokens_of(run_until_idle(engine, Fill(9, PROMPTS[2]), Generate(9, greedy(8))), 9)
    paged.check_greedy(PROMPTS[2], alone)
    primitives: list[Any] = []
    for number, prompt in PROMPTS.items():
        primitives += [Fill(number, prompt), Generate(number, greedy(12))]
    events = run_until_idle(engine, *primitives)
    for number, prompt in PROMPTS.items():
        paged.check_greedy(prompt, tokens_of(events, number))
    assert tokens_of(events, 2)[:8] == alone
    # The whole blocks of what came before, without its last token.
    assert cached_tokens(events, 2) == 56
    forked = run_until_idle(
        engine,
        Fill(20, [*BASE, 9]),
        Fill(21, [4], parent_context_id=20), Generate(21, greedy(6)),
        Fill(22, [8, 8], parent_context_id=20), Generate(22, greedy(6)),
        Generate(23, greedy(6), parent_context_id=20),
    )  # fmt: skip
    assert cached_tokens(forked, 20) == 32
    for number, more in ((21, [4]), (22, [8, 8]), (23, [])):
        paged.check_greedy([*BASE, 9, *more], tokens_of(forked, number))
    engine.close()


@pytest.mark.parametrize("name", UNPAGED)
def test_other_models_are_refused_by_name(name: str, tmp_path: Path) -> None:
    config, reason = UNPAGED[name]
    model = Model(make_checkpoint(tmp_path, config))
    with pytest.raises(CheckpointError, match=reason) as refused:
        model.open()
    assert config.model_type.split("_")[0] in str(refused.value).lower()


@pytest.fixture(scope="module")
def starcoder(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), PAGED["starcoder2"]))


def test_a_batch_with_grammars(starcoder: Model) -> None:
    """An unknown architecture goes there by itself, and follows a grammar beside free text."""
    engine, text = load_engine(
        EngineOptions(str(starcoder.folder), device="cpu", dtype="float32", num_blocks=96)
    )
    assert engine.info.kind == "huggingface"
    assert engine.info.supports_grammars
    tokenizer = Tokenizer(text)
    prompt = tokenizer.encode("Is a cat a dog?")
    choice = SamplingParams(20, grammar=Grammar("choice", '["yes", "no"]'), seed=1)
    events = run_until_idle(
        engine,
        Fill(1, prompt), Generate(1, choice),
        Fill(2, prompt), Generate(2, greedy(12)),
    )  # fmt: skip
    assert tokenizer.decode(tokens_of(events, 1)) in ("yes", "no")
    starcoder.check_greedy(prompt, tokens_of(events, 2))
    engine.close()


def test_few_blocks_draft_tokens_and_host_memory_change_nothing(starcoder: Model) -> None:
    """The loop treats paged KV as the builtin engine's does."""
    engine = starcoder.open(
        HuggingFaceSettings(
            device="cpu", dtype="float32", block_size=8, num_blocks=16, max_batch_tokens=32,
            speculative_tokens=3, speculative_min_ngram=1, host_blocks=8, host_min_tokens=8,
        )
    )  # fmt: skip
    primitives: list[Any] = []
    for number, prompt in PROMPTS.items():
        primitives += [Fill(number, prompt), Generate(number, greedy(30))]
    events = run_until_idle(engine, *primitives)
    assert engine.stats().preemptions > 0
    for number, prompt in PROMPTS.items():
        starcoder.check_greedy(prompt, tokens_of(events, number))
    engine.close()
