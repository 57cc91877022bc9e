"""A Llama decoder for training: no cache, no masks but the causal one, dropout in the residuals.

Parameter names are those of Hugging Face's ``LlamaForCausalLM``, so a state dict is a checkpoint.
Serving is not done with this.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the decoder."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 416
    num_hidden_layers: int = 7
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def to_config(self) -> dict[str, object]:
        """The same as Hugging Face's ``config.json``."""
        sizes = asdict(self)
        theta = sizes["rope_theta"]
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **sizes,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            # Weights are stored in bfloat16 but run in float32, where the same seed gives the same
            # text whatever else is in the batch.
            "dtype": "float32",
            "bos_token_id": 0,
            "eos_token_id": [1, 0],
            "pad_token_id": 0,
        }


class _RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.head_dim = shape.head_dim
        hidden, width = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(hidden, self.heads * width, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * width, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * width, bias=False)
        self.o_proj = nn.Linear(self.heads * width, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class _MLP(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = _RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = _MLP(shape)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + F.dropout(attended, self.dropout, self.training)
        made = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(made, self.dropout, self.training)


class _Decoder(nn.Module):
    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.norm = _RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class StoryModel(nn.Module):
    """Token ids ``[batch, length]`` to logits ``[batch, length, vocab]``; embeddings are tied."""

    def __init__(self, shape: ModelShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = dropout
        self.model = _Decoder(shape, dropout)
        width = shape.head_dim
        frequency = shape.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        angle = torch.outer(torch.arange(shape.max_position_embeddings).float(), frequency)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        residual = 0.02 / math.sqrt(2 * shape.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual if is_residual else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = F.dropout(self.model.embed_tokens(ids), self.dropout, self.training)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


@torch.no_grad()
def sample(
    model: StoryModel,
    ids: list[int],
    *,
    new_tokens: int,
    stop: set[int],
    temperature: float,
    top_p: float,
    seed: int,
) -> list[int]:
    """Continues `ids` by at most `new_tokens`, `stop` excluded. No cache: quadratic, for samples.

    A temperature of 0 is greedy.
    """
    device = model.cos.device
    generator = torch.Generator().manual_seed(seed)
    made: list[int] = []
    while len(made) < new_tokens:
        window = (ids + made)[-model.shape.max_position_embeddings :]
        logits = model(torch.tensor([window], device=device))[0, -1].float().cpu()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            chance, order = torch.softmax(logits / temperature, -1).sort(descending=True)
            chance[chance.cumsum(0) - chance > top_p] = 0
            token = int(order[torch.multinomial(chance, 1, generator=generator)])
        if token in stop:
            break
        made.append(token)
    return made
