"""A model that turns packed batches of token sequences into vectors or scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from parrot_engine.attention.packed import PackedAttention, PackedPlan
from parrot_engine.models.decoder import Decoder
from parrot_engine.models.encoder import Encoder
from parrot_engine.models.rotary_encoder import RotaryEncoder
from parrot_engine.pooling.config import PoolingConfig, PoolingMode
from parrot_engine.protocol import Pool
from parrot_engine.runner.model_runner import current_device

#: A function after the pooling, from `[num_texts, hidden_size]` to `[num_texts, out_size]`.
Head: TypeAlias = Callable[[Tensor], Tensor]


class TokenStates(Protocol):
    """Computes the hidden states of tokens."""

    def __call__(
        self, token_ids: Tensor, positions: Tensor, types: Tensor, plan: PackedPlan
    ) -> Tensor:
        """Return `[num_tokens, hidden_size]`; arguments as in `EncoderBody.forward`."""


class DecoderStates:
    """Hidden states of a decoder after its final norm."""

    def __init__(self, decoder: Decoder, attention: PackedAttention, device: torch.device) -> None:
        self._decoder = decoder
        self._attention = attention
        self._no_kv = torch.empty(decoder.config.num_layers, 0, device=device)

    def __call__(
        self, token_ids: Tensor, positions: Tensor, types: Tensor, plan: PackedPlan
    ) -> Tensor:
        decoder = self._decoder
        hidden = decoder(token_ids, positions, self._no_kv, self._attention, plan)
        normed: Tensor = decoder.model.norm(hidden)
        return normed


class EncoderStates:
    """Hidden states of an encoder's last layer."""

    def __init__(self, encoder: Encoder | RotaryEncoder, attention: PackedAttention) -> None:
        self._encoder = encoder
        self._attention = attention

    def __call__(
        self, token_ids: Tensor, positions: Tensor, types: Tensor, plan: PackedPlan
    ) -> Tensor:
        hidden: Tensor = self._encoder.body(token_ids, positions, types, self._attention, plan)
        return hidden


class PoolingModel:
    """Turns tokens into vectors or scores.

    Args:
        states: computes hidden states.
        heads: products after the pooling, in order.
        attention: plans packed batches.
        config: the pooling's.
        device: the weights'.
    """

    def __init__(
        self,
        states: TokenStates,
        heads: Sequence[Head],
        attention: PackedAttention,
        config: PoolingConfig,
        device: torch.device,
    ) -> None:
        self._states = states
        self._heads = heads
        self._attention = attention
        self._config = config
        self._device = device

    @torch.inference_mode()
    def run(self, batch: Sequence[Pool]) -> list[bytes | None]:
        """Return each sequence's `Pooled.values`; None if they are not finite.

        Neighbouring sequences of equal length cost least.
        """
        with current_device(self._device):
            return self._run(batch)

    def _run(self, batch: Sequence[Pool]) -> list[bytes | None]:
        lengths = [len(item.token_ids) for item in batch]
        plan = self._attention.plan(lengths)
        hidden = self._states(*self._inputs(batch), plan)
        pooled = _pool(hidden, plan, lengths, self._config.mode)
        for head in self._heads:
            pooled = head(pooled)
        pooled = pooled.float()
        if self._config.sigmoid:
            pooled = pooled.sigmoid()
        return self._values(pooled, batch)

    def _inputs(self, batch: Sequence[Pool]) -> tuple[Tensor, Tensor, Tensor]:
        ids: list[int] = []
        positions: list[int] = []
        types: list[int] = []
        for item in batch:
            length = len(item.token_ids)
            first = length if item.second_from is None else item.second_from
            ids += item.token_ids
            positions += range(length)
            types += [0] * first + [1] * (length - first)
        ids_there, positions_there, types_there = torch.tensor(
            [ids, positions, types], dtype=torch.int64
        ).to(self._device)
        return ids_there, positions_there, types_there

    def _values(self, pooled: Tensor, batch: Sequence[Pool]) -> list[bytes | None]:
        by_size: dict[int | None, list[int]] = {}
        for place, item in enumerate(batch):
            by_size.setdefault(item.dimensions, []).append(place)
        values: list[bytes | None] = [None] * len(batch)
        for size, places in by_size.items():
            part = pooled[:, :size] if len(by_size) == 1 else pooled[places, :size]
            if self._config.normalize:
                part = F.normalize(part, dim=1)
            sound = part.isfinite().all(dim=1).tolist()
            rows = part.cpu().numpy().astype("<f4")
            for place, row, is_sound in zip(places, rows, sound, strict=True):
                values[place] = row.tobytes() if is_sound else None
        return values


def _pool(hidden: Tensor, plan: PackedPlan, lengths: Sequence[int], mode: PoolingMode) -> Tensor:
    """Return `[num_texts, hidden_size]`."""
    starts = plan.starts.long()
    if mode == "cls":
        return hidden[starts[:-1]]
    if mode == "lasttoken":
        return hidden[starts[1:] - 1]
    each = torch.tensor(lengths, device=hidden.device)
    reduced: Tensor = torch.segment_reduce(hidden.float(), mode, lengths=each, axis=0)
    return reduced.to(hidden.dtype)
