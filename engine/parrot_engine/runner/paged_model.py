"""The model as a runner sees it: tokens of a step in, hidden states and logits out."""

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
        """The width of the logits."""
        ...

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int:
        """Layers with attention."""
        ...

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position(self) -> int:
        """The longest context in tokens."""
        ...

    @property
    def windows(self) -> Sequence[int | None]:
        """For each layer the number of keys that a token sees, itself included; None: all."""
        ...

    @property
    def attention_softcap(self) -> float | None:
        """The bound of the scores of attention."""
        ...


class PagedModel(Protocol):
    """A causal language model over a paged cache; see `models.decoder.Decoder` for shapes."""

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
        """Hidden states of a step's tokens, whose keys and values go to `kv_cache`."""
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits for hidden states, in float32; `out` where given."""
        ...
