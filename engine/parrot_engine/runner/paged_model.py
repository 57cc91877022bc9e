"""The runner's view of a model: tokens of a step in, hidden states and logits out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from parrot_engine.attention.interface import AttentionBackend


class ModelShape(Protocol):
    """The sizes in a model's configuration that caches, plans and buffers depend on."""

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int:
        """Return the width of the logits."""
        ...

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int:
        """Return the number of layers with attention."""
        ...

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position(self) -> int:
        """Return the longest context in tokens."""
        ...

    @property
    def windows(self) -> Sequence[int | None]:
        """Return, per layer, the number of keys visible to a token, itself included; None: all."""
        ...

    @property
    def attention_softcap(self) -> float | None:
        """Return the bound of attention scores."""
        ...


class PagedModel(Protocol):
    """A causal language model over a paged cache; `models.decoder.Decoder` describes the shapes."""

    @property
    def config(self) -> ModelShape: ...

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        attention: AttentionBackend[Any],
        plan: Any,
    ) -> Tensor:
        """Return the hidden states of a step's tokens, and write their keys and values to
        `kv_cache`.
        """
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits for hidden states in float32, in `out` if given."""
        ...
