"""Rules of masks, and checks of the paged path against a model's own logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from harness.engine.checkpoints import CONFIGS
from parrot_engine.huggingface.packed_model import PAGED, PackedModel
from parrot_engine.huggingface.probe import UnpagedModelError, window_of
from parrot_engine.huggingface.self_check import pack_checked
from parrot_engine.models.config import GenerationDefaults
from parrot_engine.runner.model_runner import ModelRunner
from torch import Tensor, nn
from transformers import AttentionInterface, masking_utils


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (masking_utils.causal_mask_function, None),
        (masking_utils.sliding_window_causal_mask_function(7), 7),
        (masking_utils.sliding_window_causal_mask_function(100), None),
        (masking_utils.sliding_window_causal_mask_function(1), 1),
    ],
)
def test_windows_are_read_off_masks(rule: Any, window: int | None) -> None:
    assert window_of(rule, 100) == window


@pytest.mark.parametrize(
    "rule",
    [
        masking_utils.bidirectional_mask_function,
        masking_utils.chunked_causal_mask_function(32, torch.zeros(1, dtype=torch.int64)),
        masking_utils.and_masks(
            masking_utils.causal_mask_function, lambda batch, head, query, key: key != 3
        ),
        masking_utils.packed_sequence_mask_function(torch.zeros(1, 4)),
    ],
)
def test_other_masks_are_refused(rule: Any) -> None:
    with pytest.raises(UnpagedModelError, match=r"keys than the last|cannot be read"):
        window_of(rule, 100)


def small_runner(model: PackedModel, num_blocks: int) -> ModelRunner:
    return ModelRunner(
        model, GenerationDefaults([], {}), num_blocks=num_blocks, block_size=8,
        device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip


class Smeared(nn.Module):
    """Adds up neighbours of the row, as a convolution over a sequence does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.inner(hidden)
        return mixed + mixed.roll(1, dims=1)


class Broken(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.shape[1] < 4:
            raise RuntimeError("too few tokens")
        return hidden


class WideValues(nn.Module):
    """Attends with values of more elements than keys have."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **_: Any) -> Any:
        heads = hidden_states[:, None]
        attend = AttentionInterface()[self.inner.config._attn_implementation]
        values = torch.cat((heads, heads), dim=-1)
        out, _ = attend(self.inner, heads, heads, values, attention_mask, scaling=1.0)
        return out[:, :, 0, : heads.shape[-1]], None


def test_values_wider_than_keys_are_refused() -> None:
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"])).eval()
    model.model.layers[0].self_attn = WideValues(model.model.layers[0].self_attn)
    with pytest.raises(UnpagedModelError, match="its heads are not those of the tokens"):
        pack_checked(model, 512, 8, small_runner)


@pytest.mark.parametrize(
    ("make", "reason"),
    [(Smeared, "differ from its own by"), (lambda _: Broken(), "too few tokens")],
)
def test_a_model_that_computes_something_else_is_not_paged(make: Any, reason: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"])).eval()
    own = model.config._attn_implementation
    assert pack_checked(model, 512, 8, small_runner).config.num_layers == 3
    assert model.config._attn_implementation == PAGED
    model.set_attn_implementation(own)
    model.model.layers[1].mlp = make(model.model.layers[1].mlp)
    with pytest.raises(UnpagedModelError, match=reason):
        pack_checked(model, 512, 8, small_runner)
